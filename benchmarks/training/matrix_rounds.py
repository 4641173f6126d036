"""Seconds of whole-matrix updates on two data ranks, with their exchange overlapped and not.

    python -m benchmarks matrix_rounds [--rounds 7]                                 starts two ranks under torchrun

Products sleep as long as the exchange of a step takes, like those of a device, which leave the CPU idle. Overlapped and
sequential rounds alternate. Exit code 1 when overlapping saves nothing.
"""

import argparse
import os
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from statistics import median
from typing import Any, TypeVar

import torch
from torch import Tensor

import engine
from benchmarks.harness.startup import torchrun
from engine.models.decoder import Decoder, DecoderConfig, loss_sum
from engine.zero.optim.matrix import matrix_updates
from engine.zero.optim.matrix.matrix_updates import MatrixUpdates

RANKS, STEPS = 2, 2
SIZES = DecoderConfig(layers=8, width=512, heads=4, context=8)
LIMIT = 0.95
"""Maximum ratio of overlapped rounds' seconds to sequential ones'."""
Made = TypeVar("Made")


def main(command: Sequence[str] | None = None) -> int:
    """Measures on every rank; rank 0 prints."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks matrix_rounds", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="turns of each way")
    arguments = parser.parse_args(command)
    if "RANK" not in os.environ:
        again = torchrun(RANKS, "benchmarks", "matrix_rounds", "--rounds", str(arguments.rounds))
        return subprocess.run(again, check=False).returncode
    found = measure(arguments.rounds)
    if int(os.environ["RANK"]) == 0:
        print(found)
    return 0 if found.ratio < LIMIT else 1


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds of the updates of all matrices in a step."""

    exchange: float
    """Seconds of the exchange alone, without products."""
    apart: float
    """Seconds with sleeping products, in sequential rounds."""
    together: float
    """Seconds with sleeping products, in overlapped rounds."""
    rounds: int

    @property
    def ratio(self) -> float:
        """Ratio of overlapped to sequential seconds."""
        return self.together / self.apart

    def __str__(self) -> str:
        return (
            f"{self.rounds} rounds, exchange {self.exchange:.3f} s, products as long: one after another "
            f"{self.apart:.3f} s, overlapping {self.together:.3f} s, ratio {self.ratio:.2f}; limit {LIMIT}"
        )


@dataclass(slots=True)
class _Clock:
    """Stands in for products and notes what the updates of a step take."""

    updates: MatrixUpdates
    asleep: float = 0.0
    """Seconds of an element's product."""
    seconds: list[float] = field(default_factory=list)

    def update(self, kinds: Sequence[Tensor], name: str, step: Any) -> Tensor:
        """A matrix of zeros, late."""
        time.sleep(self.asleep * kinds[0].numel())
        return torch.zeros_like(kinds[0]).reshape(-1)

    def run(self, unused: frozenset[str], missed: Mapping[str, int]) -> Iterator[frozenset[str]]:
        """All updates of a step, timed."""
        began = time.perf_counter()
        yield from MatrixUpdates.run(self.updates, unused, missed)
        self.seconds.append(time.perf_counter() - began)


def measure(turns: int) -> Spent:
    """Measures on one rank; returns medians over all steps."""
    torch.manual_seed(1)
    torch.set_num_threads(1)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "parallel": {"data": RANKS},
        "zero_optimization": {"stage": 1},
        "optimizer": [{"match": "blocks.*", "type": "Muon"}, {"type": "AdamW"}],
    }
    with engine.initialize(Decoder(SIZES), config, loss_sum) as eng:
        ids = torch.zeros(1, SIZES.context, dtype=torch.long)
        batch = {"input_ids": ids, "labels": ids}
        eng.complete(batch)
        clock = _watch(eng)
        apart, together = list[float](), list[float]()
        exchange = _median_of(eng, batch, clock, 3)
        clock.asleep = exchange / max(1, _own_elements(clock.updates))
        for turn in range(turns):
            for found in (apart, together) if turn % 2 else (together, apart):
                with _one_after_another() if found is apart else nullcontext():
                    found.append(_median_of(eng, batch, clock, STEPS))
        return Spent(exchange, median(apart), median(together), len(clock.updates._exchanges))


def _watch(eng: engine.Engine) -> _Clock:
    (updates,) = eng._runtime.optimizer.whole
    assert isinstance(updates, MatrixUpdates)
    clock = _Clock(updates)
    updates._update, updates.run = clock.update, clock.run  # type: ignore[method-assign]
    return clock


def _own_elements(updates: MatrixUpdates) -> int:
    rows = updates._routes.rows
    return sum(rows[name].elements for name in updates._routes.made)


def _median_of(eng: engine.Engine, batch: Any, clock: _Clock, steps: int) -> float:
    clock.seconds.clear()
    for _ in range(steps):
        eng.train_batch(batch)
    return median(clock.seconds)


@contextmanager
def _one_after_another() -> Iterator[None]:
    """Within, a round begins when the one before it has ended."""
    overlapping = matrix_updates.staggered

    def in_turn(rounds: Iterable[Iterator[Made]]) -> Iterator[Made]:
        for each in rounds:
            yield from each

    matrix_updates.staggered = in_turn
    try:
        yield
    finally:
        matrix_updates.staggered = overlapping
