"""Ownership in a save: which rank stores which elements of which tensor.

It follows from the plan, so every rank knows it for all ranks without communication.

A rank stores its 1/N of every bucket over the data axis, at every ZeRO stage: the shard whose gradient norm it counts.
Where there are several shard groups, the first one stores.
Replicated elements (tied stages, rows held by several tensor ranks) are stored by their first holder. Parameters
outside buckets (frozen and not sharded) are stored by data rank 0.

For the model folder, weights are then sent to their tensor's owner, which writes the full tensor. The tensors of a
stage are divided among its ranks by bytes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from engine.checkpoint.format.pieces import Part, Piece
from engine.checkpoint.format.safetensors_file import TensorKind, code_of
from engine.parallel.grid import Coord, Grid
from engine.parallel.shard_table import ShardRow
from engine.planning.plan import Plan
from engine.zero.layout import Bucket, Slot


@dataclass(frozen=True, slots=True)
class ModelTensor:
    """A tensor of the model folder, written in full by one rank."""

    name: str
    """"param/..." or "buffer/..."."""
    key: str
    """Key of the tensor in the Hugging Face folder."""
    kind: TensorKind
    stage: int
    owner: int
    """Rank that writes the tensor."""
    row: ShardRow | None
    """Row of the parameter; None for a buffer, which its owner holds in full."""


def local_region(row: ShardRow, tp: int) -> Part:
    """The part of a parameter that a tensor rank holds."""
    if row.dim is None:
        return Part(row.shape)
    return Part(row.shape, row.dim, tuple((r.start, r.stop) for r in row.ranges if tp in r.holders))


def stored_part(row: ShardRow, tp: int) -> Part | None:
    """The part that a tensor rank stores: the rows of which it is the first holder; None if there are none."""
    first = tuple((r.start, r.stop) for r in row.ranges if r.holders[0] == tp)
    if not first:
        return None
    return Part(row.shape) if row.dim is None else Part(row.shape, row.dim, first)


@dataclass(frozen=True)
class SaveOwnership:
    """Divides all tensors among all ranks."""

    plan: Plan

    @cached_property
    def slots(self) -> Mapping[tuple[int, int], Mapping[str, tuple[Bucket, Slot]]]:
        """Bucket and slot of each parameter, by (stage, tensor coordinate) and name."""
        return {
            where: {slot.name: (bucket, slot) for bucket in (*layout.buckets, *layout.frozen) for slot in bucket.slots}
            for where, layout in self.plan.layouts.items()
        }

    @property
    def shards(self) -> int:
        """Data ranks among which every bucket is divided."""
        return self.plan.config.shards

    @cached_property
    def grid(self) -> Grid:
        """The grid, as rank 0 sees it."""
        return self.plan.grid(0)

    def stores(self, coord: Coord) -> bool:
        """Whether a rank stores anything of a bucket: the first shard group does, others hold copies of it."""
        return self.grid.is_first(self.grid.shard_copies, coord)

    def own(self, row: ShardRow, coord: Coord) -> Piece:
        """This rank's share of a row: a piece of its local part."""
        part = local_region(row, coord.tp)
        found = self.slots[coord.pp, coord.tp].get(row.name)
        if found is None:
            return Piece(part, 0, part.elements if self.grid.is_first(self.grid.copies, coord) else 0)
        bucket, slot = found
        shard = bucket.shard(self.grid.index(self.grid.sharding, self.grid.rank_at(**coord)), self.shards)
        start = min(max(slot.start, shard.start), slot.stop)
        return Piece(part, start - slot.start, max(start, min(slot.stop, shard.stop)) - slot.start)

    def stored(self, row: ShardRow, coord: Coord) -> Piece | None:
        """The piece of a row that this rank stores, or None."""
        part = stored_part(row, coord.tp)
        if part is None or coord.pp != row.owners[0] or not self.stores(coord):
            return None
        piece = self.own(row, coord).within(part)
        return piece if piece.elements else None

    def frozen_dtype(self, row: ShardRow) -> torch.dtype:
        """The dtype in which the model computes with a frozen parameter."""
        return self.plan.precision.frozen(row.name, row.dtype)

    def kind(self, row: ShardRow) -> TensorKind:
        """Shape of a parameter, and the dtype that the model computes with."""
        precision = self.plan.precision
        dtype = precision.parameter(row.name, row.dtype) if row.trainable else self.frozen_dtype(row)
        return TensorKind(code_of(str(dtype).removeprefix("torch.")), row.shape)


def model_tensors(
    ownership: SaveOwnership, keys: Mapping[str, str], buffers: Mapping[str, tuple[str, TensorKind]]
) -> tuple[ModelTensor, ...]:
    """All tensors of the model folder, with their owners.

    Args:
        keys: parameter -> key.
        buffers: path of a persistent buffer -> (key, kind).
    """
    plan = ownership.plan
    rows = [(row, ownership.kind(row)) for row in plan.table if row.name in keys]
    owners = _spread([(row.owners[0], kind.bytes) for row, kind in rows], plan)
    tensors = [
        ModelTensor(f"param/{row.name}", keys[row.name], kind, row.owners[0], owner, row)
        for (row, kind), owner in zip(rows, owners, strict=True)
    ]
    grid = plan.grid(0)
    for name, (key, kind) in buffers.items():
        stage = plan.owner_of_buffer(name)
        tensors.append(ModelTensor(f"buffer/{name}", key, kind, stage, grid.rank_at(pp=stage), None))
    return tuple(tensors)


def _spread(sizes: Sequence[tuple[int, int]], plan: Plan) -> list[int]:
    """One rank for each (stage, bytes): adjacent tensors stay together, and ranks of a stage write similar amounts."""
    grid, totals, before = plan.grid(0), dict[int, int](), dict[int, int]()
    for stage, size in sizes:
        totals[stage] = totals.get(stage, 0) + size
    ranks = [grid.peers("stage", grid.rank_at(pp=stage)) for stage in range(grid.pp)]
    owners = []
    # a tensor goes to the rank in whose equal share of the stage's bytes the middle of the tensor lies
    for stage, size in sizes:
        middle = before.get(stage, 0) + size // 2
        before[stage] = before.get(stage, 0) + size
        share = min(len(ranks[stage]) - 1, middle * len(ranks[stage]) // max(1, totals[stage]))
        owners.append(ranks[stage][share])
    return owners
