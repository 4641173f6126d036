"""Index arithmetic of sharded tensors: parts (rows along one dim), pieces (flat ranges of a part) and their overlaps.

Example: dim 0 of a 6 x 4 tensor is sharded over two tensor ranks, and two data ranks share each part:

    part of tensor rank 0    rows 0:2 and 4:5 (a fused weight has several ranges), 12 elements, concatenated
    piece of data rank 1     elements 6:12 of that part

A checkpoint of any grid loads on any other: the loading rank intersects the saved pieces with its own and copies the
overlaps.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Part:
    """Selection of ``rows``, index ranges along the dim ``dim`` of a tensor, such as a tensor-parallel shard. A part
    with ``dim`` None is the full tensor.

    If ``dim`` > 0, ``outer`` may restrict the first dim to a range, such as the experts of a rank.
    """

    shape: tuple[int, ...]
    """Shape of the full tensor."""
    dim: int | None = None
    rows: tuple[tuple[int, int], ...] = ()
    """(start, stop) along ``dim``, ascending."""
    outer: tuple[int, int] | None = None
    """(start, stop) along the first dim, with ``dim`` > 0; None: all of it."""

    @property
    def box(self) -> tuple[int, ...]:
        """Shape of the full tensor, with the first dim reduced to the range ``outer`` if it is given."""
        if self.outer is None:
            return self.shape
        return (self.outer[1] - self.outer[0], *self.shape[1:])

    @cached_property
    def elements(self) -> int:
        """Number of elements in the part."""
        if self.dim is None:
            return prod(self.shape)
        inner = prod(self.box[: self.dim]) * prod(self.shape[self.dim + 1 :])
        return inner * sum(stop - start for start, stop in self.rows)

    def whole(self) -> "Piece":
        """Returns all elements of this part as a piece."""
        return Piece(self, 0, self.elements)

    @property
    def is_inside(self) -> bool:
        """True if the part's ranges of rows ascend without overlap and are inside the full tensor. Parts from files or
        other ranks need this check.
        """
        if self.dim is None:
            return not self.rows and self.outer is None
        if not 0 <= self.dim < len(self.shape):
            return False
        if self.outer is not None and (self.dim == 0 or not 0 <= self.outer[0] <= self.outer[1] <= self.shape[0]):
            return False
        bounds = (0, *(edge for row in self.rows for edge in row), self.shape[self.dim])
        return all(a <= b for a, b in pairwise(bounds)) and all(start < stop for start, stop in self.rows)


class Spans(NamedTuple):
    """Contiguous ranges of a flattened full tensor that make up a piece: arrays of their offsets in the tensor, offsets
    in the piece, and lengths.
    """

    full: Numbers
    """Offset of each range in the full tensor."""
    local: Numbers
    """Offset of each range in the piece."""
    length: Numbers


@dataclass(frozen=True)
class Piece:
    """Elements ``start:stop`` of the flattened ``part`` (rows of a tensor), such as the ZeRO shard of one data rank."""

    part: Part
    start: int
    stop: int

    @property
    def elements(self) -> int:
        """Number of elements in the piece."""
        return self.stop - self.start

    @property
    def is_inside(self) -> bool:
        """True if ``start:stop`` is within the part, and the part is valid (:attr:`Part.is_inside`)."""
        return self.part.is_inside and 0 <= self.start <= self.stop <= self.part.elements

    def spans(self) -> Spans:
        """Returns the contiguous ranges of the flattened full tensor that make up this piece, in ascending order."""
        full, count = _full_spans(self.part)
        local = np.cumsum(count) - count
        first = np.maximum(local, self.start)
        last = np.minimum(local + count, self.stop)
        kept = first < last
        full, local, first, last = full[kept], local[kept], first[kept], last[kept]
        return Spans(full + first - local, first - self.start, last - first)

    def within(self, part: Part) -> "Piece":
        """Returns the elements of this piece that are also in ``part``, as a range of the flattened ``part``.

        ``part`` must be a subset of ``self.part``.
        """
        if part == self.part:
            return self
        before = int(runs(Piece(self.part, 0, self.start), part.whole()).length.sum())
        inside = int(runs(self, part.whole()).length.sum())
        return Piece(part, before, before + inside)


class Runs(NamedTuple):
    """Ranges of elements that are contiguous in a source piece and a target piece, as three arrays with one entry per
    range.

    The arrays are offsets in the source piece, offsets in the target piece, and numbers of elements.
    """

    source: Numbers
    target: Numbers
    length: Numbers


def runs(source: Piece, target: Piece, inside: Iterable[Piece] = (), outside: Iterable[Piece] = ()) -> Runs:
    """Returns the elements that two pieces of a tensor share, as ranges in the order of the full tensor.

    Args:
        inside: further pieces; only elements that all of them contain are returned.
        outside: further pieces; no element that one of them contains is returned.
    """
    left, right = source.spans(), target.spans()
    within, without = [piece.spans() for piece in inside], [piece.spans() for piece in outside]
    empty = np.zeros(0, dtype=np.int64)
    if any(not len(spans.full) for spans in (left, right, *within)):
        return Runs(empty, empty, empty)
    ends = [edges for one in (left, right, *within, *without) for edges in (one.full, one.full + one.length)]
    bounds = np.unique(np.concatenate(ends))
    starts = bounds[:-1]
    a, chosen = _containing(left, starts)
    b, in_b = _containing(right, starts)
    chosen &= in_b
    for spans in within:
        chosen &= _containing(spans, starts)[1]
    for spans in without:
        if len(spans.full):
            chosen &= ~_containing(spans, starts)[1]
    a, b, starts, count = a[chosen], b[chosen], starts[chosen], np.diff(bounds)[chosen]
    return _joined(Runs(left.local[a] + starts - left.full[a], right.local[b] + starts - right.full[b], count))


def covers_once(shape: tuple[int, ...], pieces: Iterable[Piece]) -> bool:
    """Returns True if every element of a tensor of ``shape`` is in exactly one of ``pieces``.

    Parts (selections of rows) of different pieces must be equal, or disjoint and selected along the same dim, with
    equal or disjoint ranges ``outer``; otherwise returns False. The cost does not depend on the tensor's size.
    """
    ranges: dict[Part, list[tuple[int, int]]] = {}
    for piece in pieces:
        if piece.elements:
            ranges.setdefault(piece.part, []).append((piece.start, piece.stop))
    if not ranges:
        return prod(shape) == 0
    if any(part.shape != shape or not tiles(found, part.elements) for part, found in ranges.items()):
        return False
    dim = next(iter(ranges)).dim
    if dim is None:
        return len(ranges) == 1
    rows: dict[tuple[int, int] | None, list[tuple[int, int]]] = {}
    for part in ranges:
        rows.setdefault(part.outer, []).extend(part.rows)
    outer = [(0, shape[0]) if run is None else run for run in rows]
    whole = dim == 0 or tiles(outer, shape[0])
    return whole and all(part.dim == dim for part in ranges) and all(tiles(own, shape[dim]) for own in rows.values())


def tiles(ranges: Iterable[tuple[int, int]], length: int) -> bool:
    """Returns True if the ranges, sorted, cover 0 to ``length`` without gap or overlap."""
    end = 0
    for start, stop in sorted(ranges):
        if start != end:
            return False
        end = stop
    return end == length


def _full_spans(part: Part) -> tuple[Numbers, Numbers]:
    """Returns (start in the full tensor, count) of the part's contiguous stretches, in the part's own order."""
    if part.dim is None:
        whole = prod(part.shape)
        return np.zeros(min(whole, 1), dtype=np.int64), np.full(min(whole, 1), whole, dtype=np.int64)
    inner, width = prod(part.shape[part.dim + 1 :]), part.shape[part.dim]
    rows = np.asarray(part.rows, dtype=np.int64).reshape(-1, 2)
    outer = np.arange(prod(part.box[: part.dim]), dtype=np.int64)
    if part.outer is not None:
        outer += part.outer[0] * prod(part.shape[1 : part.dim])
    full = ((outer[:, None] * width + rows[:, 0]) * inner).ravel()
    count = np.tile((rows[:, 1] - rows[:, 0]) * inner, len(outer))
    kept = count > 0
    return full[kept], count[kept]


def _containing(spans: Spans, places: Numbers) -> tuple[Numbers, NDArray[np.bool_]]:
    """Returns for each place the index of the last span that starts at or before it, and a mask of places inside it."""
    index = np.searchsorted(spans.full, places, side="right") - 1
    return index, (index >= 0) & (places < spans.full[index] + spans.length[index])


def _joined(found: Runs) -> Runs:
    """Merges adjacent runs that continue in both source and target."""
    if len(found.length) < 2:
        return found
    goes_on = (found.source[1:] == found.source[:-1] + found.length[:-1]) & (
        found.target[1:] == found.target[:-1] + found.length[:-1]
    )
    first = np.concatenate([[0], np.flatnonzero(~goes_on) + 1])
    return Runs(found.source[first], found.target[first], np.add.reduceat(found.length, first))


@dataclass(frozen=True, slots=True)
class PieceRun:
    """Consecutive pieces of equal size in one part of a tensor, such as the shards of all data ranks."""

    first: Piece
    count: int = 1

    def piece(self, index: int) -> Piece:
        """Returns piece number ``index`` of the run, counted from 0."""
        size = self.first.elements
        return Piece(self.first.part, self.first.start + index * size, self.first.stop + index * size)

    def sharing(self, want: Piece) -> range:
        """Returns the indices of the run's pieces that may share elements with the piece ``want``."""
        size, (start, stop) = self.first.elements, _bounds(self.first.part, want)
        if not size:
            return range(0)
        first = max(0, (start - self.first.start) // size)
        return range(first, max(first, min(self.count, -((self.first.start - stop) // size))))


def _bounds(part: Part, want: Piece) -> tuple[int, int]:
    """Returns bounds in ``part`` outside which it shares no element with ``want``."""
    if part == want.part:
        return want.start, want.stop
    here, there = _offset(part), _offset(want.part)
    if here is not None and there is not None:
        return want.start + there - here, want.stop + there - here
    alike = part.dim is not None and part.dim == want.part.dim
    apart = alike and not any(a < d and c < b for a, b in part.rows for c, d in want.part.rows)
    return 0, 0 if apart else part.elements


def _offset(part: Part) -> int | None:
    """Returns the begin of a part that is one stretch of the full tensor; None for several stretches."""
    if part.dim is None:
        return 0
    return part.rows[0][0] * prod(part.shape[1:]) if part.dim == 0 and len(part.rows) == 1 else None
