"""Times ZeRO stages: Trine, torch DDP, torch FSDP2 and DeepSpeed.

    python -m benchmarks zero [--stages 0,1,2,3] [--peers fsdp2,deepspeed] [--rounds 7] [--out FOLDER]
    python -m benchmarks zero --profile "Trine ZeRO-2" [--steps 10]

Model, data, AdamW, clipping and rounds as in ``step``. Exit code 1 when Trine exceeds DDP's CPU seconds (user and
system, all ranks) by more than the limit of a stage, or when a loss differs from DDP's.

*sent MB* and *calls* are counted at torch's dispatcher in an untimed step (``sent_bytes``); *on wire MB* is read at the
loopback interface: gloo's reduce-scatter sends as much as an all-reduce. *state MB* is tensor memory between steps,
*live MB* at the optimizer's update, *step MB* at the peak of a step (``footprint``).

DeepSpeed is optional: ``DS_BUILD_OPS=0 pip install -e ".[bench-deepspeed]"``. No launcher is needed: the forked ranks
set RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and DS_ACCELERATOR=cpu; the backend is gloo. Its first start
compiles an extension before the rounds, which needs a C++ compiler and a minute or two.
"""

import argparse
from collections.abc import Sequence

from benchmarks.harness.figures import record_text
from benchmarks.training.comparison import add_options, check_options, make_workload, profile, run, runnable, some_of
from benchmarks.training.lineups import STAGES, make_zero_lineup


def _parse(command: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks zero", description="Cost of sharing state.")
    parser.add_argument(
        "--stages", type=some_of(STAGES, "there is no stage {}"), default=STAGES, help="some of 0,1,2,3; all by default"
    )
    add_options(parser)
    arguments = parser.parse_args(command)
    check_options(parser, arguments, make_zero_lineup(arguments.ranks, arguments.accumulation).modes)
    return arguments


def main(command: Sequence[str] | None = None) -> int:
    """Measures, prints and writes results; returns 0 if every check passed."""
    arguments = _parse(command)
    workload = make_workload(arguments.bucket, arguments.adamw)
    if arguments.profile:
        modes = make_zero_lineup(arguments.ranks, arguments.accumulation).modes
        print(profile(modes, arguments.profile, workload, arguments.steps))
        return 0
    lineup = runnable(make_zero_lineup(arguments.ranks, arguments.accumulation, arguments.stages), arguments.peers)
    text, passed = run("zero", arguments, lineup, workload)
    if arguments.write_figures:
        record_text("zero", f"```\n{text}\n```")
    return 0 if passed else 1
