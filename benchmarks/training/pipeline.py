"""Times pipeline schedules: Trine, torch.distributed.pipelining and DeepSpeed's PipelineModule.

    python -m benchmarks pipeline [--schedules 1f1b,interleaved,zb-v] [--peers pipelining,deepspeed] [--ranks 4]
                                  [--accumulation 8] [--rounds 7] [--steps 10] [--write-figures] [--out FOLDER]
    python -m benchmarks pipeline --profile "Trine 1f1b" [--steps 10]

Model, data, AdamW and rounds as in ``step``, with 8 microbatches and a norm limit so low that every step is clipped.
torch's 1F1B needs at least as many microbatches as stages, its interleaved schedule whole rounds of them. Exit code 1
when Trine uses more CPU seconds (user and system, all ranks) than a peer with the same schedule, when a loss differs
from one process, or when Trine's clipping is wrong.

*sent MB* and *calls* are counted at torch's dispatcher in an untimed step (``sent_bytes``). *step MB* is the peak of
tensor memory in a step, *held MB* the same without parameters, gradients and moments (``footprint``). Both are of the
largest rank.

*clip* is the largest difference of a weight from one process after a few steps, with the framework's own clipping or,
without one, its tutorial's: ``clip_grad_norm_`` over a rank's parameters. Timed steps are clipped by the norm of the
whole model.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from benchmarks.harness.figures import record_text
from benchmarks.harness.report import Column
from benchmarks.harness.team import Team, start_server
from benchmarks.peers.workload import Mode, Workload
from benchmarks.training.comparison import add_options, check_options, make_workload, profile, run, runnable, some_of
from benchmarks.training.lineups import AGAIN, SCHEDULES, Lineup, make_pipeline_lineup

MICROBATCHES = 8
CLIP = 0.1
"""Clipping norm below the norm of every step, which is 0.4 to 4."""
EPSILON = 1e-5
CLIPPED_STEPS = 5
WEIGHT_TOLERANCE = 1e-5
"""Maximum weight difference after ``CLIPPED_STEPS`` steps, due to the order of sums."""


def measure_clipping(modes: Sequence[Mode], workload: Workload) -> dict[str, float]:
    """Returns, by mode, the maximum weight difference to the first mode after ``CLIPPED_STEPS`` clipped steps."""
    start_server()
    right, found = None, {}
    for mode in modes:
        if AGAIN in mode.name:
            continue
        with Team(replace(mode, own_clipping=True), workload) as team:
            team.run(CLIPPED_STEPS)
            weights = team.weights()
        right = right or weights
        distances = [(weights[name] - whole).abs().max() for name, whole in right.items()]
        found[mode.name] = torch.stack(distances).max().item()  # not a number if any is none
    return found


def judge_clipping(apart: Mapping[str, float]) -> tuple[str, bool]:
    """Returns (text about correct and wrong clipping, True if all of Trine's modes are correct)."""
    right = [name for name, distance in apart.items() if distance <= WEIGHT_TOLERANCE]
    wrong = [name for name in apart if name not in right]  # also what is not a number
    passed = not any(name.startswith("Trine") for name in wrong)
    title = f"clipping moves no weight further than {WEIGHT_TOLERANCE:.0e} from one process: "
    lines = [f"{title}{'; '.join(right)} -> {'pass' if passed else 'FAIL'}"]
    lines += [f"clipping by another norm than the model's: {'; '.join(wrong)}"] if wrong else []
    return "\n".join(lines), passed


def that_starts(lineup: Lineup) -> Lineup:
    """Returns the rows that the installed torch can run; prints a line about each other one.

    In a V the last rank has neighbouring stages, which some versions of torch connect by a message to itself that gloo
    refuses.
    """
    from torch.distributed.pipelining import PipelineStage  # seconds of imports, for this command alone

    refused = [mode for mode in lineup.modes if mode.kind == "pipelining" and mode.schedule == "zb-v"]
    if not refused or hasattr(PipelineStage, "_warmup_forward_vote"):
        return lineup
    print(
        f"torch zb-v is left out: torch {torch.__version__} starts a V by a message of a rank to itself, which gloo "
        "refuses.",
        flush=True,
    )
    return lineup.without(refused)


def _clipping_column(apart: Mapping[str, float]) -> Column:
    return Column("clip", lambda row: f"{apart[row.mode.removesuffix(AGAIN)]:.0e}")


def _parse(command: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks pipeline", description="Cost of a pipeline.")
    parser.add_argument(
        "--schedules",
        type=some_of(SCHEDULES, "no schedules are called {}"),
        default=SCHEDULES,
        help="some of 1f1b,interleaved,zb-v",
    )
    add_options(parser)
    parser.set_defaults(accumulation=MICROBATCHES)
    arguments = parser.parse_args(command)
    check_options(parser, arguments, make_pipeline_lineup(arguments.ranks, arguments.accumulation).modes)
    _check_stages(parser, arguments)
    return arguments


def _check_stages(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    blocks, microbatches = Workload().decoder.layers, arguments.accumulation
    stages = arguments.ranks * (1 if arguments.schedules == ("1f1b",) else 2)
    if stages > blocks:
        parser.error(f"{stages} stages are more than the {blocks} layers; choose fewer ranks, or --schedules 1f1b")
    if microbatches < arguments.ranks:
        parser.error(f"{microbatches} microbatches are fewer than {arguments.ranks} ranks, which torch refuses")


def _measure(arguments: argparse.Namespace, lineup: Lineup, workload: Workload) -> tuple[str, bool]:
    apart = measure_clipping(lineup.modes, workload)
    lineup = replace(lineup, columns=(*lineup.columns, _clipping_column(apart)))
    text, passed = run("pipeline", arguments, lineup, workload, {"clipping": apart})
    told, right = judge_clipping(apart)
    print(told)
    return f"{text}\n{told}", passed and right


def main(command: Sequence[str] | None = None) -> int:
    """Measures, prints and writes results; returns 0 if every check passed."""
    arguments = _parse(command)
    workload = replace(make_workload(arguments.bucket, arguments.adamw), clip=CLIP, epsilon=EPSILON)
    if arguments.profile:
        modes = make_pipeline_lineup(arguments.ranks, arguments.accumulation).modes
        print(profile(modes, arguments.profile, workload, arguments.steps))
        return 0
    lineup = that_starts(
        runnable(make_pipeline_lineup(arguments.ranks, arguments.accumulation, arguments.schedules), arguments.peers)
    )
    text, passed = _measure(arguments, lineup, workload)
    if arguments.write_figures:
        record_text("pipeline", f"```\n{text}\n```")
    return 0 if passed else 1
