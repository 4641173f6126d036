"""Which rank stores which elements of which tensor: read from the plan, so that all ranks know it of all others.

A rank stores its 1/N of every bucket, over the data axis, whatever the ZeRO stage is: the shard whose gradient it
counts. Of copies (tied stages, tensor ranks that hold the same rows) the first is stored. What lies in no
bucket (frozen, not sharded) data rank 0 stores.

Weights go from there to their tensor's owner, who writes it whole; owners are spread over a stage's ranks by bytes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from engine.checkpoint.format.pieces import Part, Piece
from engine.checkpoint.format.safetensors_file import TensorKind, code_of
from engine.parallel.grid import Coord
from engine.parallel.shard_table import ShardRow
from engine.planning.plan import Plan
from engine.zero.layout import Bucket, Slot


@dataclass(frozen=True, slots=True)
class ModelTensor:
    """A tensor of the model folder, written whole by one rank."""

    name: str
    """"param/..." or "buffer/..."."""
    key: str
    """Its name in the Hugging Face folder."""
    kind: TensorKind
    stage: int
    owner: int
    """Rank."""
    row: ShardRow | None
    """None: a buffer, which its owner has whole."""


def local_region(row: ShardRow, tp: int) -> Part:
    """What a tensor rank holds of a parameter."""
    if row.dim is None:
        return Part(row.shape)
    return Part(row.shape, row.dim, tuple((r.start, r.stop) for r in row.ranges if tp in r.holders))


def stored_part(row: ShardRow, tp: int) -> Part | None:
    """What it stores: the rows of which it is the first holder."""
    first = tuple((r.start, r.stop) for r in row.ranges if r.holders[0] == tp)
    if not first:
        return None
    return Part(row.shape) if row.dim is None else Part(row.shape, row.dim, first)


@dataclass(frozen=True)
class SaveOwnership:
    """The division of all tensors over all ranks."""

    plan: Plan

    @cached_property
    def slots(self) -> Mapping[tuple[int, int], Mapping[str, tuple[Bucket, Slot]]]:
        """By (stage, tensor coordinate) and parameter: its place in the buckets."""
        return {
            where: {slot.name: (bucket, slot) for bucket in (*layout.buckets, *layout.frozen) for slot in bucket.slots}
            for where, layout in self.plan.layouts.items()
        }

    def own(self, row: ShardRow, coord: Coord) -> Piece:
        """The elements of its local part of a row that are this rank's share."""
        part = local_region(row, coord.tp)
        found = self.slots[coord.pp, coord.tp].get(row.name)
        if found is None:
            return Piece(part, 0, part.elements if coord.dp == 0 else 0)
        bucket, slot = found
        shard = bucket.shard(coord.dp, self.plan.config.dp)
        start = min(max(slot.start, shard.start), slot.stop)
        return Piece(part, start - slot.start, max(start, min(slot.stop, shard.stop)) - slot.start)

    def stored(self, row: ShardRow, coord: Coord) -> Piece | None:
        """What this rank stores of a row; None where that is nothing."""
        part = stored_part(row, coord.tp)
        if part is None or coord.pp != row.owners[0]:
            return None
        piece = self.own(row, coord).within(part)
        return piece if piece.elements else None

    def kind(self, row: ShardRow) -> TensorKind:
        """A parameter as the model computes with it."""
        precision = self.plan.precision
        dtype = precision.parameter(row.name, row.dtype) if row.trainable else precision.frozen(row.name, row.dtype)
        return TensorKind(code_of(str(dtype).removeprefix("torch.")), row.shape)


def model_tensors(
    shares: SaveOwnership, keys: Mapping[str, str], buffers: Mapping[str, tuple[str, TensorKind]]
) -> tuple[ModelTensor, ...]:
    """All tensors of the model folder, with their owners.

    ``keys``: parameter -> key; ``buffers``: path of a persistent buffer -> (key, kind).
    """
    plan = shares.plan
    rows = [(row, shares.kind(row)) for row in plan.table if row.name in keys]
    owners = _spread([(row.owners[0], kind.bytes) for row, kind in rows], plan)
    tensors = [
        ModelTensor(f"param/{row.name}", keys[row.name], kind, row.owners[0], owner, row)
        for (row, kind), owner in zip(rows, owners, strict=True)
    ]
    grid = plan.grid(0)
    for name, (key, kind) in buffers.items():
        stage = plan.owner_of_buffer(name)
        tensors.append(ModelTensor(f"buffer/{name}", key, kind, stage, grid.rank_at(stage, 0, 0), None))
    return tuple(tensors)


def _spread(sizes: Sequence[tuple[int, int]], plan: Plan) -> list[int]:
    """A rank for each (stage, bytes): neighbours stay together, and ranks of a stage write about equally much."""
    grid, totals, before = plan.grid(0), dict[int, int](), dict[int, int]()
    for stage, size in sizes:
        totals[stage] = totals.get(stage, 0) + size
    ranks = [
        [grid.rank_at(stage, dp, tp) for dp in range(plan.config.dp) for tp in range(plan.config.tp)]
        for stage in range(plan.config.pp)
    ]
    owners = []
    for stage, size in sizes:
        middle = before.get(stage, 0) + size // 2
        before[stage] = before.get(stage, 0) + size
        share = min(len(ranks[stage]) - 1, middle * len(ranks[stage]) // max(1, totals[stage]))
        owners.append(ranks[stage][share])
    return owners
