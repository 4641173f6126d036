"""Which layout is planned next, after counting has shown that the ones before it do not fit. Pure, no torch."""

from collections.abc import Sequence

from engine.planning.cost_model.estimate import LayoutEstimate
from engine.planning.cost_model.layout import TrainingLayout
from engine.planning.cost_model.memory import SLACK, RankMemory
from engine.planning.cost_model.workload import Recomputation

MOST_COUNTED = 6
"""Layouts whose plans are made and counted, until one fits."""


class LayoutChoice:
    """The fastest layouts in turn, passing over those that cannot fit by what was counted of others.

    A closed form has a factor for each mode of recomputation: bytes of activations and buffers that were counted, over
    its own, of the layout of this mode that was counted last; 1 before.

    Args:
        ranked: layouts that fit in closed form, the fastest first.
        limit: bytes that a layout may take.
    """

    def __init__(self, ranked: Sequence[LayoutEstimate], limit: float) -> None:
        self._ranked, self._limit = ranked, limit
        self._factors: dict[Recomputation, float] = {}
        self._tried: set[TrainingLayout] = set()

    def __next__(self) -> LayoutEstimate:
        for one in self._ranked:
            if one.layout not in self._tried and self.need(one) <= self._limit:
                self._tried.add(one.layout)
                return one
        raise StopIteration

    def __iter__(self) -> "LayoutChoice":
        return self

    def learn(self, estimate: LayoutEstimate, counted: RankMemory) -> None:
        """Note what was counted of the layout of ``estimate``."""
        self._tried.add(estimate.layout)
        closed = estimate.memory.activations + estimate.memory.buffers
        if closed > 0:
            self._factors[estimate.layout.recomputation] = (counted.activations + counted.buffers) / closed

    def pass_over(self, layout: TrainingLayout) -> None:
        """Do not give ``layout``, which has been planned."""
        self._tried.add(layout)

    def need(self, one: LayoutEstimate) -> float:
        """Bytes of a rank, as far as they are known."""
        more = self._factors.get(one.layout.recomputation, 1.0) - 1
        return one.memory.total + (1 + SLACK) * more * (one.memory.activations + one.memory.buffers)

    def likely(self) -> tuple[LayoutEstimate, ...]:
        """Layouts that were not tried and fit as far as is known, the fastest first."""
        return tuple(one for one in self._ranked if one.layout not in self._tried and self.need(one) <= self._limit)
