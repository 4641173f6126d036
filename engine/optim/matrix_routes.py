"""Owners of the matrices that are updated as a whole, and the ways to them, and sums over parts of matrices; from the
plan alone, on any rank."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from engine.config import Config
from engine.kernels.optim.muon_rule import product_cost
from engine.parallel.comm.traffic import Traffic
from engine.parallel.grid import Axis, Coord
from engine.parallel.shard_table import ShardRow
from engine.zero.layout import FlatLayout
from engine.zero.optim.matrix_updates import MatrixRoutes
from engine.zero.optim.owner_exchange import OwnerRoute, balanced_owners
from engine.zero.optim.rules.adafactor import FactorRoutes


@dataclass(frozen=True, slots=True)
class MatrixOwners:
    """Divides the matrices of each pipeline coordinate among its ranks, by the cost of their updates."""

    config: Config
    rows: Sequence[ShardRow]
    """All rows of the table."""
    groups: frozenset[int]
    """Optimizer groups whose matrices are updated as a whole."""
    layouts: Mapping[tuple[int, int], FlatLayout]

    @property
    def _shares(self) -> int:
        """Data ranks among which every bucket is divided."""
        return self.config.shards if self.config.zero_optimization.stage else 1

    @property
    def data_groups(self) -> tuple[tuple[int, ...], ...]:
        """The indices of axis dp that exchange matrices with each other."""
        count = self._shares
        return tuple(tuple(range(first, first + count)) for first in range(0, self.config.dp, count))

    def routes(self, coord: Coord) -> MatrixRoutes | None:
        """The ways of the matrices of a position; None if it has none."""
        rows = {row.name: row for row in self.rows if row.trainable and row.group in self.groups}
        rows = {name: row for name, row in rows.items() if coord.pp in row.owners}
        if not rows:
            return None
        count = self._shares
        first = coord.dp // count * count
        # all tensor ranks agree on the owner of what they share, so one of their layouts decides
        decides, own = (_held(self.layouts[coord.pp, tp], rows, count) for tp in (0, coord.tp))
        costs = {name: self._cost(row) for name, row in rows.items()}
        owners = balanced_owners(costs, decides)
        data = OwnerRoute("dp", tuple(range(first, first + count)), owners, own)
        cut = {name: row for name, row in rows.items() if row.dim is not None and owners[name] == coord.dp % count}
        return MatrixRoutes(rows, data, self._tensor_route(cut), _dtype(rows.values()))

    def traffic(self, coord: Coord) -> tuple[Traffic, ...]:
        """What a position sends in a step."""
        routes = self.routes(coord)
        if routes is None:
            return ()
        size, grid = routes.dtype.itemsize, self.config.grid(0)
        tensor = routes.tensor.traffic("tp", size) if routes.tensor is not None else ()
        return (*routes.data.traffic(grid.sharding, size), *tensor)

    def _tensor_route(self, cut: Mapping[str, ShardRow]) -> OwnerRoute | None:
        tp = self.config.tp
        if not cut or tp == 1:
            return None
        held = {name: tuple(prod(row.local_shape(index)) for index in range(tp)) for name, row in cut.items()}
        costs = {name: product_cost(row.shape) for name, row in cut.items()}
        return OwnerRoute("tp", tuple(range(tp)), balanced_owners(costs, held), held)

    def _cost(self, row: ShardRow) -> int:
        """Work of a rank: tensor ranks share that of matrices which they cut."""
        return product_cost(row.shape) // (1 if row.dim is None else self.config.tp)


def factor_routes(rows: Iterable[ShardRow], groups: frozenset[int], config: Config) -> FactorRoutes | None:
    """Sums of the parameters of a pipeline coordinate that Adafactor updates; None if there are none.

    ``groups``: optimizer groups that it updates.
    """
    own = tuple(row for row in rows if row.trainable and row.group in groups)
    shards = config.shards if config.zero_optimization.stage else 1
    axes: list[tuple[Axis, int]] = [(config.grid(0).sharding, shards), ("tp", config.tp)]
    return FactorRoutes(own, tuple(each for each in axes if each[1] > 1), _dtype(own)) if own else None


def _dtype(rows: Iterable[ShardRow]) -> torch.dtype:
    """Updates are made in fp32, or in fp64 where a parameter was given so."""
    return torch.float64 if any(row.dtype == torch.float64 for row in rows) else torch.float32


def _held(layout: FlatLayout, rows: Mapping[str, ShardRow], ranks: int) -> dict[str, tuple[int, ...]]:
    """Elements of each matrix in the shard of each data rank."""
    found = {}
    for bucket in layout.buckets:
        shards = [bucket.shard(index, ranks) for index in range(ranks)]
        for slot in bucket.slots:
            if slot.name in rows:
                found[slot.name] = tuple(
                    max(0, min(slot.stop, shard.stop) - max(slot.start, shard.start)) for shard in shards
                )
    return {name: found[name] for name in rows}
