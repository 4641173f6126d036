"""Times training steps of several modes in interleaved rounds, and prints a table and verdicts.

Shared by the benchmarks of this folder: options, rounds and output.
"""

import argparse
import json
import os
import platform
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from benchmarks.harness.report import (
    LOSS_STEP,
    Rounds,
    Sample,
    as_json,
    judge,
    loss_spread,
    table,
    wrong_losses,
)
from benchmarks.harness.startup import launch
from benchmarks.harness.team import Block, Team, start_server
from benchmarks.peers.workload import PEERS, Kind, Mode, Workload
from benchmarks.training.lineups import Lineup

WARMUP_STEPS = 3
BLOCK_STEPS = 5
"""Number of steps that a mode takes per turn."""
MISSING = (
    "DeepSpeed cannot be imported, its rows are left out: "
    "DS_BUILD_OPS=0 pip install -e '.[bench-deepspeed]' brings them."
)


@dataclass(frozen=True, slots=True)
class Effort:
    """Numbers of rounds and steps."""

    rounds: int = 7
    steps: int = 10
    """Timed steps of each mode per round, after the warm-up."""


def measure(modes: Sequence[Mode], workload: Workload, effort: Effort) -> Rounds:
    """Runs all rounds, each in new processes."""
    start_server()
    rounds = []
    for turn in range(effort.rounds):
        samples = _measure_round(modes, workload, effort.steps, turn)
        rounds.append(samples)
        spent = ", ".join(f"{sample.mode} {sample.cpu_seconds:.3f}" for sample in samples)
        print(f"round {turn + 1} of {effort.rounds}, CPU s per step: {spent}", file=sys.stderr, flush=True)
    return rounds


def _measure_round(modes: Sequence[Mode], workload: Workload, steps: int, turn: int) -> list[Sample]:
    """Every mode once: started and warmed up alone, then in turns of a few steps, in a new order each time.

    The order is shuffled and not rotated: neighbours in time share the machine's mood, and DDP must not
    always be the neighbour of its control, or their spread would look smaller than that of other pairs.
    """
    order = random.Random(turn)
    with ExitStack() as stack:
        teams: dict[Mode, Team] = {}
        losses: dict[Mode, tuple[float, ...]] = {}
        for mode in order.sample(modes, len(modes)):
            teams[mode] = stack.enter_context(Team(mode, workload))
            losses[mode] = teams[mode].run(WARMUP_STEPS).losses
        blocks: dict[Mode, list[Block]] = {mode: [] for mode in modes}
        for first in range(0, steps, BLOCK_STEPS):
            for mode in order.sample(modes, len(modes)):
                blocks[mode].append(teams[mode].run(min(BLOCK_STEPS, steps - first)))
                losses[mode] += blocks[mode][-1].losses
        return [_sample(teams[mode], blocks[mode], losses[mode][:LOSS_STEP][-1]) for mode in modes]


def _sample(team: Team, blocks: Sequence[Block], loss: float) -> Sample:
    steps = sum(block.steps for block in blocks)
    crossed = [block.loopback_bytes for block in blocks if block.loopback_bytes is not None]
    return Sample(
        mode=team.mode.name,
        seconds=sum(block.seconds for block in blocks) / steps,
        cpu_seconds=sum(block.cpu_seconds for block in blocks) / steps,
        startup_seconds=team.startup_seconds,
        loss=loss,
        loopback_bytes=sum(crossed) // steps if crossed else None,
        footprint=team.footprint(),
    )


def conclude(rounds: Rounds, lineup: Lineup) -> tuple[str, dict[str, Any], bool]:
    """Returns (text, JSON object, True if all checks passed)."""
    verdicts = [judge(rounds, asked) for asked in lineup.comparisons]
    limit = lineup.loss_tolerance
    apart, wrong = loss_spread(rounds), wrong_losses(rounds, lineup.baseline.modes, limit)
    agree = apart <= limit and not wrong
    losses = f"losses of all modes and rounds within {apart:.1e}; limit {limit:.0e} -> "
    lines = [table(rounds, lineup.baseline, lineup.columns), "", *map(str, verdicts)]
    lines.append(losses + ("pass" if agree else "FAIL"))
    lines += [f"WRONG: the loss of {mode} is off by {distance:.1e}" for mode, distance in wrong.items()]
    return "\n".join(lines), as_json(rounds, verdicts), agree and all(verdict.passed for verdict in verdicts)


def profile(modes: Sequence[Mode], name: str, workload: Workload, steps: int) -> str:
    """Profiles the mode called ``name`` alone; returns the functions of rank 0 with most time."""
    start_server()
    with Team(next(mode for mode in modes if mode.name == name), workload) as team:
        team.run(WARMUP_STEPS)
        return team.profile(2 * steps)


def _conditions(arguments: argparse.Namespace, workload: Workload) -> dict[str, Any]:
    """What a reader needs to repeat the run; nothing that names the machine."""
    optional = {name: version(name) for name in ("deepspeed",) if find_spec(name)}
    return {
        "versions": {"python": platform.python_version(), "torch": torch.__version__} | optional,
        "machine": {"cpus": os.cpu_count(), "architecture": platform.machine(), "load_at_start": os.getloadavg()[0]},
        "run": {name: value for name, value in vars(arguments).items() if name != "out"},
        "workload": asdict(workload),
    }


T = TypeVar("T")


def some_of(known: Sequence[T], refusal: str, or_none: bool = False) -> Callable[[str], tuple[T, ...]]:
    """Returns a parser of a comma-separated option with items of ``known``; ``refusal``: error text with {}."""
    by_name = {str(one): one for one in known}

    def read(text: str) -> tuple[T, ...]:
        asked = set(text.split(",")) - ({"none"} if or_none else set())
        if unknown := ", ".join(sorted(asked - set(by_name))):
            raise argparse.ArgumentTypeError(f"{refusal.format(unknown)}; choose of {','.join(by_name)}")
        return tuple(one for name, one in by_name.items() if name in asked)

    return read


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options common to all step benchmarks."""
    parser.add_argument("--ranks", type=int, default=4, help="of every mode but one process")
    parser.add_argument("--rounds", type=int, default=7, help="fresh processes each")
    parser.add_argument(
        "--peers",
        type=some_of(PEERS, "no peers are called {}", or_none=True),
        default=PEERS,
        help=f"some of {','.join(PEERS)}, or none; all by default",
    )
    parser.add_argument("--steps", type=int, default=10, help="timed steps a round and mode")
    parser.add_argument("--accumulation", type=int, default=1, help="microbatches a step; the batch stays the same")
    parser.add_argument("--bucket", type=int, help="Trine's reduce_bucket_size in elements")
    parser.add_argument("--adamw", choices=("fused", "default"), default="fused", help="kernel of the peers' AdamW")
    parser.add_argument("--profile", metavar="MODE", help="no table: where rank 0 of this row spends its time")
    parser.add_argument("--torchrun", action="store_true", help="also start every mode once under torchrun")
    parser.add_argument("--out", type=Path, help="folder for all samples, as NAME.json")
    parser.add_argument("--write-figures", action="store_true", help="keep the tables in docs/figures and show them")


def check_options(parser: argparse.ArgumentParser, arguments: argparse.Namespace, modes: Sequence[Mode]) -> None:
    """Refuses unequal microbatches and a profile of an unknown mode."""
    sequences = Workload().sequences
    if any(sequences % (mode.data_ranks * mode.accumulation) for mode in modes):
        shares = "ranks x accumulation" if any(mode.data_ranks > 1 for mode in modes) else "accumulation"
        parser.error(f"{shares} must divide the batch of {sequences} sequences")
    names = [mode.name for mode in modes]
    if arguments.profile not in (None, *names):
        parser.error(f"no row is called {arguments.profile!r}; there are: {'; '.join(names)}")


def make_workload(bucket: int | None = None, adamw: Literal["fused", "default"] = "fused") -> Workload:
    """Returns the standard workload with the changes of ``--bucket`` and ``--adamw``; ranks use one thread."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    return replace(Workload(), bucket_elements=bucket, optimizer_kernel=adamw)


def runnable(lineup: Lineup, peers: Sequence[Kind]) -> Lineup:
    """Returns the rows of ``lineup`` that ``peers`` select and that can run here; prints a line if DeepSpeed cannot.

    DeepSpeed starts once, so that start-up times exclude its compiler.
    """
    lineup = lineup.of_peers(peers)
    modes = [mode for mode in lineup.modes if mode.kind == "deepspeed"]
    if not modes:
        return lineup
    if find_spec("deepspeed") is None:
        print(MISSING, flush=True)
        return lineup.of_peers([peer for peer in peers if peer != "deepspeed"])
    start_server()
    Team(modes[0], Workload()).close()
    return lineup


def run(
    name: str,
    arguments: argparse.Namespace,
    lineup: Lineup,
    workload: Workload,
    found: Mapping[str, Any] | None = None,
) -> tuple[str, bool]:
    """Measures, prints and writes results; returns (printed text, True if all checks passed).

    ``name``: name of the file in ``--out``. ``found``: further results to write.
    """
    conditions = _conditions(arguments, workload)
    rounds = measure(lineup.modes, workload, Effort(arguments.rounds, arguments.steps))
    text, figures, passed = conclude(rounds, lineup)
    print(text)
    if arguments.torchrun:
        figures["torchrun_startup_seconds"] = started = {
            mode.name: launch(mode) for mode in lineup.modes if mode.ranks > 1
        }
        print("start-up under torchrun, s: " + ", ".join(f"{mode} {seconds:.1f}" for mode, seconds in started.items()))
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        told = json.dumps(conditions | figures | dict(found or {}), indent=1)
        (arguments.out / f"{name}.json").write_text(told + "\n", encoding="ascii")
    return text, passed
