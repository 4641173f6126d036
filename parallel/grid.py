"""Grid of ranks with named axes: pure arithmetic for any rank, without processes and without torch.

``AXES`` lists the axes, from the one that varies slowest with the rank to the fastest: ranks that communicate most are
neighbours. With the order "tp-pp-dp" the stages of a replica are closer to each other than the data ranks:

    8 ranks as pp=2, dp=2, tp=2            stage 0          stage 1
                                     dp 0   0   1     dp 0   4   5
                                     dp 1   2   3     dp 1   6   7
                                          tp0 tp1          tp0 tp1

    as tp-pp-dp                             stage 0          stage 1
                                     dp 0   0   1     dp 0   2   3
                                     dp 1   4   5     dp 1   6   7

Code outside the grid, configuration and plan selects an axis by its meaning: ``grid.rows`` (ranks read different rows),
``grid.copies`` (ranks hold equal parameters), ``grid.sharding`` (ZeRO shards state over it), ``replica`` (the ranks of
one full model, which read the same rows). Each is the name of an axis, or several names joined by "+".
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from engine.errors import GridError
from engine.parallel.data_digits import DataParts, data_parts, expert_problem

Axis = str
"""Name of an axis of ``AXES``, several names joined by "+", or one of these.

``world``: all ranks. ``replica``: the ranks of one full model, which read the same rows. ``stage``: the ranks of one
pipeline index. ``stage_replica``: the ranks of one stage in one replica. ``dp_shard`` and ``dp_replicate``: the two
parts of the data axis. Ranks along ``dp_shard`` are neighbours that share one copy of ZeRO's shards; ranks along
``dp_replicate`` hold the same shard in different groups. Without ``Grid.shard_size``, ``dp_shard`` is dp.

``ep``: data and context ranks that are neighbours and share the experts of each layer (``Grid.experts``). ``edp``: data
and context ranks that hold the same experts, and its two parts ``edp_shard`` and ``edp_replicate``. Without experts on
several ranks, ``ep`` has one rank and ``edp`` is dp+cp.
"""

Order = Literal["tp-dp-pp", "tp-pp-dp"]
"""Axes from the fastest-varying with the rank to the slowest; axes that are not named keep their position."""


@dataclass(frozen=True, slots=True)
class GridAxis:
    """Axis of the grid of ranks: its names, and properties of the ranks that differ only in their index along it."""

    name: str
    """Name in process groups, traffic, reports and checkpoints."""
    noun: str
    """Noun in error messages; key of the axis size in the configuration's section "parallel"."""
    rows: bool = False
    """True if the ranks along this axis read different rows of the batch and sum their gradients."""
    copies: bool = False
    """True if the ranks along this axis hold equal parameters."""
    sums: bool = False
    """True if these ranks compute parts of one gradient, which are summed; ZeRO shards over the axis."""
    size: int = 1
    """Default number of ranks along this axis."""


class Spread(NamedTuple):
    """Axes of one kind of parameters, by purpose: sharding by ZeRO, equal parameters, and sums of gradients."""

    sharding: Axis = "dp"
    """Axis over which ZeRO shards the state and gradients are reduced."""
    groups: Axis = "dp_replicate"
    """Axis of the ranks with the same shard, which sum its gradient once per step."""
    sums: Axis = "dp"
    """Axis of the ranks with partial gradients, over which gradients are summed without ZeRO."""
    copies: Axis = "dp"
    """Axis of the ranks with equal parameters, possibly sharded by ZeRO."""
    shard_copies: Axis = "dp_replicate"
    """Axis of the ranks with equal shards."""
    ranks: int = 1
    """Number of ranks along ``sharding``."""


AXES: tuple[GridAxis, ...] = (
    GridAxis("pp", "pipeline"),
    GridAxis("dp", "data", rows=True, copies=True, sums=True),
    GridAxis("cp", "context", copies=True, sums=True),
    GridAxis("tp", "tensor"),
)


def shown_axes(sizes: Mapping[str, int]) -> tuple[GridAxis, ...]:
    """Returns the axes to show in reports and error texts: pipeline, data, tensor, and others with several ranks.

    ``sizes``: number of ranks by axis.
    """
    return tuple(axis for axis in AXES if axis.name in ("pp", "dp", "tp") or sizes.get(axis.name, 1) > 1)


class Coord(Mapping[str, int]):
    """Index of a rank along each axis of the grid, by default 0."""

    __slots__ = ("_indices",)

    def __init__(self, **indices: int) -> None:
        self._indices = {axis.name: indices.pop(axis.name, 0) for axis in AXES}
        if indices:
            raise GridError(f"{next(iter(indices))!r} is not an axis of the grid; give indices of {', '.join(self)}.")

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
        """Index along the pipeline axis, from 0."""
        return self._indices["pp"]

    @property
    def dp(self) -> int:
        """Index along the data axis, from 0."""
        return self._indices["dp"]

    @property
    def cp(self) -> int:
        """Index along the context axis, from 0."""
        return self._indices["cp"]

    @property
    def tp(self) -> int:
        """Index along the tensor axis, from 0."""
        return self._indices["tp"]


class ShardHolder(NamedTuple):
    """Pipeline, tensor and expert index of a rank, which determine its shards of parameters before ZeRO."""

    pp: int = 0
    tp: int = 0
    ep: int = 0


class Grid:
    """Grid of ranks with named axes, seen from the rank ``rank``. Immutable.

    Args:
        rank: global number of this rank.
        order: axes, from the fastest-varying to the slowest.
        shard_size: number of neighbouring data ranks that share one copy of the state that ZeRO shards; None: all data
            ranks.
        experts: number of neighbouring data and context ranks that divide the experts of a layer.
        sizes: number of ranks along each axis, 1 by default.

    Raises:
        GridError: a size below 1, an unknown axis, a rank outside the grid, or a shard or expert size that does not
            suit the data ranks.
    """

    __slots__ = (
        "_coord", "_digits", "_known", "_parts", "_sizes", "experts", "order", "rank", "shard_size", "sizes",
        "world_size",
    )  # fmt: skip

    def __init__(
        self, *, rank: int = 0, order: Order = "tp-dp-pp", shard_size: int | None = None, experts: int = 1, **sizes: int
    ) -> None:
        self.sizes: Mapping[str, int] = {axis.name: sizes.pop(axis.name, 1) for axis in AXES}
        if sizes:
            raise GridError(f"{next(iter(sizes))!r} is not an axis of the grid; give sizes of {', '.join(self.sizes)}.")
        for axis in AXES:
            if self.sizes[axis.name] < 1:
                raise GridError(
                    f"{axis.noun} size {self.sizes[axis.name]} is below 1; give every axis at least one rank."
                )
        self.world_size, self.experts = math.prod(self.sizes.values()), experts
        if not 0 <= rank < self.world_size:
            raise GridError(
                f"rank {rank} is outside a grid of {self.world_size} ranks ({self.shape}); "
                f"start exactly {self.world_size} processes."
            )
        if shard_size is not None and (shard_size < 1 or self.dp % shard_size):
            raise GridError(
                f"zero_optimization.shard_size = {shard_size} does not divide the {self.dp} data ranks; set it to a "
                f"divisor of {self.dp}, or leave it out."
            )
        if (problem := expert_problem(experts, self.dp, self.cp, shard_size)) is not None:
            raise GridError(f"parallel.expert = {experts} {problem}.")
        self.rank, self.order, self.shard_size = rank, order, shard_size
        self._parts = data_parts(self.dp, self.cp, shard_size or self.dp, experts)
        self._digits = _digits(self.sizes, order, self._parts)
        self._known: dict[Axis, tuple[tuple[int, int], ...]] = {}
        self._sizes: dict[Axis, int] = {}
        self._coord = self.coord(rank)

    @property
    def pp(self) -> int:
        """Number of ranks on the pipeline axis."""
        return self.sizes["pp"]

    @property
    def dp(self) -> int:
        """Number of ranks on the data axis."""
        return self.sizes["dp"]

    @property
    def cp(self) -> int:
        """Number of ranks on the context axis."""
        return self.sizes["cp"]

    @property
    def tp(self) -> int:
        """Number of ranks on the tensor axis."""
        return self.sizes["tp"]

    @property
    def rows(self) -> Axis:
        """Name of the axis along which ranks read different rows of the batch."""
        return self._joined(axis.name for axis in AXES if axis.rows)

    @property
    def row_ranks(self) -> int:
        """Number of ranks along the axis :attr:`rows`, which divide a batch."""
        return self.size(self.rows)

    @property
    def row_rank(self) -> int:
        """Index of this rank along the axis :attr:`rows`."""
        return self.index(self.rows)

    @property
    def copies(self) -> Axis:
        """Name of the axis along which ranks have the same parameters. ZeRO may shard them over it."""
        return self._joined(axis.name for axis in AXES if axis.copies)

    @property
    def sums(self) -> Axis:
        """Name of the axis over which gradients are summed."""
        return self._joined(axis.name for axis in AXES if axis.sums)

    @property
    def sharding(self) -> Axis:
        """Name of the axis over which ZeRO shards: the ranks of one shard group, by default all of :attr:`sums`."""
        if not self.data_axes:
            return self.sums
        return self._joined(("dp_shard", *(axis.name for axis in AXES if axis.sums and not axis.rows)))

    @property
    def shard_line(self) -> Axis:
        """Name of the axis along which ZeRO shard groups are runs of neighbouring ranks: the axis :attr:`sums`."""
        return self.sums

    @property
    def shard_groups(self) -> Axis:
        """Name of the axis between ZeRO shard groups. Ranks along it store the same shard and sum its gradient."""
        return "dp_replicate"

    @property
    def shard_copies(self) -> Axis:
        """Name of the axis along which ranks store the same ZeRO shard, even where they do not sum gradients."""
        others = [axis.name for axis in AXES if axis.copies and not axis.sums]
        return self._joined((self.shard_groups, *others))

    @property
    def spread(self) -> Spread:
        """Axes over which parameters outside experts are sharded and replicated, and their gradients summed."""
        return Spread(
            self.sharding, self.shard_groups, self.sums, self.copies, self.shard_copies, self.size(self.sharding)
        )

    @property
    def expert_spread(self) -> Spread:
        """Axes for the parameters of experts: to shard them, to replicate them, and to sum their gradients.

        They exclude the axis ``ep``, along which ranks have different experts.
        """
        sharding: Axis = "edp_shard" if self.data_axes else "edp"
        return Spread(sharding, "edp_replicate", "edp", "edp", "edp_replicate", self.size(sharding))

    @property
    def shard_group(self) -> int | None:
        """Number of neighbouring ranks along :attr:`shard_line` in one ZeRO shard group; None: all of them."""
        return self.size(self.sharding) if self.data_axes else None

    @property
    def data_axes(self) -> tuple[Axis, ...]:
        """Names of the two parts of the data axis, ("dp_shard", "dp_replicate"), or () without several ZeRO shard
        groups.
        """
        return ("dp_shard", "dp_replicate") if self.shard_size not in (None, self.dp) else ()

    def coord(self, rank: int | None = None) -> Coord:
        """Returns the coordinates of ``rank``, by default of this rank."""
        if rank is None:
            return self._coord
        self._check(rank)
        return Coord(**{axis: self.index(axis, rank) for axis in self.sizes})

    def place(self, rank: int | None = None) -> dict[str, int]:
        """Returns the index of ``rank`` (default: this rank) along each axis of :func:`shown_axes`, by axis name."""
        coord = self.coord(rank)
        return {axis.name: coord[axis.name] for axis in shown_axes(self.sizes)}

    def holder(self, coord: Coord | None = None) -> ShardHolder:
        """Returns the pipeline, tensor and expert index of the rank at ``coord``, by default of this rank."""
        coord = coord or self._coord
        return ShardHolder(coord.pp, coord.tp, self.index("ep", self.rank_at(**coord)))

    def rank_at(self, **indices: int) -> int:
        """Returns the global number of the rank with these ``indices``; axes without an index have index 0."""
        rank = 0
        for axis, index in indices.items():
            for size, stride in reversed(self._digits_of(axis)):
                index, digit = divmod(index, size)
                rank += digit * stride
        return rank

    def at(self, rank: int) -> "Grid":
        """Returns the same grid, seen from the rank with the global number ``rank``."""
        return Grid(rank=rank, order=self.order, shard_size=self.shard_size, experts=self.experts, **self.sizes)

    def size(self, axis: Axis) -> int:
        """Returns the number of ranks along ``axis``."""
        found = self._sizes.get(axis)
        if found is None:
            found = self._sizes[axis] = math.prod(size for size, _ in self._digits_of(axis))
        return found

    def stride(self, axis: Axis) -> int:
        """Returns the difference between the global numbers of neighbouring ranks along ``axis``."""
        return min(stride for _, stride in self._digits_of(axis))

    def index(self, axis: Axis, rank: int | None = None) -> int:
        """Returns the index of ``rank``, by default of this rank, along ``axis``."""
        rank, index = self.rank if rank is None else rank, 0
        for size, stride in self._digits_of(axis):
            index = index * size + rank // stride % size
        return index

    def is_first(self, axis: Axis, coord: Coord | None = None) -> bool:
        """Returns True if the rank at ``coord``, by default this rank, has index 0 along ``axis``."""
        return self.index(axis, None if coord is None else self.rank_at(**coord)) == 0

    def peers(self, axis: Axis, rank: int | None = None) -> tuple[int, ...]:
        """Returns the global numbers, ascending, of all ranks that differ from ``rank`` at most along ``axis``.

        ``rank``: by default this rank.
        """
        rank = self.rank if rank is None else rank
        self._check(rank)
        digits = self._digits_of(axis)
        first = rank - sum(rank // stride % size * stride for size, stride in digits)
        return tuple(first + offset for offset in _offsets(digits))

    def groups(self, axis: Axis) -> Iterator[tuple[int, ...]]:
        """Yields all groups of ranks that differ only along ``axis``, in order of their first ranks."""
        own = set(self._names(axis))
        offsets = _offsets(self._digits_of(axis))
        others = [digit for name, digit in self._digits.items() if name not in own]
        return (tuple(first + offset for offset in offsets) for first in _offsets(others))

    def _names(self, axis: Axis) -> Iterable[str]:
        """Returns the digits of a rank that differ along ``axis``."""
        if axis == "world":
            return self._digits
        if axis in ("replica", "stage", "stage_replica"):
            others = {*(self._names(self.rows) if axis != "stage" else ()), *(("pp",) if axis != "replica" else ())}
            return [name for name in self._digits if name not in others]
        return [name for part in axis.split("+") for name in self._parts.names(part)]

    def _digits_of(self, axis: Axis) -> Sequence[tuple[int, int]]:
        """Returns (size, stride) of the digits of ``axis``, slowest first; cached, since every collective calls it."""
        found = self._known.get(axis)
        if found is None:
            names = set(self._names(axis))
            found = self._known[axis] = tuple(digit for name, digit in self._digits.items() if name in names)
        return found

    def _joined(self, names: Iterable[str]) -> Axis:
        """Joins the axes of several ranks among ``names``; the first name if there are none."""
        names = list(names)
        return "+".join(name for name in names if self.size(name) > 1) or names[0]

    def _check(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise GridError(f"rank {rank} is outside this grid; give a rank from 0 to {self.world_size - 1}.")

    @property
    def shape(self) -> str:
        """Text with the number of ranks along each axis, such as ``2 pipeline x 4 data x 1 tensor``."""
        shape = " x ".join(f"{self.sizes[axis.name]} {axis.noun}" for axis in shown_axes(self.sizes))
        return f"{shape}, {self.experts} expert" if self.experts > 1 else shape

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Grid) and self._state() == other._state()

    def __hash__(self) -> int:
        return hash(self._state())

    def _state(self) -> tuple[object, ...]:
        return tuple(self.sizes.items()), self.rank, self.order, self.shard_size, self.experts

    def __repr__(self) -> str:
        sizes = ", ".join(f"{axis}={size}" for axis, size in self.sizes.items())
        experts = f", experts={self.experts}" if self.experts > 1 else ""
        return f"Grid({sizes}, rank={self.rank}, order={self.order!r}, shard_size={self.shard_size}{experts})"

    def __str__(self) -> str:
        order = f" in the order {self.order}" if self.order != "tp-dp-pp" else ""
        return f"{self.world_size} ranks = {self.shape}{order}"


def _digits(sizes: Mapping[str, int], order: Order, data: DataParts) -> dict[str, tuple[int, int]]:
    """Returns the size and stride of each axis, slowest first; the data and context axes as their digits."""
    names = list(sizes)
    if order == "tp-pp-dp":
        pp, dp = names.index("pp"), names.index("dp")
        names[pp], names[dp] = names[dp], names[pp]
    parts = list[tuple[str, int]]()
    for name in names:
        parts += data.digits(name, sizes[name])
    found, stride = list[tuple[str, tuple[int, int]]](), 1
    for name, size in reversed(parts):
        found.append((name, (size, stride)))
        stride *= size
    return dict(reversed(found))


def _offsets(digits: Iterable[tuple[int, int]]) -> list[int]:
    """Returns the rank offsets, ascending, of all combinations of ``digits``, which are ordered slowest first."""
    found = [0]
    for size, stride in digits:
        found = [offset + index * stride for offset in found for index in range(size)]
    return found


def saved_order(sizes: Mapping[str, object]) -> Order:
    """Returns the order of axes in ``sizes``, a checkpoint's description of its grid; by default "tp-dp-pp"."""
    return "tp-pp-dp" if sizes.get("order") == "tp-pp-dp" else "tp-dp-pp"


def saved_grid(sizes: Mapping[str, Any]) -> Grid:
    """Returns the grid that ``sizes``, a checkpoint's description, defines, seen from rank 0. Missing axes have one
    rank.
    """
    experts = sizes.get("ep", 1)
    return Grid(order=saved_order(sizes), experts=experts, **{axis.name: sizes.get(axis.name, 1) for axis in AXES})


def axis_groups(grid: Grid) -> dict[Axis, Axis]:
    """Maps each axis with several ranks to the axis that owns its process group, in order of creation of the groups.

    The axes "world", "pp" and "tp" lend their groups to axes with the same ranks. Every other axis has a group of its
    own, so that gradient collectives run concurrently.
    """
    lenders = ("world", *(axis.name for axis in AXES if not axis.copies))
    expert_axes = ("ep", *dict.fromkeys(grid.expert_spread[:5])) if grid.experts > 1 else ()
    meanings = (
        "replica", *grid.data_axes, grid.rows, grid.sums, grid.sharding, grid.copies, grid.shard_copies, *expert_axes
    )  # fmt: skip
    used: dict[Axis, Axis] = {"world": "world"}
    for axis in (*grid.sizes, *meanings):
        if axis not in used and grid.size(axis) > 1:
            peers = grid.peers(axis)
            used[axis] = next((other for other in lenders if other in used and grid.peers(other) == peers), axis)
    return used
