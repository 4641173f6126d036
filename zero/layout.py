"""Flat layout: the rank that owns each element of each bucket. No torch.

Parameters are placed in buckets in the order in which backward produces their gradients, one dtype per bucket. One
collective reduces or gathers one bucket, and every data rank owns an equal slice of it:

    bucket 0   | head.weight ........ | norm.bias | norm.weight |pad|     S0 elements
               |  rank 0  |  rank 1   |  rank 2   |   rank 3      |
    bucket 1   | blocks.7.down.weight ............ | ...      |pad|     S1 elements
               |  rank 0      |  rank 1     |  rank 2     |  rank 3     |

Parameters tied over pipeline ranks, and parameters with gradients that are partial over tensor ranks, have separate
buckets at the end, with the same layout on all of these ranks, reduced at the end of the step.

If a rank has several stages, all parameters of a bucket belong to the same stages, after whose last backward it is
reduced.

At ZeRO 3 all parameters of a bucket belong to the same gather groups (``gather_schedule``), and frozen parameters have
buckets too.

Slots start at multiples of ALIGNMENT elements, and a bucket is padded to a multiple of N times that; memory estimates
include the padding. With quantized traffic, slots start at quantization blocks, so that all copies of a parameter on
tensor ranks and stages are encoded equally. Parameters with both sharded and replicated rows on a tensor rank have
separate buckets, which are not quantized.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple, TypeVar

from engine.parallel.grid import Spread

_Key = TypeVar("_Key")


# 64 elements are 128 bytes in bf16: full memory transactions, and the alignment that tensor cores and vector
# instructions require of a matrix that starts inside a larger buffer.
ALIGNMENT = 64


class Turn(NamedTuple):
    """Key of a gather group (modules with parameters that ZeRO 3 gathers together): its stage and its number in the
    stage. Keys sort in the order of a forward.
    """

    stage: int
    group: int


@dataclass(frozen=True, slots=True)
class Item:
    """Properties of one parameter that determine its position in the flat layout."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    group: int = 0
    counted: bool = True
    """True if this rank counts the parameter in the gradient norm; only one of the ranks with a copy does."""
    shared: bool = False
    """True if several tensor ranks store the whole parameter or parts of it."""
    ties: tuple[int, ...] = ()
    """Pipeline stages that own a tied parameter, over which its gradient is summed; otherwise empty."""
    partial: bool = False
    """True if the gradient must be summed over tensor ranks."""
    gathers: tuple[Turn, ...] = ()
    """Gather groups that use the parameter at ZeRO 3; otherwise empty."""
    trainable: bool = True
    stages: tuple[int, ...] = ()
    """Stages of this rank that use the parameter, if the rank has several; otherwise empty."""
    copies: tuple[tuple[int, int], ...] = ()
    """Ranges of flat elements that another rank counts in the gradient norm; this rank counts all others."""
    exact: bool = False
    """True if the parameter is sent unencoded where others are encoded."""
    spread: Spread | None = None
    """Axes of the parameter's shards and sums; None: the axes of the layout."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Position of one parameter in its bucket, in elements from the start of the bucket."""

    name: str
    shape: tuple[int, ...]
    start: int
    group: int
    counted: bool = True
    copies: tuple[tuple[int, int], ...] = ()
    """Ranges of elements, relative to ``start``, that another rank counts in the norm."""

    @property
    def stop(self) -> int:
        """End of the parameter in the bucket, exclusive and without padding, in elements."""
        return self.start + math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Segment:
    """Elements ``start:stop`` of a bucket that belong to parameter group number ``group`` of the optimizer."""

    group: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Contiguous range of elements for several parameters of one dtype, which one collective reduces or gathers."""

    index: int
    dtype: str
    slots: tuple[Slot, ...]
    elements: int
    """Padded number of elements, a multiple of the number of shards."""
    spread: Spread
    """Axes over which the bucket is sharded, reduced and equal."""
    ties: tuple[int, ...] = ()
    """Pipeline stages over which the bucket's gradients are summed."""
    partial: bool = False
    """True if the bucket's gradients are summed over tensor ranks."""
    gathers: tuple[Turn, ...] = ()
    """Gather groups that use the bucket; empty if parameters are full on every rank."""
    stages: tuple[int, ...] = ()
    """Stages of this rank with gradients for the bucket; empty: all."""
    exact: bool = False
    """True if the bucket is sent unencoded where others are encoded."""

    @property
    def late(self) -> bool:
        """True if the bucket is reduced only at the end of a step: stages share its parameters, or tensor ranks sum its
        gradients.
        """
        return bool(self.ties) or self.partial

    def shard(self, index: int) -> slice:
        """Returns the elements that the rank with ``index`` along the axis ``spread.sharding`` owns. All shards have
        the same size.
        """
        size = self.elements // self.spread.ranks
        return slice(index * size, (index + 1) * size)

    def segments(self, within: slice) -> tuple[Segment, ...]:
        """Divides the slice ``within`` of the bucket into segments, one for each run of parameters of the same
        optimizer group. Padding belongs to the segment before it.
        """
        return tuple(Segment(group, start, stop) for group, start, stop in self._runs(within, lambda slot: slot.group))

    def counted(self, within: slice) -> tuple[slice, ...]:
        """Returns the parts of ``within`` that this rank includes in the gradient norm. Only one of the ranks that
        store an element includes it.
        """
        return tuple(slice(start, stop) for yes, start, stop in self._norm_runs(within) if yes)

    def uncounted(self, within: slice) -> tuple[slice, ...]:
        """Returns the parts of ``within`` that another rank includes in the gradient norm."""
        return tuple(slice(start, stop) for yes, start, stop in self._norm_runs(within) if not yes)

    def _norm_runs(self, within: slice) -> Iterator[tuple[bool, int, int]]:
        """Yields (True if this rank counts it, start, stop)."""
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
        """Yields (key, start, stop) of consecutive slots with the same key, clipped to ``within``."""
        firsts = [(value, next(slots).start) for value, slots in groupby(self.slots, key=key)]
        stops = [start for _, start in firsts[1:]] + [self.elements]
        for (value, start), stop in zip(firsts, stops, strict=True):
            start, stop = max(start, within.start), min(stop, within.stop)
            if start < stop:
                yield value, start, stop


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """Buckets for the parameters of one pipeline stage and tensor rank. ``ranks``: default number of data ranks that
    shard a bucket.
    """

    ranks: int
    buckets: tuple[Bucket, ...]
    """Buckets of the trained parameters."""
    frozen: tuple[Bucket, ...] = ()
    """Buckets of frozen parameters, which exist only where parameters are sharded (ZeRO 3)."""

    @property
    def elements(self) -> int:
        """Number of elements of all trained buckets, with padding."""
        return sum(bucket.elements for bucket in self.buckets)


def build_layout(
    items: Sequence[Item], ranks: int, bucket_elements: int, alignment: int = ALIGNMENT, spread: Spread | None = None
) -> FlatLayout:
    """Distributes the parameters ``items``, in model order, to buckets for ``ranks`` data ranks. Returns the layout.

    A bucket has at most ``bucket_elements`` elements before its final padding, or one parameter that is larger. At
    ZeRO 3 the parameters of a gather group form one bucket of any size. Parameters in a bucket are sorted by optimizer
    group.

    Args:
        alignment: number of elements, a multiple of ALIGNMENT; each parameter starts at a multiple of it.
        spread: default axes, for items without their own ``spread``; None: the data axis.
    """
    usual = (spread or Spread())._replace(ranks=ranks)
    items = [item if item.spread is not None else replace(item, spread=usual) for item in items]
    trained = _fill([item for item in items if item.trainable], bucket_elements, alignment)
    frozen = _fill([item for item in items if not item.trainable], bucket_elements, alignment)
    return FlatLayout(
        ranks,
        tuple(_bucket(i, members, alignment) for i, members in enumerate(trained)),
        tuple(_bucket(i, members, alignment) for i, members in enumerate(frozen, len(trained))),
    )


def _fill(items: Sequence[Item], bucket_elements: int, alignment: int) -> list[list[Item]]:
    """Distributes the items to buckets; returns the members of each."""
    filled: list[list[Item]] = []
    open_buckets: dict[tuple[object, ...], list[Item]] = {}
    for item in sorted(reversed(items), key=lambda item: bool(item.ties) or item.partial):
        # the owners of tied parameters use them in different groups, yet must lay the bucket out alike
        used = () if item.ties else (item.gathers, item.stages)
        kind = (item.dtype, item.ties, item.partial, item.exact, item.spread, used)
        current = open_buckets.get(kind)
        size = _elements(current or (), alignment) + _elements([item], alignment)
        full = not item.gathers and current and size > bucket_elements
        if current is None or full:
            current = open_buckets[kind] = []
            filled.append(current)
        current.append(item)
    return filled


def _bucket(index: int, members: Sequence[Item], alignment: int) -> Bucket:
    slots: list[Slot] = []
    end = 0
    # All tensor ranks lay out alike what they share, whoever counts it in the norm: a collective may add in an order
    # that depends on the place in the bucket, and copies have to keep equal bits. The ranks that share a deferred
    # bucket share all of it.
    late = bool(members[0].ties) or members[0].partial
    for item in sorted(members, key=lambda item: (item.group, item.shared and not late)):
        slots.append(Slot(item.name, item.shape, end, item.group, item.counted, item.copies))
        end += _aligned(math.prod(item.shape), alignment)
    kind = members[0]
    assert kind.spread is not None  # ``build_layout`` has given one to each
    gathers = tuple(sorted({turn for item in members for turn in item.gathers}))
    stages = tuple(sorted({stage for item in members for stage in item.stages}))
    return Bucket(
        index=index,
        dtype=kind.dtype,
        slots=tuple(slots),
        elements=_aligned(max(end, 1), alignment * kind.spread.ranks),
        spread=kind.spread,
        ties=kind.ties,
        partial=kind.partial,
        gathers=gathers,
        stages=stages,
        exact=kind.exact,
    )


def _elements(items: Iterable[Item], alignment: int) -> int:
    return sum(_aligned(math.prod(item.shape), alignment) for item in items)


def _aligned(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
