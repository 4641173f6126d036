"""Runs of pieces: data ranks share a part equally, so their pieces are told once, however many there are.

part of tensor rank 3    | data rank 0 | data rank 1 | ...          | data rank 255 |
a run                      file 1003, every 8th file, 256 pieces, from element 0 on, 1,280,000 elements each
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, overload

from engine.checkpoint.format.manifest import (
    FileNames,
    StoredPiece,
    StoredTensor,
    check_cover,
    piece_from_json,
    piece_to_json,
)
from engine.checkpoint.format.pieces import Part, Piece
from engine.checkpoint.format.strict_json import Fields
from engine.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class PieceRun:
    """Pieces of one part, one behind the other, of equal size, in files of equal distance."""

    first: Piece
    key: str
    file: int
    """Number of the file of the first piece."""
    step: int = 1
    count: int = 1

    def piece(self, index: int) -> Piece:
        """One of the pieces."""
        size = self.first.elements
        return Piece(self.first.part, self.first.start + index * size, self.first.stop + index * size)

    def sharing(self, want: Piece) -> range:
        """Indices of pieces that may share elements with ``want``; those that surely share none are left out."""
        size, (start, stop) = self.first.elements, _bounds(self.first.part, want)
        if not size:
            return range(0)
        first = max(0, (start - self.first.start) // size)
        return range(first, max(first, min(self.count, -((self.first.start - stop) // size))))


def _bounds(part: Part, want: Piece) -> tuple[int, int]:
    """Elements of ``part`` outside which none are shared with ``want``."""
    if part == want.part:
        return want.start, want.stop
    here, there = _offset(part), _offset(want.part)
    if here is not None and there is not None:
        return want.start + there - here, want.stop + there - here
    alike = part.dim is not None and part.dim == want.part.dim
    apart = alike and not any(a < d and c < b for a, b in part.rows for c, d in want.part.rows)
    return 0, 0 if apart else part.elements


def _offset(part: Part) -> int | None:
    """Where a part that is one stretch of the full tensor begins; None if it is several."""
    if part.dim is None:
        return 0
    return part.rows[0][0] * prod(part.shape[1:]) if part.dim == 0 and len(part.rows) == 1 else None


class PieceRuns(Sequence[StoredPiece]):
    """The pieces of a tensor, made when they are asked for."""

    def __init__(self, runs: Sequence[PieceRun], files: FileNames) -> None:
        self._runs, self._files = runs, files

    def __len__(self) -> int:
        return sum(run.count for run in self._runs)

    @overload
    def __getitem__(self, index: int) -> StoredPiece: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[StoredPiece]: ...

    def __getitem__(self, index: int | slice) -> StoredPiece | Sequence[StoredPiece]:
        return tuple(self)[index]

    def __iter__(self) -> Iterator[StoredPiece]:
        for run in self._runs:
            yield from self._stored(run, range(run.count))

    def sharing(self, want: Piece) -> Iterator[StoredPiece]:
        """The pieces that may share elements with ``want``."""
        for run in self._runs:
            yield from self._stored(run, run.sharing(want))

    def _stored(self, run: PieceRun, indices: range) -> Iterator[StoredPiece]:
        for index in indices:
            yield StoredPiece(self._files[run.file + index * run.step], run.key, run.piece(index))


def sharing(tensor: StoredTensor, want: Piece) -> Iterable[StoredPiece]:
    """The pieces of a tensor that may share elements with ``want``; those that surely share none may be left out."""
    return tensor.pieces.sharing(want) if isinstance(tensor.pieces, PieceRuns) else tensor.pieces


def fold(pieces: Iterable[StoredPiece], number: Mapping[str, int]) -> list[PieceRun]:
    """The pieces of a tensor as runs."""
    groups: dict[tuple[str, Part], list[StoredPiece]] = {}
    for stored in pieces:
        groups.setdefault((stored.key, stored.piece.part), []).append(stored)
    return [run for (key, _), members in groups.items() for run in _fold_part(key, members, number)]


def _fold_part(key: str, members: list[StoredPiece], number: Mapping[str, int]) -> Iterator[PieceRun]:
    """The pieces of one part. Millions of pieces take this path on rank 0, so a run is made when it has ended."""
    members.sort(key=lambda stored: (stored.piece.start, stored.piece.stop))
    first, base, step, count, size = members[0].piece, number[members[0].file], 1, 1, members[0].piece.elements
    for stored in members[1:]:
        piece, file = stored.piece, number[stored.file]
        ahead = file == base + count * step if count > 1 else file > base
        if ahead and size and piece.start == first.start + count * size and piece.stop == piece.start + size:
            step = file - base if count == 1 else step
            count += 1
            continue
        yield PieceRun(first, key, base, step, count)
        first, base, step, count, size = piece, file, 1, 1, piece.elements
    yield PieceRun(first, key, base, step, count)


def run_to_json(run: PieceRun) -> dict[str, Any]:
    """JSON of a run: of its first piece, and how many there are in which files."""
    told = piece_to_json(StoredPiece("", run.key, run.first), run.file)
    return told if run.count == 1 else told | {"step": run.step, "count": run.count}


def runs_from_json(values: Sequence[Any], shape: tuple[int, ...], files: FileNames, what: str) -> PieceRuns:
    """The inverse, for a tensor of ``shape``: every run is checked, and that the pieces cover the tensor once."""
    runs = [_run(value, shape, len(files), what) for value in values]
    found, wholes = PieceRuns(runs, files), _wholes(runs)
    check_cover(what, shape, list(found) if wholes is None else wholes)
    return found


def _run(value: Any, shape: tuple[int, ...], files: int, what: str) -> PieceRun:
    fields = Fields(value, what)
    stored, file = piece_from_json(value, shape, "", what), fields.count("file")
    single = fields.any("count") is None
    step, count = (1, 1) if single else (fields.count("step"), fields.count("count"))
    run = PieceRun(stored.piece, stored.key, file, step, count)
    if not single and (step < 1 or count < 2 or not stored.piece.elements):
        raise CheckpointError(f"{what}: {count} pieces of every {step} files are no run; the file is damaged.")
    if file + (count - 1) * step >= files:
        raise CheckpointError(f"{what}: file number {file + (count - 1) * step} is not below {files}; it is damaged.")
    if run.piece(count - 1).stop > stored.piece.part.elements:
        raise CheckpointError(f"{what}: a run of {count} pieces ends outside the part; the file is damaged.")
    return run


def _wholes(runs: Sequence[PieceRun]) -> list[StoredPiece] | None:
    """One piece for each part, if the runs of each part cover it once, one behind the other; None if they do not."""
    ends: dict[Part, int] = {}
    for run in sorted(runs, key=lambda run: run.first.start):
        if run.first.start != ends.get(run.first.part, 0):
            return None
        ends[run.first.part] = run.piece(run.count - 1).stop
    if any(end != part.elements for part, end in ends.items()):
        return None
    return [StoredPiece("", "", part.whole()) for part in ends]
