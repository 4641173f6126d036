"""Manifests of many ranks: an index that every rank reads, and further files that a rank reads on demand.

COMMIT                 sha256 of manifest.json
manifest.json          dtype and shape of every tensor; sha256 of the index files
index/tensors-N.json   the pieces of some tensors, as runs, in files by number
index/files-N.json     the files of a range of numbers: name, size, and sha256 of their hashes
checksums.safetensors  block hashes of all files

A rank reads hardly more with 16,384 ranks than with 64, and COMMIT covers each byte. A manifest of few pieces is one
file (:mod:`~engine.checkpoint.format.manifest`).
"""

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

from engine.checkpoint.format.checked_blocks import HashSlice
from engine.checkpoint.format.manifest import (
    INDEXED,
    LIMIT,
    FileNames,
    Manifest,
    StoredPiece,
    StoredTensor,
    check_cover,
    check_file_name,
    check_version,
    dumped,
    head_of,
    head_to_json,
    piece_from_json,
    piece_to_json,
)
from engine.checkpoint.format.pieces import Part, Piece, PieceRun
from engine.checkpoint.format.safetensors_file import in_batches, read_kind
from engine.checkpoint.format.strict_json import Fields, dump, natural, parse
from engine.errors import COPY_AGAIN, CheckpointError

FOLDER = "index"
PIECES, FILES = 1 << 13, 1 << 11
"""Most runs of pieces in an index file (more if one tensor has more), and most files: about 1 MiB and 0.4 MiB of
JSON.
"""

ReadPart = Callable[[str, int], bytes | bytearray]
"""Function (name, largest bytes) that returns the contents of a file of the checkpoint."""


# ------------------------------------------------------------------------------------------------ runs of pieces


@dataclass(frozen=True, slots=True)
class StoredRun:
    """Compact manifest entry for consecutive pieces of equal size, such as the shards of all data ranks.

    Piece i is in file number ``file + i * step``.
    """

    run: PieceRun
    key: str
    file: int
    """Number of the file with the first piece."""
    step: int = 1


class StoredRuns(Sequence[StoredPiece]):
    """Sequence of the stored pieces of a tensor. Each piece is made on access, from compact :class:`StoredRun`
    entries.
    """

    def __init__(self, runs: Sequence[StoredRun], files: FileNames) -> None:
        self._runs, self._files = runs, files

    def __len__(self) -> int:
        return sum(one.run.count for one in self._runs)

    @overload
    def __getitem__(self, index: int) -> StoredPiece: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[StoredPiece]: ...

    def __getitem__(self, index: int | slice) -> StoredPiece | Sequence[StoredPiece]:
        return tuple(self)[index]

    def __iter__(self) -> Iterator[StoredPiece]:
        for one in self._runs:
            yield from self._stored(one, range(one.run.count))

    def sharing(self, want: Piece) -> Iterator[StoredPiece]:
        """Yields the stored pieces that may share elements with the piece ``want``."""
        for one in self._runs:
            yield from self._stored(one, one.run.sharing(want))

    def _stored(self, one: StoredRun, indices: range) -> Iterator[StoredPiece]:
        for index in indices:
            yield StoredPiece(self._files[one.file + index * one.step], one.key, one.run.piece(index))


def sharing(tensor: StoredTensor, want: Piece) -> Iterable[StoredPiece]:
    """Returns the stored pieces of ``tensor`` that may share elements with the piece ``want``."""
    return tensor.pieces.sharing(want) if isinstance(tensor.pieces, StoredRuns) else tensor.pieces


def fold(pieces: Iterable[StoredPiece], number: Mapping[str, int]) -> list[StoredRun]:
    """Combines consecutive stored pieces of equal size into runs, if their file numbers rise in equal steps. Any other
    piece becomes a run of one. ``number``: file name -> number.
    """
    groups: dict[tuple[str, Part], list[StoredPiece]] = {}
    for stored in pieces:
        groups.setdefault((stored.key, stored.piece.part), []).append(stored)
    return [run for (key, _), members in groups.items() for run in _fold_part(key, members, number)]


def _fold_part(key: str, members: list[StoredPiece], number: Mapping[str, int]) -> Iterator[StoredRun]:
    """Yields the runs of one part; one at a time, because rank 0 folds millions of pieces."""
    members.sort(key=lambda stored: (stored.piece.start, stored.piece.stop))
    first, base, step, count, size = members[0].piece, number[members[0].file], 1, 1, members[0].piece.elements
    for stored in members[1:]:
        piece, file = stored.piece, number[stored.file]
        ahead = file == base + count * step if count > 1 else file > base
        if ahead and size and piece.start == first.start + count * size and piece.stop == piece.start + size:
            step = file - base if count == 1 else step
            count += 1
            continue
        yield StoredRun(PieceRun(first, count), key, base, step)
        first, base, step, count, size = piece, file, 1, 1, piece.elements
    yield StoredRun(PieceRun(first, count), key, base, step)


def run_to_json(stored: StoredRun) -> dict[str, Any]:
    """Returns the JSON of a run: its first piece, the number of pieces, and the step between file numbers."""
    told = piece_to_json(StoredPiece("", stored.key, stored.run.first), stored.file)
    return told if stored.run.count == 1 else told | {"step": stored.step, "count": stored.run.count}


def runs_from_json(values: Sequence[Any], shape: tuple[int, ...], files: FileNames, what: str) -> StoredRuns:
    """Returns the pieces of a tensor from the JSON of its runs. ``files``: file names by number. ``what`` names the
    tensor in errors.

    Raises:
        CheckpointError: a run is damaged, or the pieces do not cover each element exactly once.
    """
    runs = [_run(value, shape, len(files), what) for value in values]
    found, wholes = StoredRuns(runs, files), _wholes(runs)
    check_cover(what, shape, list(found) if wholes is None else wholes)
    return found


def _run(value: Any, shape: tuple[int, ...], files: int, what: str) -> StoredRun:
    fields = Fields(value, what)
    stored, file = piece_from_json(value, shape, "", what), fields.count("file")
    single = fields.any("count") is None
    step, count = (1, 1) if single else (fields.count("step"), fields.count("count"))
    run = PieceRun(stored.piece, count)
    if not single and (step < 1 or count < 2 or not stored.piece.elements):
        raise CheckpointError(
            f'{what} is damaged: it lists pieces with "count" {count}, "step" {step} and {stored.piece.elements} '
            'elements in a piece, but needs a "count" of at least 2, a "step" of at least 1, and at least 1 element; '
            + COPY_AGAIN
        )
    if file + (count - 1) * step >= files:
        raise CheckpointError(
            f"{what} refers to file number {file + (count - 1) * step}, but file numbers are below {files}, the number "
            f"of files: the file is damaged; {COPY_AGAIN}"
        )
    if run.piece(count - 1).stop > stored.piece.part.elements:
        raise CheckpointError(
            f"{what} has a run that ends at element {run.piece(count - 1).stop:,}, but this part of the tensor has "
            f"only {stored.piece.part.elements:,} elements: the file is damaged; {COPY_AGAIN}"
        )
    return StoredRun(run, stored.key, file, step)


def _wholes(runs: Sequence[StoredRun]) -> list[StoredPiece] | None:
    """Returns one piece for each part, if consecutive runs cover each part once; otherwise None."""
    ends: dict[Part, int] = {}
    for run in sorted((one.run for one in runs), key=lambda run: run.first.start):
        if run.first.start != ends.get(run.first.part, 0):
            return None
        ends[run.first.part] = run.piece(run.count - 1).stop
    if any(end != part.elements for part, end in ends.items()):
        return None
    return [StoredPiece("", "", part.whole()) for part in ends]


# ------------------------------------------------------------------------------------------------ writing


def to_parts(manifest: Manifest, slices: Mapping[str, HashSlice]) -> tuple[bytes, dict[str, bytes]]:
    """Splits a manifest into several files: the text of ``manifest.json``, and the texts of index files by name.

    ``slices``: file name -> position of the file's block hashes; the index files store these positions.

    Raises:
        CheckpointError: a value cannot be expressed in JSON.
    """
    names = sorted(manifest.files)
    number = {name: index for index, name in enumerate(names)}
    parts: dict[str, bytes] = {}
    tensors: dict[str, Any] = {}
    runs = {name: fold(tensor.pieces, number) for name, tensor in manifest.tensors.items()}
    for part, members in enumerate(_divided(runs)):
        told = {}
        for name in members:
            tensor = manifest.tensors[name]
            kind = {"dtype": tensor.kind.dtype, "shape": list(tensor.kind.shape)}
            told[name] = kind | {"pieces": [run_to_json(run) for run in runs[name]]}
            tensors[name] = kind | {"part": part}
        parts[_tensor_part(part)] = dump({"tensors": told})
    for part, start in enumerate(range(0, len(names), FILES)):
        rows = [
            [name, manifest.files[name], slices[name].start, slices[name].sha256]
            for name in names[start : start + FILES]
        ]
        parts[_file_part(part)] = dump({"files": rows})
    entries = {name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in parts.items()}
    head = head_to_json(manifest, f"{INDEXED}.0") | {
        "tensors": tensors,
        "tensor_parts": [entry for name, entry in entries.items() if name.startswith(f"{FOLDER}/tensors")],
        "file_parts": [
            entries[_file_part(part)] | {"first": first} for part, first in enumerate(names[::FILES])
        ],
        "file_count": len(names),
    }  # fmt: skip
    return dumped(head), parts


def _divided(tensors: Mapping[str, Sequence[StoredRun]]) -> Iterator[list[str]]:
    """Returns names of tensors in the order of their parameters, so that a stage reads few parts."""
    order = {name: place for place, name in enumerate(tensors)}
    first: dict[str, int] = {}
    for name in tensors:
        first.setdefault(name.partition("/")[2], order[name])
    names = sorted(tensors, key=lambda name: (first[name.partition("/")[2]], order[name]))
    return in_batches(names, lambda name: len(tensors[name]), PIECES)


def _tensor_part(number: int) -> str:
    return f"{FOLDER}/tensors-{number:05d}.json"


def _file_part(number: int) -> str:
    return f"{FOLDER}/files-{number:05d}.json"


# ------------------------------------------------------------------------------------------------ reading


class _Parts:
    """Parts of one kind, each read, checked and parsed at most once."""

    def __init__(self, entries: list[Any], name: Callable[[int], str], read: ReadPart, what: str) -> None:
        self._entries = [Fields(entry, what) for entry in entries]
        self._name, self._read = name, read
        self.read: dict[int, Fields] = {}
        """Parts that have been read, by number."""

    def __len__(self) -> int:
        return len(self._entries)

    def part(self, number: int) -> Fields:
        """Returns the contents of a part.

        Raises:
            CheckpointError: the file differs from its entry in the index.
        """
        if number not in self.read:
            name, entry = self._name(number), self._entries[number]
            size = entry.count("bytes")
            data = self._read(name, min(size, LIMIT))
            if len(data) != size or hashlib.sha256(data).hexdigest() != entry.text("sha256"):
                raise CheckpointError(
                    f"{name} is damaged: its length or sha256 differs from that in the manifest; {COPY_AGAIN}"
                )
            self.read[number] = Fields(parse(data, name), name)
        return self.read[number]


class IndexedFiles(Mapping[str, int]):
    """Mapping from a checkpoint's file names to their sizes in bytes. Reads a file ``index/files-N.json`` when one of
    its entries is accessed.
    """

    def __init__(self, fields: Fields, read: ReadPart) -> None:
        entries = fields.list("file_parts")
        self._count, self._what = fields.count("file_count"), fields.what
        self._firsts = [Fields(entry, fields.what).text("first") for entry in entries]
        self._parts = _Parts(entries, _file_part, read, fields.what)
        self._rows: dict[int, dict[str, tuple[int, HashSlice]]] = {}
        if len(entries) != -(-self._count // FILES) or self._firsts != sorted(self._firsts):
            raise CheckpointError(
                f"{fields.what} is damaged: its parts do not list its {self._count} files; {COPY_AGAIN}"
            )

    def __getitem__(self, name: str) -> int:
        return self._row(name)[0]

    def __iter__(self) -> Iterator[str]:
        for number in range(len(self._parts)):
            yield from self._part(number)

    def __len__(self) -> int:
        return self._count

    def names_of(self, number: int) -> list[str]:
        """Returns the names of the checkpoint's files that ``index/files-N.json`` lists, with N = ``number``."""
        return list(self._part(number))

    def slice_of(self, name: str) -> HashSlice:
        """Returns the position of the block hashes of file ``name`` in ``checksums.safetensors``."""
        return self._row(name)[1]

    def _row(self, name: str) -> tuple[int, HashSlice]:
        number = bisect_right(self._firsts, name) - 1
        if number < 0:
            raise KeyError(name)
        return self._part(number)[name]

    def _part(self, number: int) -> dict[str, tuple[int, HashSlice]]:
        if number not in self._rows:
            fields, rows = self._parts.part(number), dict[str, tuple[int, HashSlice]]()
            for row in fields.list("files"):
                name, size, start, digest = row if isinstance(row, list) and len(row) == 4 else ("", 0, 0, "")
                check_file_name(name, rows, fields.what)
                place = HashSlice(natural(start, fields.what), str(digest))
                rows[name] = (natural(size, fields.what), place)
            wanted = min(FILES, self._count - number * FILES)
            if len(rows) != wanted or next(iter(rows)) != self._firsts[number] or list(rows) != sorted(rows):
                raise CheckpointError(
                    f"{fields.what} is damaged: it does not list the {wanted} files of its part; {COPY_AGAIN}"
                )
            self._rows[number] = rows
        return self._rows[number]


class _Names:
    """Names of files by number, as a sequence."""

    def __init__(self, files: IndexedFiles) -> None:
        self._files = files
        self._known: dict[int, list[str]] = {}

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, number: int) -> str:
        part = number // FILES
        if part not in self._known:
            self._known[part] = self._files.names_of(part)
        return self._known[part][number % FILES]


class IndexedTensors(Mapping[str, StoredTensor]):
    """Mapping from names to a checkpoint's tensors. Reads a file ``index/tensors-N.json`` when one of its
    tensors is accessed.
    """

    def __init__(self, fields: Fields, files: IndexedFiles, read: ReadPart) -> None:
        given = fields.each("tensors", lambda value, where: Fields(value, where))
        self.kinds = {name: read_kind(one) for name, one in given.items()}
        """Dtype and shape of every tensor, from the index."""
        self._part_of = {name: one.count("part") for name, one in given.items()}
        self._parts = _Parts(fields.list("tensor_parts"), _tensor_part, read, fields.what)
        self._names = _Names(files)
        self._known: dict[str, StoredTensor] = {}
        if any(part >= len(self._parts) for part in self._part_of.values()):
            raise CheckpointError(
                f"{fields.what} is damaged: a tensor is in a part that it does not have; {COPY_AGAIN}"
            )

    def __getitem__(self, name: str) -> StoredTensor:
        if name not in self._known:
            fields = self._parts.part(self._part_of[name])
            where = f"{fields.what}: {name}"
            told, kind = Fields(fields.object("tensors").get(name), where), self.kinds[name]
            if read_kind(told) != kind:
                raise CheckpointError(
                    f"{where} is {read_kind(told)}, but {kind} in the index: the file is damaged; {COPY_AGAIN}"
                )
            pieces = runs_from_json(told.list("pieces"), kind.shape, self._names, where)
            self._known[name] = StoredTensor(kind, pieces)
        return self._known[name]

    def __contains__(self, name: object) -> bool:
        return name in self.kinds

    def __iter__(self) -> Iterator[str]:
        return iter(self.kinds)

    def __len__(self) -> int:
        return len(self.kinds)


def from_index(fields: Fields, read: ReadPart) -> Manifest:
    """Returns a manifest that reads its files in ``index/`` when they are needed.

    ``fields``: the JSON of ``manifest.json``. ``read(name, limit)`` returns the contents of a file of at most ``limit``
    bytes.

    Raises:
        CheckpointError: ``manifest.json`` is damaged. A damaged file in ``index/`` raises when it is read.
    """
    check_version(fields, INDEXED)
    files = IndexedFiles(fields, read)
    return head_of(fields, IndexedTensors(fields, files, read), files)


def is_indexed(fields: Fields) -> bool:
    """Returns True if the manifest with these JSON ``fields`` is split into ``manifest.json`` and index files."""
    return str(fields.any("version")).split(".")[0] == str(INDEXED)
