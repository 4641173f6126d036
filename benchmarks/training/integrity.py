"""CPU seconds of a step without the checks of ``integrity``, and with checks every 1, 10 and 100 steps.

One process and thread; the engines run steps in turns, in a new order each round. Digests of a step cost the same for
every interval; ``tokens`` sets the work of the step that they are compared with.
"""

import argparse
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from statistics import mean, median
from typing import Any, NamedTuple

import torch

import engine
from benchmarks.harness.figures import record_cells
from engine.integrity.guard import Integrity
from engine.models.decoder import Decoder, DecoderConfig, loss_sum

EVERY = (0, 1, 10, 100)
VOCABULARY, LENGTH = 8192, 256
STEPS = 2
"""Number of steps that an engine takes per turn."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks integrity", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="turns of every engine")
    parser.add_argument("--rows", type=int, default=4, help=f"of {LENGTH} tokens in a step")
    parser.add_argument("--write-figures", action="store_true", help="keep the table in docs/figures and show it")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    cells = cells_of(measure(asked.rounds, asked.rows), asked.rows * LENGTH)
    for (row, column), text in cells.items():
        print(f"{row:12} {column:16} {text}")
    if asked.write_figures:
        record_cells("integrity-cost", "tokens a step", cells)
    return 0


class Spent(NamedTuple):
    """CPU seconds of a step, and of its integrity checks."""

    seconds: float
    checks: float
    """CPU seconds of the integrity checks within a step."""


class CheckClock:
    """Clock of the CPU time of an engine's integrity checks."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def watch(self, guard: Any) -> None:
        """Wraps the calls of a guard with the clock."""
        for name in ("before_update", "end_step"):
            setattr(guard, name, partial(self._timed, getattr(guard, name)))

    def _timed(self, call: Callable[..., Any], *arguments: Any) -> Any:
        began = time.process_time()
        found = call(*arguments)
        self.seconds += time.process_time() - began
        return found


def measure(rounds: int, rows: int) -> dict[int, list[Spent]]:
    """Measures the CPU seconds of each step by ``integrity.every``, without first steps."""
    spent: dict[int, list[Spent]] = {every: [] for every in EVERY}
    clock = CheckClock()
    generator = torch.Generator().manual_seed(1)
    with ExitStack() as stack:
        engines = {every: stack.enter_context(_engine(every, rows)) for every in EVERY}
        for eng in engines.values():
            eng.complete(_batch(rows, generator))
            if (guard := eng._runtime.parts.find(Integrity)) is not None:
                clock.watch(guard)
        for turn in range(rounds + 1):
            for every in random.Random(turn).sample(EVERY, len(EVERY)):
                for _ in range(STEPS):
                    batch = _batch(rows, generator)
                    began = time.process_time()
                    checked = clock.seconds
                    engines[every].train_batch(batch)
                    if turn:
                        whole = time.process_time() - began
                        spent[every].append(Spent(whole, (clock.seconds - checked) / whole))
    return spent


def cells_of(spent: Mapping[int, Sequence[Spent]], tokens: int) -> dict[tuple[str, str], str]:
    """Formats the CPU time of a step, its increase by checks, and the checks' own time."""
    middle = {every: median(one.seconds for one in steps) for every, steps in spent.items()}
    cells = {(f"{tokens:,}", "step without, CPU s"): f"{middle[0]:.3f}"}
    for every in EVERY[1:]:
        more, checks = middle[every] / middle[0] - 1, mean(one.checks for one in spent[every])
        cells[f"{tokens:,}", f"every {every}"] = f"{100 * more:+.1f} %, checks alone {100 * checks:.2f} %"
    return cells


def _engine(every: int, rows: int) -> engine.Engine:
    torch.manual_seed(1)
    shape = DecoderConfig(vocabulary=VOCABULARY, layers=4, width=256, heads=4, context=LENGTH)
    config: dict[str, Any] = {"train_batch_size": rows, "train_micro_batch_size_per_gpu": min(rows, 4)}
    return engine.initialize(Decoder(shape), config | {"integrity": {"every": every}}, loss_sum)


def _batch(rows: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, VOCABULARY, (rows, LENGTH + 1), generator=generator)
    return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}
