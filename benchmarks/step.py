"""What one training step costs: Trine beside what torch offers for the same, on the CPU over gloo.

    python -m benchmarks.step [--rows dp,tp,pp] [--ranks 4] [--rounds 7] [--steps 10] [--accumulation 1] [--out FILE]
    python -m benchmarks.step --profile "Trine tp4" [--steps 10]

Exit code 1 when Trine uses more CPU than its peer beyond the limit, or when losses differ. CPU seconds are
the figure to judge by: on a shared machine wall time measures the neighbours.

Bytes sent are those of the rank that sends most, by ring convention, counted in an untimed step (``ring``).
"""

import argparse
import json
import os
import platform
import random
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.figures import record_text
from benchmarks.peers import Mode, Workload
from benchmarks.report import (
    LOSS_STEP,
    Rounds,
    Sample,
    as_json,
    judge,
    loss_spread,
    table,
    wrong_losses,
)
from benchmarks.rows import GROUPS, Group, Lineup, make_lineup
from benchmarks.startup import launch
from benchmarks.timing import Block, Team, start_server

WARMUP_STEPS = 3
BLOCK_STEPS = 5
"""Steps that a mode takes before the next has its turn."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to measure."""

    rounds: int = 7
    steps: int = 10
    """Timed steps of each mode in each round, after the warm-up."""


def measure(modes: Sequence[Mode], workload: Workload, effort: Effort) -> Rounds:
    """All rounds; each starts new processes, so that start-up and memory layout are sampled too."""
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
    """(text for people, the same for programs, whether all is well)."""
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
    """The top functions of rank 0 of the one of ``modes`` that is called ``name``, alone."""
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


def add_options(parser: argparse.ArgumentParser) -> None:
    """What can be said to every benchmark of steps."""
    parser.add_argument("--ranks", type=int, default=4, help="of every mode but one process")
    parser.add_argument("--rounds", type=int, default=7, help="fresh processes each")
    parser.add_argument("--steps", type=int, default=10, help="timed steps a round and mode")
    parser.add_argument("--accumulation", type=int, default=1, help="microbatches a step; the batch stays the same")
    parser.add_argument("--bucket", type=int, help="Trine's reduce_bucket_size in elements")
    parser.add_argument("--adamw", choices=("fused", "default"), default="fused", help="kernel of the peers' AdamW")
    parser.add_argument("--profile", metavar="MODE", help="no table: where rank 0 of this row spends its time")
    parser.add_argument("--torchrun", action="store_true", help="also start every mode once under torchrun")
    parser.add_argument("--out", type=Path, help="write all samples to this JSON file")
    parser.add_argument("--write-figures", action="store_true", help="keep the tables in docs/figures and show them")


def check_options(parser: argparse.ArgumentParser, arguments: argparse.Namespace, modes: Sequence[Mode]) -> None:
    """Refuse, by way of ``parser``, microbatches that would not be equal and a profile of none of ``modes``."""
    sequences = Workload().sequences
    if any(sequences % (mode.data_ranks * mode.accumulation) for mode in modes):
        shares = "ranks x accumulation" if any(mode.data_ranks > 1 for mode in modes) else "accumulation"
        parser.error(f"{shares} must divide the batch of {sequences} sequences")
    names = [mode.name for mode in modes]
    if arguments.profile not in (None, *names):
        parser.error(f"no row is called {arguments.profile!r}; there are: {'; '.join(names)}")


def make_workload(arguments: argparse.Namespace) -> Workload:
    """The standard one but for what the command line changes; ranks get one thread each."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    return replace(Workload(), bucket_elements=arguments.bucket, optimizer_kernel=arguments.adamw)


def run(
    arguments: argparse.Namespace, lineup: Lineup, workload: Workload, found: Mapping[str, Any] | None = None
) -> tuple[str, bool]:
    """Measure, print and write what the command line asks for; (the text printed, whether all is well).

    ``found``: what else is known by now and shall be written.
    """
    conditions = _conditions(arguments, workload)
    rounds = measure(lineup.modes, workload, Effort(arguments.rounds, arguments.steps))
    text, figures, passed = conclude(rounds, lineup)
    print(text)
    if arguments.torchrun:
        figures["torchrun_startup_seconds"] = started = {
            mode.name: launch(mode) for mode in lineup.modes if mode.ranks > 1
        }
        print("start-up under torchrun, s: " + ", ".join(f"{name} {seconds:.1f}" for name, seconds in started.items()))
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(
            json.dumps(conditions | figures | dict(found or {}), indent=1) + "\n", encoding="ascii"
        )
    return text, passed


def _parse(command: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step", description="Cost of one training step.")
    parser.add_argument("--rows", type=_groups, default=GROUPS, help="some of dp,tp,pp; all by default")
    add_options(parser)
    arguments = parser.parse_args(command)
    workload, ranks = Workload(), arguments.ranks
    check_options(parser, arguments, make_lineup(ranks, arguments.accumulation).modes)
    if "tp" in arguments.rows and workload.decoder.heads % ranks:
        parser.error(f"ranks must divide the {workload.decoder.heads} heads for tp; leave tp out of --rows")
    if "pp" in arguments.rows and ranks > workload.decoder.layers:
        parser.error(f"pp has at most one rank for each of {workload.decoder.layers} layers; leave pp out of --rows")
    return arguments


def _groups(text: str) -> tuple[Group, ...]:
    asked = text.split(",")
    if unknown := set(asked) - set(GROUPS):
        raise argparse.ArgumentTypeError(f"no rows are called {', '.join(sorted(unknown))}; choose of dp,tp,pp")
    return tuple(group for group in GROUPS if group in asked)


def main(command: Sequence[str] | None = None) -> int:
    """Measure, print, write; 0 when every check passed."""
    arguments = _parse(command)
    workload = make_workload(arguments)
    if arguments.profile:
        modes = make_lineup(arguments.ranks, arguments.accumulation).modes
        print(profile(modes, arguments.profile, workload, arguments.steps))
        return 0
    text, passed = run(arguments, make_lineup(arguments.ranks, arguments.accumulation, arguments.rows), workload)
    if arguments.write_figures:
        record_text("step", f"```\n{text}\n```")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
