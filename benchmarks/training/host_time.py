"""Host microseconds that the engine adds to a block, compared with plain torch and its wrappers.

    python -m benchmarks host_time [--layers 24] [--width 32] [--rounds 7] [--rows dp,tp,pp,gpu] [--write-figures]

On a GPU this time decides whether the host stays ahead of the device. The model is so narrow that its arithmetic hardly
counts: 24 blocks of width 32 on 8 tokens. Each mode runs steps of 2 and of 6 equal microbatches. The difference is the
time of 4 microbatches, the rest of a step is its fixed time.

Figures are CPU seconds of all threads of all ranks, for each block and microbatch of a rank. "added" is the difference
to plain torch in the same round; "added, collectives apart" also subtracts the bare collectives (equal calls and bytes
over the same backend). Modes run in a new order each round. The figure keeps rows that a run does not measure.
"""

import argparse
import random
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from statistics import median
from typing import NamedTuple

from benchmarks.harness.figures import Cells, record_cells
from benchmarks.harness.team import Team, start_server
from benchmarks.peers.workload import Mode, Workload
from benchmarks.training.comparison import BLOCK_STEPS, WARMUP_STEPS, make_workload, some_of
from engine.models.decoder import DecoderConfig

FEW, MANY = 2, 6
"""Numbers of microbatches of the two compared steps."""
PLAIN = "plain torch"
ALONE = ", its collectives alone"
GROUPS = ("dp", "tp", "pp", "gpu")
APART = "added, collectives apart"
COLUMNS = ("us a block and microbatch", "added", "x plain", "ms a step", APART)


@dataclass(frozen=True, slots=True)
class HostMode:
    """Measured mode, with the plain torch mode that it is compared with."""

    mode: Mode
    base: str = PLAIN
    model: str = "decoder"


def _beside_bare(mode: Mode, base: str = PLAIN, model: str = "decoder") -> tuple[HostMode, HostMode]:
    """A way of Trine to train, and its collectives alone."""
    bare = replace(mode, name=mode.name + ALONE, kind="trine, collectives alone")
    return HostMode(mode, base, model), HostMode(bare, base, model)


MODES: Mapping[str, tuple[HostMode, ...]] = {
    "dp": (
        HostMode(Mode("torch DDP, 2 ranks", "ddp", 2)),
        HostMode(Mode("torch FSDP2, 2 ranks", "fsdp2", 2, stage=3)),
        HostMode(Mode("Trine, 1 rank", "trine", 1)),
        HostMode(Mode("Trine ZeRO 0, 2 ranks", "trine", 2)),
        HostMode(Mode("Trine ZeRO 1, 2 ranks", "trine", 2, stage=1)),
        *_beside_bare(Mode("Trine ZeRO 3, 2 ranks", "trine", 2, stage=3)),
    ),
    "tp": (
        HostMode(Mode("torch DTensor, tp2", "dtensor", 2, axis="tensor")),
        *_beside_bare(Mode("Trine tp2", "trine", 2, axis="tensor")),
    ),
    "pp": (
        HostMode(Mode("torch pipelining, pp2", "pipelining", 2, axis="pipeline")),
        HostMode(Mode("Trine pp2", "trine", 2, axis="pipeline")),
    ),
    "gpu": (
        HostMode(Mode("plain torch, Llama", "plain", 1), "plain torch, Llama", "llama"),
        HostMode(Mode("Trine, Llama", "trine", 1), "plain torch, Llama", "llama"),
        HostMode(
            Mode("Trine, Llama, a GPU's operators", "trine, empty launches", 1), "plain torch, Llama", "llama"
        ),
        *_beside_bare(
            Mode("Trine ZeRO 3, Llama, a GPU's operators, 2 ranks", "trine, empty launches", 2, stage=3),
            "plain torch, Llama", "llama",
        ),
    ),
}  # fmt: skip


class HostTime(NamedTuple):
    """CPU seconds of one mode in one round."""

    block: float
    """CPU seconds of one block and microbatch on one rank, forward and backward."""
    step: float
    """CPU seconds of a step without its microbatches, on one rank."""


Rounds = Sequence[Mapping[str, HostTime]]


def measure(modes: Sequence[HostMode], workload: Workload, rounds: int, steps: int) -> Rounds:
    """Runs every mode in every round, in new processes."""
    start_server()
    found = []
    for turn in range(rounds):
        found.append(_measure_round(modes, workload, steps, turn))
        spent = ", ".join(f"{name} {time.block * 1e6:.0f}" for name, time in found[-1].items())
        print(f"round {turn + 1} of {rounds}, us a block and microbatch: {spent}", file=sys.stderr, flush=True)
    return found


def _measure_round(modes: Sequence[HostMode], workload: Workload, steps: int, turn: int) -> dict[str, HostTime]:
    order = random.Random(turn)
    trials = [(one, count) for one in modes for count in (FEW, MANY)]
    with ExitStack() as stack:
        teams: dict[tuple[str, int], Team] = {}
        for one, count in order.sample(trials, len(trials)):
            team = stack.enter_context(Team(replace(one.mode, accumulation=count), sized(one, count, workload)))
            team.run(WARMUP_STEPS)
            teams[one.mode.name, count] = team
        seconds = dict.fromkeys(teams, 0.0)
        for first in range(0, steps, BLOCK_STEPS):
            for key in order.sample(list(teams), len(teams)):
                seconds[key] += teams[key].run(min(BLOCK_STEPS, steps - first)).cpu_seconds
    return {one.mode.name: split(one, seconds, workload.decoder.layers, steps) for one in modes}


def sized(one: HostMode, count: int, workload: Workload) -> Workload:
    """Returns the workload with microbatches of one sequence."""
    model = None if one.model == "decoder" else one.model
    return replace(workload, sequences=count * one.mode.data_ranks, model=model)  # type: ignore[arg-type]


def split(one: HostMode, seconds: Mapping[tuple[str, int], float], layers: int, steps: int) -> HostTime:
    """Divides the seconds of both steps into seconds per block and per step."""
    few, many = (seconds[one.mode.name, count] / steps / one.mode.ranks for count in (FEW, MANY))
    microbatch = (many - few) / (MANY - FEW)
    blocks = layers / (one.mode.ranks if one.mode.axis == "pipeline" else 1)
    return HostTime(microbatch / blocks, few - FEW * microbatch)


def cells(modes: Sequence[HostMode], rounds: Rounds) -> Cells:
    """Formats the medians over rounds, in microseconds and milliseconds."""
    made: dict[tuple[str, str], str] = {}
    for one in modes:
        times = [found[one.mode.name] for found in rounds]
        bases = [found[one.base] for found in rounds]
        added = median(time.block - base.block for time, base in zip(times, bases, strict=True))
        ratio = median(time.block / base.block for time, base in zip(times, bases, strict=True))
        block, step = (median(values) for values in zip(*times, strict=True))
        apart = _without_collectives(one, rounds)
        texts = (f"{block * 1e6:.0f}", f"{added * 1e6:+.0f}", f"{ratio:.2f}", f"{step * 1e3:.1f}", apart)
        made |= {(one.mode.name, column): text for column, text in zip(COLUMNS, texts, strict=True)}
    return made


def _without_collectives(one: HostMode, rounds: Rounds) -> str:
    """Return what a way adds beside its collectives, or nothing where these are not measured."""
    bare = one.mode.name + ALONE
    if any(bare not in found for found in rounds):
        return ""
    left = (found[one.mode.name].block - found[bare].block - found[one.base].block for found in rounds)
    return f"{median(left) * 1e6:+.0f}"


def table(found: Cells) -> str:
    """Formats the cells as aligned text."""
    rows = list(dict.fromkeys(row for row, _ in found))
    width = max(map(len, rows))
    lines = ["  ".join([" " * width, *COLUMNS])]
    for row in rows:
        texts = [f"{found[row, column]:>{len(column)}}" for column in COLUMNS]
        lines.append("  ".join([f"{row:{width}}", *texts]))
    return "\n".join(lines)


def chosen_modes(groups: Sequence[str]) -> tuple[HostMode, ...]:
    """Returns plain torch and the modes of ``groups``."""
    return (HostMode(Mode(PLAIN, "plain", 1)), *(one for group in groups for one in MODES[group]))


def _parse(command: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks host_time", description="Host time of a block.")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=8, help="of a microbatch")
    parser.add_argument("--rounds", type=int, default=7, help="fresh processes each")
    parser.add_argument("--steps", type=int, default=10, help="timed steps a round and mode")
    parser.add_argument(
        "--rows", type=some_of(GROUPS, "no rows are called {}"), default=GROUPS, help="some of dp,tp,pp,gpu"
    )
    parser.add_argument("--write-figures", action="store_true", help="keep the table in docs/figures and show it")
    return parser.parse_args(command)


def main(command: Sequence[str] | None = None) -> int:
    """Measures and prints; always returns 0, since the target is another host."""
    arguments = _parse(command)
    decoder = DecoderConfig(layers=arguments.layers, width=arguments.width, heads=2, context=arguments.tokens)
    workload = replace(make_workload(), decoder=decoder)
    modes = chosen_modes(arguments.rows)
    found = cells(modes, measure(modes, workload, arguments.rounds, arguments.steps))
    print(table(found))
    if arguments.write_figures:
        record_cells("host-time", "CPU time of a rank", found)
    return 0
