"""Ranks as a pipeline x data x tensor box. Pure arithmetic: any rank, no processes, no torch.

tp varies fastest, then dp, then pp, so that the ranks that talk most sit closest together; with the order "tp-pp-dp"
a replica's stages sit closer together than the data ranks:

    8 ranks as pp=2, dp=2, tp=2            stage 0          stage 1
                                     dp 0   0   1     dp 0   4   5
                                     dp 1   2   3     dp 1   6   7
                                          tp0 tp1          tp0 tp1

    as tp-pp-dp                             stage 0          stage 1
                                     dp 0   0   1     dp 0   2   3
                                     dp 1   4   5     dp 1   6   7
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from engine.errors import GridError

Axis = Literal["pp", "dp", "tp", "replica", "world", "dp_shard", "dp_replicate"]
"""The coordinates in which ranks of a group differ. A replica is one full model: all ranks of one data coordinate.

The data axis is made of two: ``dp_shard``, neighbours that share one copy of what ZeRO shards, and ``dp_replicate``,
the ranks of one place in all such groups, which hold the same shard. Without ``Grid.shard_size`` the first is dp.
"""


Order = Literal["tp-dp-pp", "tp-pp-dp"]
"""The axes of a grid, from the one that varies fastest with the rank to the slowest."""


class Coord(NamedTuple):
    """Position of a rank in the grid."""

    pp: int
    dp: int
    tp: int


@dataclass(frozen=True, slots=True)
class Grid:
    """The box of ranks, and this rank's position in it.

    Raises:
        GridError: a size below 1, or a rank outside the box.
    """

    pp: int = 1
    dp: int = 1
    tp: int = 1
    rank: int = 0
    order: Order = "tp-dp-pp"
    shard_size: int | None = None
    """Data ranks of a shard group, side by side; None: all of them."""

    def __post_init__(self) -> None:
        sizes = (("pipeline", self.pp), ("data", self.dp), ("tensor", self.tp))
        for name, size in sizes:
            if size < 1:
                raise GridError(f"{name} size {size} is below 1; give every axis at least one rank.")
        if not 0 <= self.rank < self.world_size:
            shape = " x ".join(f"{size} {name}" for name, size in sizes)
            raise GridError(
                f"rank {self.rank} is outside a grid of {self.world_size} ranks ({shape}); "
                f"start exactly {self.world_size} processes."
            )
        if self.shard_size is not None and (self.shard_size < 1 or self.dp % self.shard_size):
            raise GridError(
                f"shard size {self.shard_size} does not divide the {self.dp} data ranks; give a divisor of {self.dp}."
            )

    @property
    def sharding(self) -> Axis:
        """The axis over which ZeRO shards: dp, or its inner part."""
        return "dp_shard" if self.data_axes else "dp"

    @property
    def data_axes(self) -> tuple[Axis, ...]:
        """The axes that dp is made of, if there are several shard groups."""
        return ("dp_shard", "dp_replicate") if self.shard_size not in (None, self.dp) else ()

    @property
    def _between(self) -> tuple[Literal["pp", "dp"], Literal["pp", "dp"]]:
        """The nearer and the farther of the axes around tp."""
        return ("pp", "dp") if self.order == "tp-pp-dp" else ("dp", "pp")

    @property
    def world_size(self) -> int:
        """Number of ranks in the box."""
        return self.pp * self.dp * self.tp

    def coord(self, rank: int | None = None) -> Coord:
        """Position of ``rank``, or of this rank."""
        rank = self.rank if rank is None else rank
        if not 0 <= rank < self.world_size:
            raise GridError(f"rank {rank} is outside this grid; give a rank from 0 to {self.world_size - 1}.")
        block, tp = divmod(rank, self.tp)
        if self.order == "tp-pp-dp":
            return Coord(block % self.pp, block // self.pp, tp)
        return Coord(block // self.dp, block % self.dp, tp)

    def rank_at(self, pp: int, dp: int, tp: int) -> int:
        """The rank at a position; inverse of :meth:`coord`."""
        block = dp * self.pp + pp if self.order == "tp-pp-dp" else pp * self.dp + dp
        return block * self.tp + tp

    def size(self, axis: Axis) -> int:
        """Number of ranks along ``axis``."""
        replica, shards = self.pp * self.tp, self.shard_size or self.dp
        if axis in ("dp_shard", "dp_replicate"):
            return shards if axis == "dp_shard" else self.dp // shards
        return {"pp": self.pp, "dp": self.dp, "tp": self.tp, "replica": replica, "world": self.world_size}[axis]

    def stride(self, axis: Literal["pp", "dp", "tp"]) -> int:
        """How far, in ranks, a rank is from its next peer along ``axis``."""
        inner, outer = self._between
        return {inner: self.tp, outer: self.size(inner) * self.tp, "tp": 1}[axis]

    def index(self, axis: Axis) -> int:
        """This rank's index among its :meth:`peers` along ``axis``."""
        return getattr(self.coord(), axis) if axis in ("pp", "dp", "tp") else self.peers(axis).index(self.rank)

    def peers(self, axis: Axis, rank: int | None = None) -> tuple[int, ...]:
        """The ranks that differ from ``rank`` (or this rank) along ``axis`` only, itself included."""
        if axis == "world":
            return tuple(range(self.world_size))
        here = self.coord(rank)
        if axis == "replica":
            return tuple(self.rank_at(pp, here.dp, tp) for pp in range(self.pp) for tp in range(self.tp))
        shards = self.size("dp_shard")
        group, place = divmod(here.dp, shards)
        if axis == "dp_shard":
            return self.peers("dp", rank)[group * shards : (group + 1) * shards]
        if axis == "dp_replicate":
            return self.peers("dp", rank)[place::shards]
        stride = self.stride(axis)
        first = self.rank_at(*here) - getattr(here, axis) * stride
        return tuple(range(first, first + self.size(axis) * stride, stride))

    def groups(self, axis: Axis) -> Iterator[tuple[int, ...]]:
        """Every group of peers along ``axis``, in order of their first ranks; each rank is in exactly one of them."""
        if axis in ("dp_shard", "dp_replicate"):
            return iter(sorted({self.peers(axis, rank) for rank in range(self.world_size)}))
        inner, outer = self._between
        plane = self.size(inner) * self.tp
        firsts: Mapping[Axis, Iterable[int]] = {
            outer: range(plane),
            inner: (first + tp for first in range(0, self.world_size, plane) for tp in range(self.tp)),
            "tp": range(0, self.world_size, self.tp),
            "replica": range(0, plane, self.tp) if inner == "dp" else range(0, self.world_size, plane),
            "world": range(1),
        }
        return (self.peers(axis, rank) for rank in firsts[axis])

    def __str__(self) -> str:
        order = f" in the order {self.order}" if self.order != "tp-dp-pp" else ""
        return f"{self.world_size} ranks = {self.pp} pipeline x {self.dp} data x {self.tp} tensor{order}"


def saved_order(sizes: Mapping[str, object]) -> Order:
    """The order of a grid that was written down; one from before there were two orders does not tell it."""
    return "tp-pp-dp" if sizes.get("order") == "tp-pp-dp" else "tp-dp-pp"


_ALIKE: tuple[Axis, ...] = ("world", "pp", "tp")
"""Axes whose groups others may use."""


def axis_groups(grid: Grid) -> dict[Axis, Axis]:
    """For each axis of several ranks, in the order of opening, the axis whose group it uses."""
    axes: tuple[Axis, ...] = ("pp", "dp", "tp", "replica", *grid.data_axes)
    used: dict[Axis, Axis] = {"world": "world"}
    for axis in axes:
        if grid.size(axis) > 1:
            peers = grid.peers(axis)
            used[axis] = next((other for other in _ALIKE if other in used and grid.peers(other) == peers), axis)
    return used


def color_rounds(
    groups: Iterable[tuple[int, ...]], color: Callable[[Sequence[int]], int]
) -> list[frozenset[tuple[int, ...]]]:
    """Groups that have no rank in common, in as many rounds as keep the colors of a round apart; almost always one.

    NCCL splits a communicator by colors, for which torch takes a hash of the ranks: two groups of one color would
    become one.
    """
    rounds: list[dict[int, tuple[int, ...]]] = []
    for group in groups:
        found = color(group)
        free = next((each for each in rounds if found not in each), None)
        if free is None:
            rounds.append(free := {})
        free[found] = group
    return [frozenset(each.values()) for each in rounds]
