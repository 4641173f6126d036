"""Ranks as a box of named axes. Pure arithmetic: any rank, no processes, no torch.

``AXES`` is the table of axes, from the one that varies slowest with the rank to the fastest, so that the ranks that
talk most sit closest together; with the order "tp-pp-dp" the stages of a replica sit closer than the data ranks:

    8 ranks as pp=2, dp=2, tp=2            stage 0          stage 1
                                     dp 0   0   1     dp 0   4   5
                                     dp 1   2   3     dp 1   6   7
                                          tp0 tp1          tp0 tp1

    as tp-pp-dp                             stage 0          stage 1
                                     dp 0   0   1     dp 0   2   3
                                     dp 1   4   5     dp 1   6   7

Code outside the grid, the configuration and the plan asks for an axis by its meaning: ``grid.rows`` (ranks read rows
of their own), ``grid.copies`` (ranks hold equal parameters), ``grid.sharding`` (ZeRO divides state among them),
``replica`` (the ranks of one full model that reads one set of rows). Each is the name of an axis or, where several axes
mean the same, their names joined by "+".
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from engine.errors import GridError

Axis = str
"""The coordinates in which ranks of a group differ: a name of ``AXES``, several joined by "+", or one of these.

``world``: all ranks. ``replica``: the ranks of one full model, which read the same rows. ``stage``: the ranks of one
pipeline index. ``stage_replica``: those of a stage that are in one replica. ``dp_shard`` and ``dp_replicate``: the two
parts of the data axis: neighbours that share one copy of what ZeRO shards, and the ranks of one place in all such
groups, which hold the same shard. Without ``Grid.shard_size`` the first is dp.
"""

Order = Literal["tp-dp-pp", "tp-pp-dp"]
"""The axes of a grid, from the one that varies fastest with the rank to the slowest; others keep their place."""


@dataclass(frozen=True, slots=True)
class GridAxis:
    """An axis of the grid, and what it means for the data and the parameters of its ranks."""

    name: str
    """In groups, traffic, reports and checkpoints."""
    noun: str
    """In messages; the key of its size under "parallel"."""
    rows: bool = False
    """Ranks along it read rows of their own, and their gradients are summed."""
    copies: bool = False
    """Ranks along it hold equal parameters."""
    size: int = 1
    """Number of ranks where the configuration has no key for it."""


class Spread(NamedTuple):
    """The axes over which a kind of parameters and their state are spread, and the number of shards."""

    sharding: Axis = "dp"
    """ZeRO divides the state among ranks along it; gradients are reduced over it."""
    groups: Axis = "dp_replicate"
    """Ranks along it hold the same shard, and sum it once a step."""
    sums: Axis = "dp"
    """Ranks along it have summands of its gradient, which are added without ZeRO."""
    copies: Axis = "dp"
    """Ranks along it hold equal parameters, which ZeRO may have sharded."""
    shard_copies: Axis = "dp_replicate"
    """Ranks along it hold equal shards."""
    ranks: int = 1
    """Size of ``sharding``."""


AXES: tuple[GridAxis, ...] = (
    GridAxis("pp", "pipeline"),
    GridAxis("dp", "data", rows=True, copies=True),
    GridAxis("tp", "tensor"),
)


class Coord(Mapping[str, int]):
    """Position of a rank in the grid: an index for each axis, 0 where none is given."""

    __slots__ = ("_indices",)

    def __init__(self, **indices: int) -> None:
        self._indices = {axis.name: indices.pop(axis.name, 0) for axis in AXES}
        if indices:
            raise GridError(f"{next(iter(indices))!r} is no axis of the grid; give indices of {', '.join(self)}.")

    def __getitem__(self, axis: str) -> int:
        return self._indices[axis]

    def __iter__(self) -> Iterator[str]:
        return iter(self._indices)

    def __len__(self) -> int:
        return len(self._indices)

    def __hash__(self) -> int:
        return hash(tuple(self._indices.values()))

    def __repr__(self) -> str:
        return f"Coord({', '.join(f'{axis}={index}' for axis, index in self.items())})"

    @property
    def pp(self) -> int:
        """Pipeline rank."""
        return self._indices["pp"]

    @property
    def dp(self) -> int:
        """Data rank."""
        return self._indices["dp"]

    @property
    def tp(self) -> int:
        """Tensor rank."""
        return self._indices["tp"]


class Grid:
    """The box of ranks, and this rank's position in it. Immutable.

    Args:
        rank: this rank.
        order: the axes from the closest ranks to the farthest.
        shard_size: data ranks of a shard group, side by side; None: all of them.
        sizes: number of ranks along each axis; 1 where none is given.

    Raises:
        GridError: a size below 1, an axis that is not in the table, or a rank outside the box.
    """

    __slots__ = ("_coord", "_digits", "_known", "_sizes", "order", "rank", "shard_size", "sizes", "world_size")

    def __init__(
        self, *, rank: int = 0, order: Order = "tp-dp-pp", shard_size: int | None = None, **sizes: int
    ) -> None:
        self.sizes: Mapping[str, int] = {axis.name: sizes.pop(axis.name, 1) for axis in AXES}
        if sizes:
            raise GridError(f"{next(iter(sizes))!r} is no axis of the grid; give sizes of {', '.join(self.sizes)}.")
        for axis in AXES:
            if self.sizes[axis.name] < 1:
                raise GridError(
                    f"{axis.noun} size {self.sizes[axis.name]} is below 1; give every axis at least one rank."
                )
        self.world_size = math.prod(self.sizes.values())
        if not 0 <= rank < self.world_size:
            raise GridError(
                f"rank {rank} is outside a grid of {self.world_size} ranks ({self.shape}); "
                f"start exactly {self.world_size} processes."
            )
        if shard_size is not None and (shard_size < 1 or self.dp % shard_size):
            raise GridError(
                f"shard size {shard_size} does not divide the {self.dp} data ranks; give a divisor of {self.dp}."
            )
        self.rank, self.order, self.shard_size = rank, order, shard_size
        self._digits = _digits(self.sizes, order, shard_size or self.dp)
        self._known: dict[Axis, tuple[tuple[int, int], ...]] = {}
        self._sizes: dict[Axis, int] = {}
        self._coord = self.coord(rank)

    @property
    def pp(self) -> int:
        """Size of the pipeline axis."""
        return self.sizes["pp"]

    @property
    def dp(self) -> int:
        """Size of the data axis."""
        return self.sizes["dp"]

    @property
    def tp(self) -> int:
        """Size of the tensor axis."""
        return self.sizes["tp"]

    @property
    def rows(self) -> Axis:
        """The axis along which ranks read rows of their own."""
        return self._joined(axis.name for axis in AXES if axis.rows)

    @property
    def row_ranks(self) -> int:
        """Number of ranks that read rows of their own: size of ``rows``."""
        return self.size(self.rows)

    @property
    def row_rank(self) -> int:
        """Place of the rows of this rank in a global batch: index along ``rows``."""
        return self.index(self.rows)

    @property
    def copies(self) -> Axis:
        """The axis along which ranks hold equal parameters, which ZeRO may have sharded."""
        return self._joined(axis.name for axis in AXES if axis.copies)

    @property
    def sharding(self) -> Axis:
        """The axis over which ZeRO shards: dp, or its inner part."""
        return "dp_shard" if self.data_axes else "dp"

    @property
    def shard_line(self) -> Axis:
        """The axis of which shard groups are runs."""
        return "dp"

    @property
    def shard_groups(self) -> Axis:
        """The axis along which the gradients of equal shards are summed: one rank of each shard group."""
        return "dp_replicate"

    @property
    def shard_copies(self) -> Axis:
        """The axis along which ranks hold the same shard of what ZeRO shards."""
        others = [axis.name for axis in AXES if axis.copies and axis.name != "dp"]
        return self._joined((self.shard_groups, *others))

    @property
    def spread(self) -> Spread:
        """The axes over which parameters are spread that every data rank computes with."""
        return Spread(
            self.sharding, self.shard_groups, self.rows, self.copies, self.shard_copies, self.size(self.sharding)
        )

    @property
    def data_axes(self) -> tuple[Axis, ...]:
        """The axes that dp is made of, if there are several shard groups."""
        return ("dp_shard", "dp_replicate") if self.shard_size not in (None, self.dp) else ()

    def coord(self, rank: int | None = None) -> Coord:
        """Position of ``rank``, or of this rank."""
        if rank is None:
            return self._coord
        self._check(rank)
        return Coord(**{axis: self.index(axis, rank) for axis in self.sizes})

    def rank_at(self, **indices: int) -> int:
        """The rank at a position, 0 along every axis that is not given; inverse of :meth:`coord`."""
        return sum(index * self.stride(axis) for axis, index in indices.items())

    def at(self, rank: int) -> "Grid":
        """The same grid as another rank sees it."""
        return Grid(rank=rank, order=self.order, shard_size=self.shard_size, **self.sizes)

    def size(self, axis: Axis) -> int:
        """Number of ranks along ``axis``."""
        found = self._sizes.get(axis)
        if found is None:
            found = self._sizes[axis] = math.prod(size for size, _ in self._digits_of(axis))
        return found

    def stride(self, axis: Axis) -> int:
        """Distance, in ranks, from a rank to its next peer along ``axis``."""
        return min(stride for _, stride in self._digits_of(axis))

    def index(self, axis: Axis, rank: int | None = None) -> int:
        """Index of ``rank``, or of this rank, among its :meth:`peers` along ``axis``."""
        rank, index = self.rank if rank is None else rank, 0
        for size, stride in self._digits_of(axis):
            index = index * size + rank // stride % size
        return index

    def is_first(self, axis: Axis, coord: Coord | None = None) -> bool:
        """Return whether the rank at ``coord``, or this rank, is the first of its peers along ``axis``."""
        return self.index(axis, None if coord is None else self.rank_at(**coord)) == 0

    def peers(self, axis: Axis, rank: int | None = None) -> tuple[int, ...]:
        """The ranks that differ from ``rank`` (or this rank) along ``axis`` only, itself included; ascending."""
        rank = self.rank if rank is None else rank
        self._check(rank)
        digits = self._digits_of(axis)
        first = rank - sum(rank // stride % size * stride for size, stride in digits)
        return tuple(first + offset for offset in _offsets(digits))

    def groups(self, axis: Axis) -> Iterator[tuple[int, ...]]:
        """Every group of peers along ``axis``, in order of their first ranks; each rank is in exactly one of them."""
        own = set(self._names(axis))
        offsets = _offsets(self._digits_of(axis))
        others = [digit for name, digit in self._digits.items() if name not in own]
        return (tuple(first + offset for offset in offsets) for first in _offsets(others))

    def _names(self, axis: Axis) -> Iterable[str]:
        """The digits of a rank that differ along ``axis``."""
        if axis == "world":
            return self._digits
        if axis in ("replica", "stage", "stage_replica"):
            others = {*(self._names(self.rows) if axis != "stage" else ()), *(("pp",) if axis != "replica" else ())}
            return [name for name in self._digits if name not in others]
        return [name for part in axis.split("+") for name in (_DATA_PARTS if part == "dp" else (part,))]

    def _digits_of(self, axis: Axis) -> Sequence[tuple[int, int]]:
        """(size, stride) of those digits, from the farthest to the nearest; every collective asks for them."""
        found = self._known.get(axis)
        if found is None:
            names = set(self._names(axis))
            found = self._known[axis] = tuple(digit for name, digit in self._digits.items() if name in names)
        return found

    def _joined(self, names: Iterable[str]) -> Axis:
        """The axes of several ranks among ``names`` as one; the first of them if there are none."""
        names = list(names)
        return "+".join(name for name in names if self.size(name) > 1) or names[0]

    def _check(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise GridError(f"rank {rank} is outside this grid; give a rank from 0 to {self.world_size - 1}.")

    @property
    def shape(self) -> str:
        """The sizes in words: 2 pipeline x 4 data x 1 tensor."""
        return " x ".join(
            f"{self.sizes[axis.name]} {axis.noun}"
            for axis in AXES
            if axis.name in ("pp", "dp", "tp") or self.sizes[axis.name] > 1
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Grid) and self._state() == other._state()

    def __hash__(self) -> int:
        return hash(self._state())

    def _state(self) -> tuple[object, ...]:
        return tuple(self.sizes.items()), self.rank, self.order, self.shard_size

    def __repr__(self) -> str:
        sizes = ", ".join(f"{axis}={size}" for axis, size in self.sizes.items())
        return f"Grid({sizes}, rank={self.rank}, order={self.order!r}, shard_size={self.shard_size})"

    def __str__(self) -> str:
        order = f" in the order {self.order}" if self.order != "tp-dp-pp" else ""
        return f"{self.world_size} ranks = {self.shape}{order}"


_DATA_PARTS = ("dp_replicate", "dp_shard")


def _digits(sizes: Mapping[str, int], order: Order, shards: int) -> dict[str, tuple[int, int]]:
    """Size and stride of each axis, from the farthest to the nearest; the data axis as its two parts."""
    names = list(sizes)
    if order == "tp-pp-dp":
        pp, dp = names.index("pp"), names.index("dp")
        names[pp], names[dp] = names[dp], names[pp]
    parts = list[tuple[str, int]]()
    for name in names:
        counts = (sizes["dp"] // shards, shards)
        parts += zip(_DATA_PARTS, counts, strict=True) if name == "dp" else [(name, sizes[name])]
    found, stride = list[tuple[str, tuple[int, int]]](), 1
    for name, size in reversed(parts):
        found.append((name, (size, stride)))
        stride *= size
    return dict(reversed(found))


def _offsets(digits: Iterable[tuple[int, int]]) -> list[int]:
    """Distances, ascending, of all places that differ in ``digits``, which run from the farthest to the nearest."""
    found = [0]
    for size, stride in digits:
        found = [offset + index * stride for offset in found for index in range(size)]
    return found


def saved_order(sizes: Mapping[str, object]) -> Order:
    """The order of a grid that was written down; one from before there were two orders does not tell it."""
    return "tp-pp-dp" if sizes.get("order") == "tp-pp-dp" else "tp-dp-pp"


def saved_grid(sizes: Mapping[str, Any]) -> Grid:
    """The grid that was written down, as rank 0 sees it; an axis that did not exist then has one rank."""
    return Grid(order=saved_order(sizes), **{axis.name: sizes.get(axis.name, 1) for axis in AXES})


def axis_groups(grid: Grid) -> dict[Axis, Axis]:
    """For each axis of several ranks, in the order of opening, the axis whose group it uses.

    Axes along which parameters differ, and the world, lend their groups; those of copies stay apart, since gradients
    travel over them beside everything else.
    """
    lenders = ("world", *(axis.name for axis in AXES if not axis.copies))
    meanings = ("replica", *grid.data_axes, grid.rows, grid.copies, grid.shard_copies)
    used: dict[Axis, Axis] = {"world": "world"}
    for axis in (*grid.sizes, *meanings):
        if axis not in used and grid.size(axis) > 1:
            peers = grid.peers(axis)
            used[axis] = next((other for other in lenders if other in used and grid.peers(other) == peers), axis)
    return used
