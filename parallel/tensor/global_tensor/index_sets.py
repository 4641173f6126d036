"""Index sets: the indices of a dim on each rank, sorted and compared by value. Pure arithmetic.

    blocks      0 0 0 1 1 1      an equal block on every rank, in rank order: collectives need no copy
    even        0 1 0 1 0 1      every index on one rank, equally many on each
    thirds      0 1 | 0 1 | 0 1  a fused q, k, v
    shared      01 01 | 01 01    an index on several ranks: gradients are partial

A dim that is full on every rank has None in place of an Index.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import product
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from engine.parallel.shard_table import Range
from engine.parallel.tensor.global_tensor.index_runs import (
    Runs,
    depth,
    indices_of,
    join_runs,
    meet,
    one_run,
    places_in,
    run_length,
    runs_from,
)

Indices = NDArray[np.int64]
Entry = TypeVar("Entry")


class NoRuleError(Exception):
    """Error of a rule that cannot run a torch function on the shards of its arguments.

    The caller then runs the function on full tensors.
    """


class Index:
    """Sharding of a dim of ``size`` indices: ``ranks[r]`` are the ascending indices on rank r.

    Every index is on at least one rank.
    """

    def __init__(self, ranks: Iterable[Indices], size: int) -> None:
        self.ranks = tuple(np.ascontiguousarray(held, dtype=np.int64) for held in ranks)
        self._describe(map(runs_from, self.ranks), size)

    def _describe(self, runs: Iterable[Runs], size: int) -> None:
        self.runs, self.size = tuple(np.ascontiguousarray(held) for held in runs), size
        self._key = (size, *(held.tobytes() for held in self.runs))
        self._hash = hash(self._key)

    @classmethod
    def of_runs(cls, runs: Iterable[Runs], size: int) -> "Index":
        """Returns the sharding of ``size`` indices with the indices ``runs[r]`` on rank r.

        ``runs[r]``: array [m, 2] of (first, last + 1).
        """
        made = cls.__new__(cls)
        made._describe(runs, size)
        return made

    @cached_property
    def ranks(self) -> tuple[Indices, ...]:
        """Indices that each rank stores, ascending, in rank order."""
        return tuple(map(indices_of, self.runs))

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Index) and self._hash == other._hash and self._key == other._key

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"Index({self.size} over {len(self.runs)}: {' '.join(map(str, self.counts))})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Index.of_runs, (self.runs, self.size)  # built anew, because hashes of bytes differ between processes

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Number of indices that each rank stores, in rank order."""
        return tuple(map(run_length, self.runs))

    @cached_property
    def holders(self) -> Indices:
        """Bit mask of ranks for each index of the dim: bit r is set if rank r stores the index."""
        masks = np.zeros(self.size, dtype=np.int64)
        for rank, held in enumerate(self.ranks):
            masks[held] |= 1 << rank
        return masks

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        """Distinct values among the bit masks :attr:`holders`."""
        _, masks = depth([one_run(0, self.size), *self.runs], [0, *(1 << rank for rank in range(len(self.runs)))])
        return tuple(np.unique(masks[:-1]).tolist())

    @cached_property
    def once(self) -> bool:
        """True if every index is on exactly one rank."""
        return sum(self.counts) == self.size

    @cached_property
    def even(self) -> bool:
        """True if every index is on exactly one rank, and all ranks have equally many."""
        return self.once and len(set(self.counts)) == 1

    @cached_property
    def order(self) -> Indices:
        """Position of each index in the concatenation of all shards in rank order; valid only if :attr:`once`."""
        return np.argsort(np.concatenate(self.ranks))

    @cached_property
    def blocks(self) -> bool:
        """True if each rank stores one contiguous block of the same size, in rank order."""
        return self.even and len(join_runs(np.concatenate(self.runs))) == 1

    @cached_property
    def owned(self) -> "Index":
        """Sharding with each index only on the first rank that stores it."""
        masks = self.holders
        first = masks & -masks
        return Index((held[first[held] == 1 << rank] for rank, held in enumerate(self.ranks)), self.size)

    @classmethod
    def even_blocks(cls, size: int, ranks: int) -> "Index":
        """Returns the sharding of ``size`` indices into ``ranks`` contiguous blocks of equal size, in rank order."""
        step = size // ranks
        return cls.of_runs((one_run(rank * step, (rank + 1) * step) for rank in range(ranks)), size)

    @classmethod
    def of_ranges(cls, ranges: Sequence[Range], ranks: int) -> "Index | None":
        """Returns the sharding given by ``ranges`` of rows; None if every rank stores all rows.

        Each rank in a range's ``holders`` stores the whole range. ``ranks``: number of ranks.
        """
        held = [[np.arange(r.start, r.stop) for r in ranges if rank in r.holders] for rank in range(ranks)]
        size = max(r.stop for r in ranges)
        return index_of([np.sort(np.concatenate(pieces or [np.arange(0)])) for pieces in held], size)


Sets = tuple[Index | None, ...]


def index_of(ranks: Sequence[Indices], size: int) -> Index | None:
    """Returns the sharding with the indices ``ranks[r]`` on rank r; None if every rank stores all indices.

    Raises:
        NoRuleError: a dim of one element would be sharded.
    """
    return index_of_runs([runs_from(held) for held in ranks], size)


def index_of_runs(ranks: Sequence[Runs], size: int) -> Index | None:
    """Returns the sharding with the indices ``ranks[r]`` on rank r; None if every rank stores all indices.

    ``ranks[r]``: array [m, 2] of runs (first, last + 1).

    Raises:
        NoRuleError: a dim of one element would be sharded.
    """
    if all(run_length(held) == size for held in ranks):
        return None
    if size == 1:
        raise NoRuleError("a dim of one element cannot be sharded, because it broadcasts.")
    return Index.of_runs(ranks, size)


def common(a: Index | None, b: Index | None) -> Index | None:
    """Returns the sharding with only the indices that a rank stores under both ``a`` and ``b``.

    None means unsharded.

    Raises:
        NoRuleError: some index would be on no rank.
    """
    if a is b or b is None:
        return a
    if a is None or a == b:
        return b
    found = index_of_runs([meet(x, y) for x, y in zip(a.runs, b.runs, strict=True)], a.size)
    if found is not None and 0 in found.kinds:
        raise NoRuleError("the operands are sharded differently: no rank stores some index of both.")
    return found


def replaced(entries: Sequence[Entry], place: int, entry: Entry) -> tuple[Entry, ...]:
    """Returns a copy of ``entries`` with ``entry`` at index ``place``."""
    return (*entries[:place], entry, *entries[place + 1 :])


def covers(sets: Iterable[Index | None]) -> bool:
    """Returns True if every element of a tensor is on at least one rank. ``sets``: sharding of each dim, or None."""
    kinds = [index.kinds for index in sets if index is not None]
    return len(kinds) < 2 or all(_meet(masks) for masks in product(*kinds))


def held_once(sets: Iterable[Index | None]) -> bool:
    """Returns True if some dim is sharded and every element is on exactly one rank.

    ``sets``: sharding of each dim, or None.
    """
    kinds = [index.kinds for index in sets if index is not None]
    return bool(kinds) and all(_meet(masks).bit_count() == 1 for masks in product(*kinds))


def _meet(masks: Iterable[int]) -> int:
    met = -1
    for mask in masks:
        met &= mask
    return met


def positions(have: Index | None, want: Index | None, rank: int) -> Runs | None:
    """Returns positions in a rank's shard, as runs [m, 2]: the elements to take for another sharding of the dim.

    ``have``: sharding of the shard; ``want``: other sharding; None means unsharded. Returns None if they are equal.

    Raises:
        NoRuleError: some index of ``want`` is not on the rank.
    """
    if have == want:
        return None
    if want is not None:
        places = want.runs[rank] if have is None else places_in(have.runs[rank], want.runs[rank])
        if places is not None:
            return places
    raise NoRuleError("this rank does not store all the indices that the operation needs.")
