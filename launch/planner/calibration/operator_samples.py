"""Seconds of operators on the host at hand by class and size, as a step meets them: one short sample of each a round.

    small    inputs that lie in a cache together are used again, as a step finds there what it has just made
    large    every call has inputs that nothing has touched since more was read than caches hold; results stay, as
             activations do, until the sample is over

Seconds are those of the processor, not of the clock: what others do on a shared machine stops a rank and is not work of
its own. Where a rank is alone on its processor both are the same. All ranks measure the same operator at once, so that
they share caches and memory as in a run.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any, Protocol

from torch import Tensor

from engine.launch.planner.calibration.operator_seconds import Inputs, MeasuredOperator, OperandPool
from engine.parallel.comm.world import World
from engine.planning.host_step.host_rates import SecondsTable

SMALL_BYTES = 1 << 19
"""Of the inputs of one call: below it they are used again."""
MOST_CALLS = 64
SAMPLE_SECONDS = 0.01
"""About, of the calls of a sample."""
LEAST_SECONDS = 0.002
"""Of a sample of short calls, which goes over its inputs several times."""


class Measuring(Protocol):
    """Ranks that measure together."""

    world: World
    alone: World

    def ready(self) -> None:
        """All ranks are here."""

    def mean(self, values: Sequence[float]) -> tuple[float, ...]:
        """Over the ranks, of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cell:
    """An operator at one combination of sizes."""

    operator: MeasuredOperator
    sizes: tuple[int, ...]
    calls: int = 1
    """Of a sample, each with inputs of its own."""
    passes: int = 1
    """Over those inputs."""
    small: bool = False


class OperatorSamples:
    """The operators of some tables, ready to be sampled round by round."""

    def __init__(self, operators: Iterable[tuple[str, MeasuredOperator]], ranks: Measuring) -> None:
        self._ranks, self._pool = ranks, OperandPool()
        self._operators: Mapping[str, MeasuredOperator] = dict(operators)
        bare = [_Cell(operator=one, sizes=sizes) for one in self._operators.values() for sizes in product(*one.sizes)]
        once = ranks.mean([self._once(cell) for cell in bare])  # all ranks are busy equally long
        self._cells = [self._planned(cell, seconds) for cell, seconds in zip(bare, once, strict=True)]

    def sample(self) -> dict[str, SecondsTable]:
        """Seconds of one call at every combination of sizes; the mean over the ranks."""
        self._pool.refill()
        seconds = list(self._ranks.mean([self._seconds(cell) for cell in self._cells]))
        tables = {}
        for name, one in self._operators.items():
            count = prod(map(len, one.sizes))
            sizes = tuple(tuple(map(float, steps)) for steps in one.sizes)
            tables[name] = SecondsTable(sizes=sizes, seconds=tuple(seconds[:count]))
            del seconds[:count]
        return tables

    def _seconds(self, cell: _Cell) -> float:
        self._ranks.ready()
        if cell.small:
            self._pool.rewind()
        given = [self._inputs(cell) for _ in range(cell.calls)]
        kept: list[Any] = []
        for inputs in given if cell.small else given[:1]:
            kept.append(cell.operator.call(*inputs))
        spent = 0.0
        for _ in range(cell.passes):
            kept.clear()
            began = time.thread_time()
            for inputs in given:
                kept.append(cell.operator.call(*inputs))
            spent += time.thread_time() - began
        return max(1e-9, cell.operator.share * spent / (cell.passes * len(given)))

    def _once(self, cell: _Cell) -> float:
        inputs = self._inputs(cell)
        cell.operator.call(*inputs)
        began = time.thread_time()
        cell.operator.call(*inputs)
        return max(1e-7, time.thread_time() - began)

    def _planned(self, cell: _Cell, once: float) -> _Cell:
        small = sum(map(_bytes, self._inputs(cell))) < SMALL_BYTES
        calls = max(2, min(MOST_CALLS, int(SAMPLE_SECONDS / once)))
        passes = max(1, int(LEAST_SECONDS / (calls * once))) if small else 1
        return _Cell(operator=cell.operator, sizes=cell.sizes, calls=calls, passes=passes, small=small)

    def _inputs(self, cell: _Cell) -> Inputs:
        return cell.operator.make(self._pool, *cell.sizes)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
