"""Faults of rounds between hosts, which a plan counts, and of the state that recomputed blocks keep."""

from tests.faults.fault import Fault

ROUNDS_AND_SECOND_RUNS = (
    Fault(
        name="rounds-of-gathers-unplanned",
        about="The plan leaves out the rounds in which hosts agree on gathers, so that a step sends more than planned.",
        file="engine/planning/budgets.py",
        old="    rows.append(Traffic(axis, ROUND, rounds, said))\n",
        new="",
        tests=("tests/zero/test_traffic.py::test_bytes_and_calls_of_a_step_meet_the_formula",),
    ),
    Fault(
        name="attributes-on-layers-of-torch-have-two-runs",
        about="A counter that a recomputed block keeps on a linear layer counts its second run as well.",
        file="parallel/activation_checkpointing/second_run.py",
        old='        and vars(module).keys() - _LEFT - {"training"} <= set(getattr(kind, "__constants__", ()))\n',
        new="",
        tests=("tests/parallel/activation_checkpointing/test_second_run.py",),
    ),
)
