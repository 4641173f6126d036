"""Who has which elements of a tensor: parts, pieces, and the runs that two pieces share. Pure arithmetic.

A tensor of 6 x 4 elements whose dim 0 is cut over two tensor ranks, each part shared by two data ranks:

    part of tensor rank 0    rows 0:2 and 4:5 (a fused weight has several ranges), 12 elements, one behind the other
    piece of data rank 1     elements 6:12 of that part

Both the rank that stores a piece and the one that wants another read the same arithmetic, so a checkpoint of any
grid loads on any other: intersect, copy the runs.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Part:
    """Rows of one dim of a tensor, one behind the other; without a dim the whole tensor."""

    shape: tuple[int, ...]
    """Of the whole tensor."""
    dim: int | None = None
    rows: tuple[tuple[int, int], ...] = ()
    """(start, stop) along ``dim``, rising."""

    @cached_property
    def elements(self) -> int:
        """How many there are in the part."""
        if self.dim is None:
            return prod(self.shape)
        inner = prod(self.shape[: self.dim]) * prod(self.shape[self.dim + 1 :])
        return inner * sum(stop - start for start, stop in self.rows)

    def whole(self) -> "Piece":
        """All of it."""
        return Piece(self, 0, self.elements)


class Spans(NamedTuple):
    """Elements that lie together in the whole tensor, rising; equally long arrays."""

    full: Numbers
    """Where they begin in the whole tensor."""
    local: Numbers
    """Where they begin in the piece."""
    length: Numbers


@dataclass(frozen=True)
class Piece:
    """Elements ``start:stop`` of a part."""

    part: Part
    start: int
    stop: int

    @property
    def elements(self) -> int:
        """How many there are."""
        return self.stop - self.start

    def spans(self) -> Spans:
        """Where its elements lie in the whole tensor."""
        full, count = _full_spans(self.part)
        local = np.cumsum(count) - count
        first = np.maximum(local, self.start)
        last = np.minimum(local + count, self.stop)
        kept = first < last
        full, local, first, last = full[kept], local[kept], first[kept], last[kept]
        return Spans(full + first - local, first - self.start, last - first)

    def within(self, part: Part) -> "Piece":
        """The same elements as far as they are in ``part``, whose rows are some of this part's rows."""
        if part == self.part:
            return self
        before = int(runs(Piece(self.part, 0, self.start), part.whole()).length.sum())
        inside = int(runs(self, part.whole()).length.sum())
        return Piece(part, before, before + inside)


class Runs(NamedTuple):
    """Elements that lie together in a source and in a target; equally long arrays."""

    source: Numbers
    target: Numbers
    length: Numbers


def runs(source: Piece, target: Piece) -> Runs:
    """What two pieces of one tensor share, in the order of the whole tensor."""
    left, right = source.spans(), target.spans()
    empty = np.zeros(0, dtype=np.int64)
    if not len(left.full) or not len(right.full):
        return Runs(empty, empty, empty)
    ends = (left.full, left.full + left.length, right.full, right.full + right.length)
    bounds = np.unique(np.concatenate(ends))
    starts = bounds[:-1]
    a, in_a = _containing(left, starts)
    b, in_b = _containing(right, starts)
    both = in_a & in_b
    a, b, starts, count = a[both], b[both], starts[both], np.diff(bounds)[both]
    return _joined(Runs(left.local[a] + starts - left.full[a], right.local[b] + starts - right.full[b], count))


def covers_once(shape: tuple[int, ...], pieces: Iterable[Piece]) -> bool:
    """Whether pieces tile their parts, and parts the tensor: then every element lies in exactly one piece.

    Parts are cut along one dim. No span is made, so the answer costs nothing for tensors that only a hostile file has.
    """
    ranges: dict[Part, list[tuple[int, int]]] = {}
    for piece in pieces:
        if piece.elements:
            ranges.setdefault(piece.part, []).append((piece.start, piece.stop))
    if not ranges:
        return prod(shape) == 0
    if any(part.shape != shape or not _tiles(found, part.elements) for part, found in ranges.items()):
        return False
    dim = next(iter(ranges)).dim
    if dim is None:
        return len(ranges) == 1
    rows = [row for part in ranges for row in part.rows]
    return all(part.dim == dim for part in ranges) and _tiles(rows, shape[dim])


def _tiles(ranges: Iterable[tuple[int, int]], length: int) -> bool:
    """Whether ranges follow one another from 0 to ``length``."""
    end = 0
    for start, stop in sorted(ranges):
        if start != end:
            return False
        end = stop
    return end == length


def _full_spans(part: Part) -> tuple[Numbers, Numbers]:
    """(start in the whole tensor, count) of the part's elements, in its own order."""
    if part.dim is None:
        whole = prod(part.shape)
        return np.zeros(min(whole, 1), dtype=np.int64), np.full(min(whole, 1), whole, dtype=np.int64)
    inner, width = prod(part.shape[part.dim + 1 :]), part.shape[part.dim]
    rows = np.asarray(part.rows, dtype=np.int64).reshape(-1, 2)
    outer = np.arange(prod(part.shape[: part.dim]), dtype=np.int64)
    full = ((outer[:, None] * width + rows[:, 0]) * inner).ravel()
    count = np.tile((rows[:, 1] - rows[:, 0]) * inner, len(outer))
    kept = count > 0
    return full[kept], count[kept]


def _containing(spans: Spans, places: Numbers) -> tuple[Numbers, NDArray[np.bool_]]:
    """For each place the last span that begins at or before it, and whether it lies in there."""
    index = np.searchsorted(spans.full, places, side="right") - 1
    return index, (index >= 0) & (places < spans.full[index] + spans.length[index])


def _joined(found: Runs) -> Runs:
    """Neighbours that go on in source and target become one run."""
    if len(found.length) < 2:
        return found
    goes_on = (found.source[1:] == found.source[:-1] + found.length[:-1]) & (
        found.target[1:] == found.target[:-1] + found.length[:-1]
    )
    first = np.concatenate([[0], np.flatnonzero(~goes_on) + 1])
    return Runs(found.source[first], found.target[first], np.add.reduceat(found.length, first))
