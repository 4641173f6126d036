"""Layouts of the results of operations: full shapes and index sets. Pure arithmetic.

reshape works on groups of dims with equal products; a group without a sharded dim needs nothing:

    (B, T, 3 C)  ->  (B, T, 3, H, D)      groups  B | T | 3 C -> 3 H D
                        rank 0 has the flat numbers {q0, k0, v0} of 3 C;
                        unravelled into (3, H, D): all x {0} x all, a product with the sets of the new dims as factors
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from engine.parallel.tensor.global_tensor.index_runs import Runs, join_runs, meet, one_run, places_in, runs_from
from engine.parallel.tensor.global_tensor.index_sets import (
    Index,
    Indices,
    NoRuleError,
    Sets,
    common,
    covers,
    index_of,
    index_of_runs,
)

Shape = tuple[int, ...]


class Layout(NamedTuple):
    """Full shape of a tensor and the sharding of each dim, None for an unsharded dim."""

    shape: Shape
    sets: Sets


def join_layouts(layouts: Sequence[Layout], tail: int = 0) -> Layout:
    """Returns the layout of the broadcast of operands with ``layouts``; a rank has the intersection of its indices in
    all operands.

    The last ``tail`` dims take no part in the broadcast; the layout has size 1 in their place.

    Raises:
        NoRuleError: some element would be on no rank.
    """
    dims = max(len(layout.shape) for layout in layouts)
    shape: list[int] = [1] * dims
    sets: list[Index | None] = [None] * dims
    for layout in layouts:
        offset = dims - len(layout.shape)
        for dim in range(len(layout.shape) - tail):
            if layout.shape[dim] != 1:
                if shape[offset + dim] not in (1, layout.shape[dim]):
                    raise NoRuleError("the sizes do not agree; torch raises its own error.")
                shape[offset + dim] = layout.shape[dim]
                sets[offset + dim] = common(sets[offset + dim], layout.sets[dim])
    return checked(tuple(shape), tuple(sets))


def checked(shape: Shape, sets: Sets) -> Layout:
    """Returns a :class:`Layout` of the full shape ``shape`` and the shardings ``sets``, after a check.

    Raises:
        NoRuleError: some element would be on no rank.
    """
    if not covers(sets):
        raise NoRuleError("two dims are sharded in such a way that some element would be on no rank.")
    return Layout(shape, sets)


def local_shape(layout: Layout, rank: int) -> Shape:
    """Returns the shape of the shard on ``rank`` of a tensor with this ``layout``."""
    pairs = zip(layout.shape, layout.sets, strict=True)
    return tuple(size if index is None else index.counts[rank] for size, index in pairs)


def positive_dim(dim: int, dims: int) -> int:
    """Returns ``dim`` counted from the front, for a tensor of ``dims`` dims.

    Raises:
        NoRuleError: there is no such dim.
    """
    if not -max(dims, 1) <= dim < max(dims, 1):
        raise NoRuleError("the tensor has no such dim; torch raises its own error.")
    return dim % max(dims, 1)


def infer_size(numel: int, shape: Sequence[int]) -> Shape:
    """Returns ``shape`` with -1 replaced by the size that gives ``numel`` elements."""
    if -1 not in shape:
        return tuple(shape)
    known = -math.prod(shape)
    return tuple(numel // max(known, 1) if size == -1 else size for size in shape)


def reshaped(layout: Layout, shape: Shape) -> Layout:
    """Returns the layout of a tensor with ``layout`` after a reshape to the full shape ``shape``.

    Raises:
        NoRuleError: the elements of a rank do not form a shard of the new shape.
    """
    sets: list[Index | None] = [None] * len(shape)
    for old, new in dim_groups(layout.shape, shape):
        if any(layout.sets[dim] is not None for dim in old):
            group = Layout(tuple(layout.shape[dim] for dim in old), tuple(layout.sets[dim] for dim in old))
            for dim, index in zip(new, _regroup(group, [shape[dim] for dim in new]), strict=True):
                sets[dim] = index
    return Layout(shape, tuple(sets))


def dim_groups(old: Shape, new: Shape) -> Iterator[tuple[list[int], list[int]]]:
    """Yields the smallest groups of dims that a reshape changes independently, as pairs (dim numbers in ``old``, dim
    numbers in ``new``).

    Both sides of a pair have equally many elements.

    Raises:
        NoRuleError: the shapes have different numbers of elements.
    """
    i = j = 0
    while i < len(old) or j < len(new):
        left, right = list(range(i, min(i + 1, len(old)))), list(range(j, min(j + 1, len(new))))
        i, j = i + len(left), j + len(right)
        # the smaller product takes the next dim, until both are equal
        while (a := math.prod(old[d] for d in left)) != (b := math.prod(new[d] for d in right)):
            if (a < b or j == len(new)) and i < len(old):
                left.append(i)
                i += 1
            elif j < len(new):
                right.append(j)
                j += 1
            else:
                raise NoRuleError("the sizes do not agree; torch raises its own error.")
        yield left, right


def _regroup(group: Layout, shape: Sequence[int]) -> list[Index | None]:
    if (found := _regroup_runs(group, shape)) is not None:
        return found
    ranks = range(next(len(index.runs) for index in group.sets if index is not None))
    held = [_unravel(_flat(group, rank), shape) for rank in ranks]
    return [index_of([sets[dim] for sets in held], size) for dim, size in enumerate(shape)]


def _regroup_runs(group: Layout, shape: Sequence[int]) -> list[Index | None] | None:
    """Returns the sets of :func:`_regroup` from runs alone, if one dim is sharded before and after in few of them."""
    cut = [dim for dim, index in enumerate(group.sets) if index is not None]
    index = group.sets[cut[0]] if len(cut) == 1 else None
    if index is None:
        return None
    flat = _flat_runs(group.shape, cut[0], index)
    for dim, size in enumerate(shape if flat is not None else ()):
        inner = math.prod(shape[dim + 1 :])
        first = [meet(runs, one_run(0, size * inner)) for runs in flat or ()]
        if size > 1 and not any(bool((runs % inner).any()) for runs in first):
            made = Index.of_runs((runs // inner for runs in first), size)
            if _same(_flat_runs(tuple(shape), dim, made), flat):
                full = all(count == size for count in made.counts)
                return [made if place == dim and not full else None for place in range(len(shape))]
    return None


def _flat_runs(shape: Shape, dim: int, index: Index) -> list[Runs] | None:
    """Returns the runs of flat numbers on each rank of a tensor that is sharded along ``dim``; None: too many."""
    outer, inner, size = math.prod(shape[:dim]), math.prod(shape[dim + 1 :]), shape[dim]
    if outer * max(map(len, index.runs)) > _MANY_RUNS:
        return None
    starts = np.arange(outer, dtype=np.int64)[:, None, None] * (size * inner)
    return [join_runs((starts + runs * inner).reshape(-1, 2)) for runs in index.runs]


def _same(made: list[Runs] | None, wanted: list[Runs] | None) -> bool:
    if made is None or wanted is None:
        return False
    return all(np.array_equal(one, other) for one, other in zip(made, wanted, strict=True))


_MANY_RUNS = 4096
"""Number of runs from which a reshape computes with indices."""


def _flat(group: Layout, rank: int) -> Indices:
    pairs = zip(group.shape, group.sets, strict=True)
    axes = [np.arange(size) if index is None else index.ranks[rank] for size, index in pairs]
    return np.ravel_multi_index(np.ix_(*axes), group.shape).ravel().astype(np.int64)


def _unravel(flat: Indices, shape: Sequence[int]) -> list[Indices]:
    sets = [np.unique(along).astype(np.int64) for along in np.unravel_index(flat, shape)]
    if math.prod(map(len, sets)) != len(flat):
        raise NoRuleError("the shard of a rank is not a block of rows and columns in the new shape.")
    return sets  # the elements are a subset of the product of the sets and as many, so they equal the product


def sliced(index: Index, taken: Indices) -> tuple[Index, Index | None]:
    """Restricts the sharding ``index`` of a dim to the indices ``taken`` of a slice; returns (old, new).

    ``old`` contains positions in the full dim, ``new`` contains positions in the slice. ``new`` is None if every rank
    stores the whole slice.
    """
    asked = runs_from(taken)
    held = [meet(own, asked) for own in index.runs]
    places = [places_in(asked, own) for own in held]
    new = index_of_runs([own for own in places if own is not None], len(taken))
    return Index.of_runs(held, index.size), new


def repeated(index: Index, times: int, interleaved: bool) -> Index:
    """Returns the sharding of a dim after repetition of its indices: a a b b if ``interleaved``, otherwise a b a b."""
    if interleaved:
        ranks = [(own[:, None] * times + np.arange(times)).ravel() for own in index.ranks]
    else:
        ranks = [(np.arange(times)[:, None] * index.size + own).ravel() for own in index.ranks]
    return Index(ranks, index.size * times)


def concatenated(pieces: Sequence[tuple[int, Index | None]], ranks: int) -> Index | None:
    """Returns the sharding over ``ranks`` ranks of the dim along which operands are concatenated; None if unsharded.

    ``pieces``: (size of this dim, sharding of this dim or None) of each operand.
    """
    if all(index is None for _, index in pieces):
        return None
    starts = np.cumsum([0] + [size for size, _ in pieces])
    held = [
        np.concatenate(
            [
                start + (np.arange(size) if index is None else index.ranks[rank])
                for (size, index), start in zip(pieces, starts, strict=False)
            ]
        )
        for rank in range(ranks)
    ]
    return index_of(held, int(starts[-1]))
