"""The flat layout: which element of which bucket belongs to whom. Pure arithmetic, no torch.

Parameters are laid out in buckets, in the order in which backward produces their gradients, one
dtype to a bucket. A bucket is what one collective moves. Every data rank owns an equal slice of
every bucket, so that reducing and gathering need no bookkeeping at run time:

    bucket 0   | head.weight ........ | norm.bias | norm.weight |pad|     S0 elements
               |  rank 0  |  rank 1   |  rank 2   |   rank 3      |
    bucket 1   | blocks.7.down.weight ............ | ...      |pad|     S1 elements
               |  rank 0      |  rank 1     |  rank 2     |  rank 3     |

Parameters whose gradient this rank alone does not know have buckets of their own at the end: what is
tied over pipeline ranks, and what is partial over tensor ranks. Such a bucket is laid out alike on all
ranks that share it, and waits for the end of the step.

Where a rank has several stages, a bucket holds what the same of them use, so that it can be reduced when
the last backward of those is done.

Where parameters themselves are sharded (ZeRO 3), a bucket holds what the same gather groups use
(``gather_order``), whatever its size, and frozen parameters have buckets too.

Slots start on multiples of ALIGNMENT elements and a bucket is padded to N times that, which is the
padding that the budget formulas call part of the layout (the field's name for the sum is Psi).
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple, TypeVar

_Key = TypeVar("_Key")


# 64 elements are 128 bytes in bf16: full memory transactions, and what tensor cores and vector
# instructions ask of a matrix that starts inside a larger buffer.
ALIGNMENT = 64


class Turn(NamedTuple):
    """A gather group in a stage; turns are ordered as a forward through all stages makes them."""

    stage: int
    group: int


@dataclass(frozen=True, slots=True)
class Item:
    """A parameter to lay out."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    group: int = 0
    counted: bool = True
    """Whether this rank counts it in the gradient norm: one of those that hold a copy does."""
    ties: tuple[int, ...] = ()
    """The pipeline stages that own it, when there are several: its gradient is their sum."""
    partial: bool = False
    """Its gradient is a sum over tensor ranks."""
    gathers: tuple[Turn, ...] = ()
    """The turns in which it is used, where parameters are sharded; nothing where they are not."""
    trainable: bool = True
    stages: tuple[int, ...] = ()
    """The stages of this rank that use it, where it has several; nothing where it has one."""
    copies: tuple[tuple[int, int], ...] = ()
    """Runs of its elements that another rank counts, though this one counts the rest."""


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of one parameter in its bucket, in elements."""

    name: str
    shape: tuple[int, ...]
    start: int
    group: int
    counted: bool = True
    copies: tuple[tuple[int, int], ...] = ()
    """Runs of its elements, from its start, that another rank counts."""

    @property
    def stop(self) -> int:
        """End of the slot."""
        return self.start + math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Segment:
    """Elements ``start:stop`` of a bucket that belong to one optimizer group and one data rank."""

    group: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """One contiguous piece of the layout; what one collective moves."""

    index: int
    dtype: str
    slots: tuple[Slot, ...]
    elements: int
    """Padded size, a multiple of the number of data ranks."""
    ties: tuple[int, ...] = ()
    """Pipeline stages over which its gradients are summed."""
    partial: bool = False
    """Its gradients are summed over tensor ranks."""
    gathers: tuple[Turn, ...] = ()
    """The turns in which it is used; nothing where parameters are whole on every rank."""
    stages: tuple[int, ...] = ()
    """The stages of this rank whose backwards give it gradients; nothing where all do."""

    @property
    def late(self) -> bool:
        """Its reduction waits until every gradient of the step is there."""
        return bool(self.ties) or self.partial

    def shard(self, index: int, ranks: int) -> slice:
        """The slice that data rank ``index`` of ``ranks`` owns."""
        size = self.elements // ranks
        return slice(index * size, (index + 1) * size)

    def segments(self, within: slice) -> tuple[Segment, ...]:
        """The part of ``within`` that each optimizer group covers, padding included, in order."""
        return tuple(Segment(group, start, stop) for group, start, stop in self._runs(within, lambda slot: slot.group))

    def counted(self, within: slice) -> tuple[slice, ...]:
        """The parts of ``within`` that this rank counts in the gradient norm; padding may be among them."""
        return tuple(slice(start, stop) for yes, start, stop in self._norm_runs(within) if yes)

    def uncounted(self, within: slice) -> tuple[slice, ...]:
        """The other parts of ``within``: copies of what another rank counts."""
        return tuple(slice(start, stop) for yes, start, stop in self._norm_runs(within) if not yes)

    def _norm_runs(self, within: slice) -> Iterator[tuple[bool, int, int]]:
        """(whether this rank counts it, start, stop)."""
        copies = sorted((slot.start + start, slot.start + stop) for slot in self.slots for start, stop in slot.copies)
        for yes, start, stop in self._runs(within, lambda slot: slot.counted):
            for first, last in copies if yes else ():
                first, last = max(first, start), min(last, stop)
                if first < last:
                    if start < first:
                        yield True, start, first
                    yield False, first, last
                    start = last
            if start < stop:
                yield yes, start, stop

    def _runs(self, within: slice, key: Callable[[Slot], _Key]) -> Iterator[tuple[_Key, int, int]]:
        """(key, start, stop) of consecutive slots with the same key, as far as they lie in ``within``."""
        firsts = [(value, next(slots).start) for value, slots in groupby(self.slots, key=key)]
        stops = [start for _, start in firsts[1:]] + [self.elements]
        for (value, start), stop in zip(firsts, stops, strict=True):
            start, stop = max(start, within.start), min(stop, within.stop)
            if start < stop:
                yield value, start, stop


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """All buckets of one stage and tensor slice, for ``ranks`` data ranks."""

    ranks: int
    buckets: tuple[Bucket, ...]
    """What is trained."""
    frozen: tuple[Bucket, ...] = ()
    """What is sharded all the same."""

    @property
    def elements(self) -> int:
        """Padded elements of all buckets that are trained (Psi)."""
        return sum(bucket.elements for bucket in self.buckets)

    def elements_by_dtype(self) -> dict[str, int]:
        """Padded elements of what is trained, by parameter dtype."""
        sums: dict[str, int] = {}
        for bucket in self.buckets:
            sums[bucket.dtype] = sums.get(bucket.dtype, 0) + bucket.elements
        return sums


def build_layout(items: Sequence[Item], ranks: int, bucket_elements: int) -> FlatLayout:
    """Lay ``items`` (in model order) out for ``ranks`` data ranks.

    A bucket is closed when the next parameter would take it past ``bucket_elements``; a larger
    parameter gets a bucket of its own. Inside a bucket slots are ordered by optimizer group, and in a
    group those that the norm counts come first (not in late buckets), so that each is one run and not many.
    Sharded parameters ignore ``bucket_elements``: what a group uses is one bucket.
    """
    trained = _fill([item for item in items if item.trainable], bucket_elements)
    frozen = _fill([item for item in items if not item.trainable], bucket_elements)
    return FlatLayout(
        ranks,
        tuple(_bucket(i, members, ranks) for i, members in enumerate(trained)),
        tuple(_bucket(i, members, ranks) for i, members in enumerate(frozen, len(trained))),
    )


def _fill(items: Sequence[Item], bucket_elements: int) -> list[list[Item]]:
    """The members of every bucket."""
    filled: list[list[Item]] = []
    open_buckets: dict[tuple[object, ...], list[Item]] = {}
    for item in sorted(reversed(items), key=lambda item: bool(item.ties) or item.partial):
        # owners of tied parameters lie in different groups, and all of them lay the bucket out alike
        kind = (item.dtype, item.ties, item.partial, () if item.ties else (item.gathers, item.stages))
        current = open_buckets.get(kind)
        full = not item.gathers and current and _elements(current) + _elements([item]) > bucket_elements
        if current is None or full:
            current = open_buckets[kind] = []
            filled.append(current)
        current.append(item)
    return filled


def _bucket(index: int, members: Sequence[Item], ranks: int) -> Bucket:
    slots: list[Slot] = []
    end = 0
    # who counts what differs between the ranks that share a late bucket, and all of them lay it out alike
    late = bool(members[0].ties) or members[0].partial
    for item in sorted(members, key=lambda item: (item.group, not item.counted and not late)):
        slots.append(Slot(item.name, item.shape, end, item.group, item.counted, item.copies))
        end += _aligned(math.prod(item.shape), ALIGNMENT)
    kind, elements = members[0], _aligned(max(end, 1), ALIGNMENT * ranks)
    gathers = tuple(sorted({turn for item in members for turn in item.gathers}))
    stages = tuple(sorted({stage for item in members for stage in item.stages}))
    return Bucket(index, kind.dtype, tuple(slots), elements, kind.ties, kind.partial, gathers, stages)


def _elements(items: Iterable[Item]) -> int:
    return sum(_aligned(math.prod(item.shape), ALIGNMENT) for item in items)


def _aligned(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
