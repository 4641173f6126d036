"""Faults of adapters of stacked experts, which data ranks share with the experts."""

from tests.faults.fault import Fault

_TRAINED = "tests/engine/parity/test_experts.py::test_adapters_of_stacks_are_shared_with_their_experts[ep2-3]"
_PROOF = "tests/parallel/experts/test_adapted.py"

ADAPTED_EXPERTS = (
    Fault(
        name="adapter-cut-at-other-experts",
        about="The second half of a pair, in which experts alternate, is cut as if each expert had a run of columns.",
        file="engine/planning/expert_plan.py",
        old="cuts = {name: expert_cut(each.experts, ranks, own) for",
        new="cuts = {name: expert_cut(each.experts, ranks, type(own)(own.rows, own.dim)) for",
        tests=(_TRAINED,),
    ),
    Fault(
        name="ranges-of-alternate-experts",
        about="Ranges of alternate experts begin with the rows of the last experts.",
        file="parallel/experts/forms.py",
        old="for at in starts for rank in ranks)",
        new="for at in reversed(starts) for rank in ranks)",
        tests=("tests/parallel/experts/test_forms.py::test_ranges_of_a_packing_are_the_experts_of_each_rank",),
    ),
    Fault(
        name="inactive-adapter-proven",
        about="An adapter that no result shows is divided in the first way, which its activation shows to be wrong.",
        file="parallel/experts/proof.py",
        old="if idle := trial.without_effect():",
        new='if idle := "":',
        tests=(f"{_PROOF}::test_an_inactive_adapter_is_a_reason",),
    ),
    Fault(
        name="rows-of-adapted-experts-counted-inside",
        about="Rows are counted at the stack inside its adapters, where they are those of the experts of a rank.",
        file="engine/program/expert_load.py",
        old="ExpertStack(adapters.get(module, name), count)",
        new="ExpertStack(name, count)",
        tests=(_TRAINED,),
    ),
)
