"""Gather schedule: the moments of a step at which sharded parameters are gathered (ZeRO 3). No torch.

FSDP2 calls it the prefetch order, and its two ends unshard and reshard.

Modules that run one after the other form gather groups: one for all modules before the first block, one for each block,
one for all modules after the last. A turn is a group in a pipeline stage. A pass goes through the turns of its stage,
forward or backward:

    forward   gather      0 | 1       2       3
              compute         [ 0 ]   [ 1 ]   [ 2 ]   [ 3 ]     while a group computes, the next one is gathered
              free                    0       1       2         group 3 stays: the backward begins with it

A bucket that several groups use (tied parameters) stays gathered from the first of them to the last; parameters that
code outside all modules reads (``EVERYWHERE``) stay gathered through the pass.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from engine.parallel.grid import Axis
from engine.parallel.pipeline.schedule.actions import Action, Op
from engine.zero.layout import Bucket, FlatLayout, Turn

EVERYWHERE = Turn(-1, -1)
"""Turn of parameters that are read outside all modules."""


@dataclass(frozen=True, slots=True)
class GatherOrder:
    """Order in which one rank's forwards and backwards use gather groups, sets of modules with parameters that are
    gathered together (ZeRO 3). A bucket is identified by its index in ``buckets``.
    """

    buckets: tuple[Bucket, ...]
    turns: tuple[Turn, ...]
    members: tuple[frozenset[int], ...]
    """For each position, the buckets that must be gathered while its group runs."""
    backward_from: Mapping[int, int]
    """First position that each stage's backward reaches; earlier groups are frozen and have no trained input."""

    def positions(self, walk: Action) -> range:
        """Returns the indices in ``turns`` of the gather groups (modules gathered together) used by ``walk``, a forward
        or backward, in order of use.
        """
        own = [position for position, turn in enumerate(self.turns) if turn.stage == walk.stage]
        if not own:
            return range(0)
        if walk.op is Op.FORWARD:
            return range(own[0], own[-1] + 1)
        return range(own[-1], self.backward_from[walk.stage] - 1, -1)

    @property
    def everywhere(self) -> frozenset[int]:
        """Indices of the buckets that every gather group needs; they stay gathered in every forward and backward."""
        return frozenset.intersection(*self.members)

    def at_start(self, walk: Action | None) -> frozenset[int]:
        """Returns the indices of the buckets needed by the first gather group of ``walk``, a forward or backward.
        Returns an empty set if ``walk`` is None.
        """
        positions = self.positions(walk) if walk else ()
        return self.members[positions[0]] if positions else frozenset()

    def pinned(self, limit: int | None, sizes: Sequence[int]) -> frozenset[int]:
        """Returns the indices of the buckets that stay gathered through a step: in order of first use, each bucket that
        still fits ``limit`` bytes (None: all).

        ``sizes``: bytes of each bucket's full parameters.
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
    """Counts of one step: collective calls that gather parameters, and gathers of each bucket."""

    calls: int
    times: tuple[int, ...]
    """Number of all-gathers over dp for each bucket."""
    calls_within: int = 0
    times_within: tuple[int, ...] = ()
    """Number of all-gathers from secondary shards, within nodes, for each bucket."""


def gather_order(layout: FlatLayout, fed: Collection[int], stages: Collection[int] = (0,)) -> GatherOrder:
    """Returns the order in which a rank with the pipeline stages ``stages`` uses its gather groups (modules gathered
    together).

    ``fed``: stages with inputs that depend on trainable parameters, so that their backward visits all groups. Any other
    backward ends at the first group with a trainable parameter.
    """
    buckets = (*layout.buckets, *layout.frozen)
    called = {turn for bucket in buckets for turn in bucket.gathers if turn != EVERYWHERE}
    without = {Turn(stage, 0) for stage in stages if all(turn.stage != stage for turn in called)}
    turns = sorted(called | without)
    members = tuple(
        frozenset(index for index, bucket in enumerate(buckets) if _is_whole(bucket, turn)) for turn in turns
    )
    trained = frozenset(range(len(layout.buckets)))
    starts = {}
    for stage in stages:
        own = [position for position, turn in enumerate(turns) if turn.stage == stage]
        reached = [position for position in own if stage in fed or members[position] & trained]
        starts[stage] = min(reached, default=own[-1] + 1)
    return GatherOrder(buckets, tuple(turns), members, MappingProxyType(starts))


def _is_whole(bucket: Bucket, turn: Turn) -> bool:
    """Returns True if the bucket is gathered in this turn: from the first to the last of its turns in the stage."""
    own = [other for other in bucket.gathers if other.stage == turn.stage]
    return EVERYWHERE in bucket.gathers or (bool(own) and min(own) <= turn <= max(own))


def stays_for_loss(layout: FlatLayout, stage: int, parameter: str) -> bool:
    """Returns True if the loss can read ``parameter`` between the forward and the backward of ``stage``: the
    parameter's bucket is not sharded, or the stage's last gather group (modules gathered together) needs this bucket.
    """
    buckets = (*layout.buckets, *layout.frozen)
    turns = {turn for bucket in buckets for turn in bucket.gathers if turn.stage == stage}
    own = [bucket for bucket in buckets if any(slot.name == parameter for slot in bucket.slots)]
    return not turns or any(_is_whole(bucket, max(turns)) for bucket in own)


def count_gathers(
    order: GatherOrder,
    passes: Sequence[Action],
    pinned: Collection[int],
    secondary: Collection[int] = (),
    counted: Axis | None = None,
) -> Gathers:
    """Counts the gathers of a step with the forwards and backwards ``passes``. Assumes that modules run in gather
    order.

    Args:
        pinned: indices of the buckets that stay gathered through the step.
        secondary: indices of the buckets with secondary shards (ZeRO++ hpZ). Their first gather is over dp; their later
            gathers are within the node.
        counted: counts only buckets sharded over this axis; None: all buckets.
    """
    own = frozenset(index for index, each in enumerate(order.buckets) if counted in (None, each.spread.sharding))
    calls, times, calls_within, times_within = 0, [0] * len(order.buckets), 0, [0] * len(order.buckets)
    live: frozenset[int] = frozenset()
    # Mirrors the gatherer: a bucket is freed when the position after it is reached, unless it is pinned or needed first
    # by the next pass.
    for walk, following in zip(passes, (*passes[1:], None), strict=True):
        for position in order.positions(walk):
            wanted = (order.members[position] - live) & own
            live = (live & frozenset(pinned)) | order.members[position]
            near = {bucket for bucket in wanted if bucket in secondary and times[bucket]}
            calls += bool(wanted - near)
            calls_within += bool(near)
            for bucket in wanted:
                (times_within if bucket in near else times)[bucket] += 1
        live &= order.at_start(following) | frozenset(pinned)
    return Gathers(calls, tuple(times), calls_within, tuple(times_within))
