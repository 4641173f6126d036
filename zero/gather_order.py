"""Which sharded parameters are whole at which moment of a step (ZeRO 3). Pure arithmetic, no torch.

Modules that run one after the other form gather groups: one for all that comes before the first block, one for
each block, one for all behind the last. A pass goes through the groups of its stage, forward or backward:

    forward   gather      0 | 1       2       3
              compute         [ 0 ]   [ 1 ]   [ 2 ]   [ 3 ]     while a group computes, the next is on its way
              free                    0       1       2         group 3 stays: the backward begins with it

A bucket that several groups use (tied parameters) is whole from the first of them to the last; what code outside
all modules reads (``EVERYWHERE``) is whole through the pass.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from engine.parallel.pipeline.schedule import Action, Op
from engine.zero.layout import Bucket, FlatLayout

Direction = Literal["forward", "backward"]


def passes_of(row: Sequence[Action]) -> tuple[Direction, ...]:
    """The passes that a rank's row of a schedule makes."""
    return tuple("forward" if action.op is Op.FORWARD else "backward" for action in row)


EVERYWHERE = -1
"""The gather group of what is read outside modules."""


@dataclass(frozen=True, slots=True)
class GatherOrder:
    """The gather groups of one pipeline stage in the order in which they run.

    Positions count the groups that have parameters on this stage; buckets are counted as in ``buckets``.
    """

    buckets: tuple[Bucket, ...]
    groups: tuple[int, ...]
    """Position -> gather group."""
    members: tuple[frozenset[int], ...]
    """Position -> buckets that must be whole while the group runs."""
    backward_from: int
    """First position that a backward reaches: what lies before it is frozen and fed by nothing that is trained."""

    def passes(self, direction: Direction) -> range:
        """Positions in the order of one pass."""
        last = len(self.groups) - 1
        return range(last + 1) if direction == "forward" else range(last, self.backward_from - 1, -1)

    @property
    def everywhere(self) -> frozenset[int]:
        """Buckets that are whole through every pass."""
        return frozenset.intersection(*self.members)

    def at_start(self, direction: Direction | None) -> frozenset[int]:
        """Buckets that a pass needs first; none when there is no pass."""
        positions = self.passes(direction) if direction else ()
        return self.members[positions[0]] if positions else frozenset()

    def pinned(self, limit: int | None, sizes: Sequence[int]) -> frozenset[int]:
        """Buckets that stay whole over all microbatches of a step, the first that take ``limit`` bytes; None: all.

        ``sizes``: bytes of every bucket when it is whole.
        """
        if limit is None:
            return frozenset(range(len(self.buckets)))
        chosen: set[int] = set()
        for index in sorted(range(len(self.buckets)), key=lambda index: min(self._positions(index))):
            if sizes[index] <= limit:
                chosen.add(index)
                limit -= sizes[index]
        return frozenset(chosen)

    def _positions(self, bucket: int) -> list[int]:
        return [position for position, members in enumerate(self.members) if bucket in members]


@dataclass(frozen=True, slots=True)
class Gathers:
    """What a step gathers."""

    calls: int
    times: tuple[int, ...]
    """How often each bucket is gathered."""


def gather_order(layout: FlatLayout, fed: bool) -> GatherOrder:
    """The order of one stage. ``fed``: parameters of an earlier stage are trained, so that backward goes through."""
    buckets = (*layout.buckets, *layout.frozen)
    present = sorted({group for bucket in buckets for group in bucket.gathers if group != EVERYWHERE}) or [0]
    spans = [_span(bucket, present) for bucket in buckets]
    members = tuple(
        frozenset(index for index, (first, last) in enumerate(spans) if first <= position <= last)
        for position in range(len(present))
    )
    firsts = [first for first, _ in spans[: len(layout.buckets)]]
    return GatherOrder(buckets, tuple(present), members, 0 if fed else min(firsts, default=len(present)))


def _span(bucket: Bucket, present: Sequence[int]) -> tuple[int, int]:
    if EVERYWHERE in bucket.gathers:
        return 0, len(present) - 1
    positions = [present.index(group) for group in bucket.gathers]
    return min(positions), max(positions)


def count_gathers(order: GatherOrder, passes: Sequence[Direction], pinned: Collection[int]) -> Gathers:
    """What the passes of a step gather, when every module runs in the order of the groups."""
    calls, times = 0, [0] * len(order.buckets)
    live: frozenset[int] = frozenset()
    for direction, following in zip(passes, (*passes[1:], None), strict=True):
        for position in order.passes(direction):
            wanted = order.members[position] - live
            live = (live & frozenset(pinned)) | order.members[position]
            calls += bool(wanted)
            for bucket in wanted:
                times[bucket] += 1
        live &= order.at_start(following) | frozenset(pinned)
    return Gathers(calls, tuple(times))
