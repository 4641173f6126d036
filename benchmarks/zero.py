"""What sharing state among data ranks costs: Trine's ZeRO stages beside torch DDP, torch FSDP2 and DeepSpeed.

    python -m benchmarks.zero [--stages 0,1,2,3] [--peers fsdp,deepspeed] [--rounds 7] [--accumulation 1] [--out FILE]
    python -m benchmarks.zero --profile "Trine ZeRO-2" [--steps 10]

Model, data, AdamW, clipping and rounds are those of ``benchmarks.step``. Exit code 1 when Trine uses more CPU than
DDP beyond the limit of a stage, or when a row's loss is not DDP's: CPU seconds, user and system, of all ranks are
the figure to judge by.

*sent MB* and *calls* are counted alike for all rows, in an untimed step, where torch's dispatcher passes collectives on
(``ring``); *on wire MB* is read at the loopback interface and shows what gloo makes of them: its reduce-scatter sends
what an all-reduce does. *state MB* is what tensors take between steps, *live MB* at the optimizer's update, *step MB*
at most within a step, activations included (``footprint``).

DeepSpeed is optional and in no other extra: ``DS_BUILD_OPS=0 pip install -e ".[bench-deepspeed]"``, in an environment
of its own if you like, whose python then runs this. No launcher is needed: the ranks are forked as all others here and
set RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and DS_ACCELERATOR=cpu themselves; the backend is gloo.
Its first start compiles an extension, which takes a C++ compiler and a minute or two; it is made before the rounds.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TypeVar

from benchmarks.figures import record_text
from benchmarks.peers import Workload
from benchmarks.rows import PEERS, STAGES, Lineup, Peer, make_zero_lineup
from benchmarks.step import add_options, check_options, make_workload, profile, run
from benchmarks.timing import Team, start_server

P = TypeVar("P", bound=str)
MISSING = (
    "DeepSpeed cannot be imported, its rows are left out: "
    "DS_BUILD_OPS=0 pip install -e '.[bench-deepspeed]' brings them."
)


def importable(peers: Sequence[P]) -> tuple[P, ...]:
    """Those of ``peers`` that can run here; of DeepSpeed one line is printed if it cannot."""
    if "deepspeed" not in peers or find_spec("deepspeed") is not None:
        return tuple(peers)
    print(MISSING, flush=True)
    return tuple(peer for peer in peers if peer != "deepspeed")


def compile_once(lineup: Lineup, workload: Workload) -> None:
    """Start DeepSpeed once, if it is asked for, so that no round's start-up contains its compiler."""
    modes = [mode for mode in lineup.modes if mode.kind == "deepspeed"]
    if modes:
        start_server()
        Team(modes[0], workload).close()


def _parse(command: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.zero", description="Cost of sharing state.")
    parser.add_argument("--stages", type=_stages, default=STAGES, help="some of 0,1,2,3; all by default")
    parser.add_argument("--peers", type=_peers, default=PEERS, help="some of fsdp,deepspeed, or none; all by default")
    add_options(parser)
    arguments = parser.parse_args(command)
    check_options(parser, arguments, make_zero_lineup(arguments.ranks, arguments.accumulation).modes)
    return arguments


def _stages(text: str) -> tuple[int, ...]:
    known = {str(stage): stage for stage in STAGES}
    if unknown := set(text.split(",")) - set(known):
        raise argparse.ArgumentTypeError(f"there is no stage {', '.join(sorted(unknown))}; choose of 0,1,2,3")
    return tuple(stage for name, stage in known.items() if name in text.split(","))


def _peers(text: str) -> tuple[Peer, ...]:
    asked = set(text.split(",")) - {"none"}
    if unknown := asked - set(PEERS):
        raise argparse.ArgumentTypeError(f"no peers are called {', '.join(sorted(unknown))}; choose of fsdp,deepspeed")
    return tuple(peer for peer in PEERS if peer in asked)


def main(command: Sequence[str] | None = None) -> int:
    """Measure, print, write; 0 when every check passed."""
    arguments = _parse(command)
    workload = make_workload(arguments)
    if arguments.profile:
        modes = make_zero_lineup(arguments.ranks, arguments.accumulation).modes
        print(profile(modes, arguments.profile, workload, arguments.steps))
        return 0
    lineup = make_zero_lineup(arguments.ranks, arguments.accumulation, arguments.stages, importable(arguments.peers))
    compile_once(lineup, workload)
    text, passed = run(arguments, lineup, workload)
    if arguments.write_figures:
        record_text("zero", f"```\n{text}\n```")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
