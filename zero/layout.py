"""The flat layout: which element of which bucket belongs to whom. Pure arithmetic, no torch.

Parameters are laid out in buckets, in the order in which backward produces their gradients, one
dtype to a bucket. A bucket is what one collective moves. Every data rank owns an equal slice of
every bucket, so that reducing and gathering need no bookkeeping at run time:

    bucket 0   | head.weight ........ | norm.bias | norm.weight |pad|     S0 elements
               |  rank 0  |  rank 1   |  rank 2   |   rank 3      |
    bucket 1   | blocks.7.down.weight ............ | ...      |pad|     S1 elements
               |  rank 0      |  rank 1     |  rank 2     |  rank 3     |

Slots start on multiples of ALIGNMENT elements and a bucket is padded to N times that, which is the
padding that the budget formulas call part of the layout (the field's name for the sum is Psi).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

# 64 elements are 128 bytes in bf16: full memory transactions, and what tensor cores and vector
# instructions ask of a matrix that starts inside a larger buffer.
ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Item:
    """A parameter to lay out."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    group: int = 0


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of one parameter in its bucket, in elements."""

    name: str
    shape: tuple[int, ...]
    start: int
    group: int

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

    def shard(self, index: int, ranks: int) -> slice:
        """The slice that data rank ``index`` of ``ranks`` owns."""
        size = self.elements // ranks
        return slice(index * size, (index + 1) * size)

    def segments(self, within: slice) -> tuple[Segment, ...]:
        """The part of ``within`` that each optimizer group covers, padding included, in order."""
        runs: list[Segment] = []
        for group, slots in groupby(self.slots, key=lambda slot: slot.group):
            runs.append(Segment(group, next(slots).start, self.elements))
            if len(runs) > 1:
                runs[-2] = Segment(runs[-2].group, runs[-2].start, runs[-1].start)
        clipped = (Segment(r.group, max(r.start, within.start), min(r.stop, within.stop)) for r in runs)
        return tuple(segment for segment in clipped if segment.start < segment.stop)


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """All buckets of one stage and tensor slice, for ``ranks`` data ranks."""

    ranks: int
    buckets: tuple[Bucket, ...]

    @property
    def elements(self) -> int:
        """Padded elements of all buckets (Psi)."""
        return sum(bucket.elements for bucket in self.buckets)

    def elements_by_dtype(self) -> dict[str, int]:
        """Padded elements by parameter dtype."""
        sums: dict[str, int] = {}
        for bucket in self.buckets:
            sums[bucket.dtype] = sums.get(bucket.dtype, 0) + bucket.elements
        return sums


def build_layout(items: Sequence[Item], ranks: int, bucket_elements: int) -> FlatLayout:
    """Lay ``items`` (in model order) out for ``ranks`` data ranks.

    A bucket is closed when the next parameter would take it past ``bucket_elements``; a larger
    parameter gets a bucket of its own. Inside a bucket slots are ordered by optimizer group, so that
    a group is one run and not many.
    """
    filled: list[list[Item]] = []
    open_buckets: dict[str, list[Item]] = {}
    for item in reversed(items):
        current = open_buckets.get(item.dtype)
        if current is None or _elements(current) + _elements([item]) > bucket_elements:
            current = open_buckets[item.dtype] = []
            filled.append(current)
        current.append(item)
    return FlatLayout(ranks, tuple(_bucket(i, members, ranks) for i, members in enumerate(filled)))


def _bucket(index: int, members: Sequence[Item], ranks: int) -> Bucket:
    slots: list[Slot] = []
    end = 0
    for item in sorted(members, key=lambda item: item.group):
        slots.append(Slot(item.name, item.shape, end, item.group))
        end += _aligned(math.prod(item.shape), ALIGNMENT)
    return Bucket(index, members[0].dtype, tuple(slots), _aligned(max(end, 1), ALIGNMENT * ranks))


def _elements(items: Iterable[Item]) -> int:
    return sum(_aligned(math.prod(item.shape), ALIGNMENT) for item in items)


def _aligned(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
