"""What sharing state among data ranks costs: Trine's ZeRO stages beside torch DDP, torch FSDP2 and DeepSpeed.

    python -m benchmarks zero [--stages 0,1,2,3] [--peers fsdp2,deepspeed] [--rounds 7] [--out FOLDER]
    python -m benchmarks zero --profile "Trine ZeRO-2" [--steps 10]

Model, data, AdamW, clipping and rounds are those of ``step``. Exit code 1 when Trine uses more CPU than
DDP beyond the limit of a stage, or when a row's loss is not DDP's: CPU seconds, user and system, of all ranks are
the figure to judge by.

*sent MB* and *calls* are counted alike for all rows, in an untimed step, where torch's dispatcher passes collectives on
(``sent_bytes``); *on wire MB* is read at the loopback interface and shows what gloo makes of them: its reduce-scatter
sends what an all-reduce does. *state MB* is what tensors take between steps, *live MB* at the optimizer's update,
*step MB* at most within a step, activations included (``footprint``).

DeepSpeed is optional and in no other extra: ``DS_BUILD_OPS=0 pip install -e ".[bench-deepspeed]"``, in an environment
of its own if you like, whose python then runs this. No launcher is needed: the ranks are forked as all others here and
set RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and DS_ACCELERATOR=cpu themselves; the backend is gloo.
Its first start compiles an extension, which takes a C++ compiler and a minute or two; it is made before the rounds.
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
    workload = make_workload(arguments)
    if arguments.profile:
        modes = make_zero_lineup(arguments.ranks, arguments.accumulation).modes
        print(profile(modes, arguments.profile, workload, arguments.steps))
        return 0
    lineup = runnable(make_zero_lineup(arguments.ranks, arguments.accumulation, arguments.stages), arguments.peers)
    text, passed = run("zero", arguments, lineup, workload)
    if arguments.write_figures:
        record_text("zero", f"```\n{text}\n```")
    return 0 if passed else 1
