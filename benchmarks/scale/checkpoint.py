"""Sizes of a checkpoint's files and of its index, computed from the plan as all ranks of a world would write it."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from engine.checkpoint.contents.local_tensors import SaveOwnership, model_tensors
from engine.checkpoint.format.checked_blocks import BLOCK, DEFAULT_ALGORITHM, HashSlice, block_count
from engine.checkpoint.format.manifest import Checksum, Manifest, StoredPiece, StoredTensor
from engine.checkpoint.format.manifest_parts import from_index, sharing, to_parts
from engine.checkpoint.format.pieces import Part, Piece
from engine.checkpoint.format.safetensors_file import TensorKind
from engine.checkpoint.format.strict_json import Fields, parse
from engine.parallel.grid import Coord, ShardHolder
from engine.parallel.shard_table import ShardRow
from engine.planning.plan import Plan

FAMILIES = ("master", "exp_avg", "exp_avg_sq")
STATE_BYTES = 23_000
"""Approximate bytes of a rank's generator states."""


@dataclass(frozen=True)
class PaperCheckpoint:
    """Manifest of a checkpoint that is never written, computed from a plan."""

    manifest: Manifest

    @property
    def pieces(self) -> int:
        """Number of pieces of all tensors."""
        return sum(len(tensor.pieces) for tensor in self.manifest.tensors.values())

    @cached_property
    def parts(self) -> tuple[bytes, dict[str, bytes]]:
        """Serialized index, and parts by name."""
        return to_parts(self.manifest, dict.fromkeys(self.manifest.files, HashSlice(0, "0" * 64)))


def paper_checkpoint(plan: Plan) -> PaperCheckpoint:
    """Makes the manifest that rank 0 would merge from all ranks' reports."""
    ownership, grid = SaveOwnership(plan), plan.grid(0)
    names = {row.name: row.name for row in plan.table}
    written = model_tensors(ownership, names, {})
    writers = {rank: index for index, rank in enumerate(sorted({tensor.owner for tensor in written}))}
    optim = [f"optim/optim-{rank:05d}.safetensors" for rank in range(grid.world_size)]
    files: dict[str, int] = {f"state/rank-{rank:05d}.safetensors": STATE_BYTES for rank in range(grid.world_size)}
    tensors: dict[str, StoredTensor] = {}
    for tensor in written:
        file = f"model/model-{writers[tensor.owner] + 1:05d}-of-{len(writers):05d}.safetensors"
        files[file] = files.get(file, 4096) + tensor.kind.bytes
        tensors[tensor.name] = StoredTensor(
            tensor.kind, (StoredPiece(file, tensor.key, Part(tensor.kind.shape).whole()),)
        )
    for row in plan.table:
        stored = list(_stored(ownership, row))
        for family in FAMILIES:
            name, kind = f"{family}/{row.name}", TensorKind("F32", row.shape)
            pieces = tuple(StoredPiece(optim[rank], name, piece) for rank, piece in stored)
            tensors[name] = StoredTensor(kind, pieces)
            for each in pieces:
                files[each.file] = files.get(each.file, 4096) + 4 * each.piece.elements
    checksum = Checksum(DEFAULT_ALGORITHM, BLOCK, "0" * 64, 0)
    return PaperCheckpoint(Manifest(step=1, attempt="00000000", tensors=tensors, files=files, checksum=checksum))


def _stored(ownership: SaveOwnership, row: ShardRow) -> Iterator[tuple[int, Piece]]:
    """(rank, piece) of each rank that stores a piece of the row."""
    plan, pp = ownership.plan, row.owners[0]
    for tp in range(plan.config.tp):
        bucket, slot = ownership.slots[ShardHolder(pp, tp)][row.name]
        shard = bucket.elements // plan.config.dp
        for dp in range(slot.start // shard, (slot.stop - 1) // shard + 1):
            piece = ownership.stored(row, Coord(pp=pp, dp=dp, tp=tp))
            if piece is not None:
                yield plan.grid(0).rank_at(pp=pp, dp=dp, tp=tp), piece


@dataclass(frozen=True, slots=True)
class PaperReading:
    """Bytes that one rank reads before its tensors."""

    manifest_bytes: int
    """Bytes of the index and all parts."""
    read_bytes: int
    """Bytes of the index and the parts that the rank reads."""
    hash_bytes: int
    seconds: float


def read_as(paper: PaperCheckpoint, plan: Plan, rank: int) -> PaperReading:
    """Reads the entries that ``rank`` needs to resume on an equal grid."""
    index, parts = paper.parts
    read = dict[str, int]()

    def read_part(name: str, limit: int) -> bytes:
        read[name] = len(parts[name])
        return parts[name]

    began = time.process_time()
    fields = Fields(parse(index, "a manifest"), "a manifest")
    manifest = from_index(fields, read_part)
    files = {f"state/rank-{rank:05d}.safetensors"}
    coord, ownership = plan.grid(rank).coord(), SaveOwnership(plan)
    for row in plan.table.held_by(plan.grid(0).holder(coord)):
        own = ownership.own(row, coord)
        for family in ("param", *FAMILIES) if own.elements else ():
            files |= {stored.file for stored in sharing(manifest.tensors[f"{family}/{row.name}"], own)}
    hashes = sum(8 * block_count(manifest.files[file]) for file in files)
    seconds = time.process_time() - began
    everything = len(index) + sum(map(len, parts.values()))
    return PaperReading(everything, len(index) + sum(read.values()), hashes, seconds)
