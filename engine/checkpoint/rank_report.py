"""Reports of the files and pieces that each rank has written, and their merge on rank 0."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engine.checkpoint.contents.optimizer_state import merge_numbers
from engine.checkpoint.format.checked_blocks import Hashes
from engine.checkpoint.format.manifest import StoredPiece, StoredTensor, check_cover, piece_from_json, piece_to_json
from engine.checkpoint.format.safetensors_file import TensorKind, read_kind
from engine.checkpoint.format.strict_json import Fields, dump, parse
from engine.errors import CheckpointError


@dataclass(slots=True)
class Report:
    """Files of one rank, the hashes of their blocks, and the pieces that they hold."""

    files: dict[str, int] = field(default_factory=dict)
    hashes: dict[str, Hashes] = field(default_factory=dict)
    pieces: dict[str, list[Any]] = field(default_factory=dict)
    """JSON of the pieces, by tensor."""
    numbers: Mapping[str, Any] = field(default_factory=dict)
    """Scalars of the optimizer's state, by group."""
    tracked: Mapping[str, str] = field(default_factory=dict)
    """sha256 of the state of each registered object; one state is stored for all ranks."""
    folder: str = ""
    """The folder that this rank was asked to save into."""

    def file(self, name: str, size: int, hashes: Hashes) -> None:
        """Add a file."""
        self.files[name] = size
        self.hashes[name] = hashes

    def piece(self, tensor: str, kind: TensorKind, stored: StoredPiece) -> None:
        """Add a piece."""
        entry = {"dtype": kind.dtype, "shape": list(kind.shape), **piece_to_json(stored, stored.file)}
        self.pieces.setdefault(tensor, []).append(entry)

    def to_json(self) -> bytes:
        """The message to rank 0."""
        hashes = {name: value.tobytes().hex() for name, value in self.hashes.items()}
        numbers, tracked = dict(self.numbers), dict(self.tracked)
        return dump({
            "files": self.files, "hashes": hashes, "pieces": self.pieces, "numbers": numbers, "tracked": tracked,
            "folder": self.folder,
        })  # fmt: skip


def digests(tracked: Mapping[str, Any]) -> dict[str, str]:
    """sha256 of each state, which is JSON."""
    return {name: hashlib.sha256(dump({"state": state})).hexdigest() for name, state in tracked.items()}


def failure(problem: str) -> bytes:
    """The message of a rank that could not write."""
    return dump({"problem": problem})


def merge(reports: Iterable[bytes]) -> tuple[Report, dict[str, StoredTensor]]:
    """Merge the reports of all ranks, in order of rank; returns the merged report and the tensors that it holds.

    Raises:
        CheckpointError: a rank's problem, or a tensor that the ranks together have not written exactly once.
    """
    merged, numbers = Report(), []
    kinds: dict[str, TensorKind] = {}
    pieces: dict[str, list[StoredPiece]] = {}
    for rank, data in enumerate(reports):
        fields = Fields(parse(data, f"the report of rank {rank}"), f"the report of rank {rank}")
        if fields.any("problem") is not None:
            raise CheckpointError(f"not saved: {fields.text('problem')}")
        _check_folder(rank, fields.text("folder"), merged)
        numbers.append(fields.object("numbers"))
        _check_tracked(rank, fields.object("tracked"), merged)
        for name, text in fields.object("hashes").items():
            merged.file(name, fields.object("files")[name], np.frombuffer(bytes.fromhex(text), dtype="<u8"))
        for name, entries in fields.object("pieces").items():
            kinds[name] = read_kind(Fields(entries[0], name))
            pieces.setdefault(name, []).extend(_pieces(entries, kinds[name], name))
    for name, found in pieces.items():
        check_cover(f"not saved: {name}", kinds[name].shape, found)
    merged.numbers = merge_numbers(numbers)
    return merged, {name: StoredTensor(kinds[name], tuple(found)) for name, found in pieces.items()}


def _check_folder(rank: int, folder: str, merged: Report) -> None:
    if rank == 0:
        merged.folder = folder
    if folder != merged.folder:
        raise CheckpointError(
            f"not saved: rank {rank} was to save into {folder!r} and rank 0 into {merged.folder!r}, and all ranks "
            "write one checkpoint; give the same folder on every rank."
        )


def _check_tracked(rank: int, tracked: Mapping[str, str], merged: Report) -> None:
    if rank == 0:
        merged.tracked = tracked
    for name in sorted({*tracked, *merged.tracked}):
        if tracked.get(name) != merged.tracked.get(name):
            raise CheckpointError(
                f"not saved: the state of {name!r} differs between rank {rank} and rank 0, and one state is stored for "
                "all ranks; register objects with the same state on every rank, such as engine.data.Sampler."
            )


def _pieces(entries: Sequence[Any], kind: TensorKind, name: str) -> list[StoredPiece]:
    return [piece_from_json(entry, kind.shape, entry["file"], name) for entry in entries]
