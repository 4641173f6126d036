"""Manifests of many ranks: an index that every rank reads, and parts that a rank reads when it needs them.

    COMMIT                 sha256 of
    manifest.json          dtype and shape of every tensor: grows with the model alone; sha256 of
    index/tensors-N.json   the pieces of some tensors, as runs (``piece_runs``), in files by number
    index/files-N.json     the files with some numbers: name, size, and sha256 of
    checksums.safetensors  the hashes of the blocks of a file, as a slice of the file of all hashes

So a rank reads and parses hardly more in a world of 16,384 ranks than in one of 64, and each byte that it reads is
checked from COMMIT on. A manifest of few pieces is one file (:mod:`~engine.checkpoint.format.manifest`).
"""

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.checkpoint.format.checked_blocks import Hashes
from engine.checkpoint.format.index.piece_runs import PieceRun, fold, run_to_json, runs_from_json
from engine.checkpoint.format.manifest import (
    INDEXED,
    LIMIT,
    Manifest,
    StoredTensor,
    check_file_name,
    check_version,
    dumped,
    head_of,
    head_to_json,
)
from engine.checkpoint.format.safetensors_file import TensorKind, lay_out, read_kind
from engine.checkpoint.format.strict_json import Fields, dump, natural, parse
from engine.errors import CheckpointError

FOLDER = "index"
PIECES, FILES = 1 << 13, 1 << 11
"""Most runs of pieces, unless one tensor has more, and most files of a part: about 1 MiB and 0.4 MiB."""

ReadPart = Callable[[str, int], bytes | bytearray]
"""Reads a file of the checkpoint by name, of so many bytes at most."""


@dataclass(frozen=True, slots=True)
class HashSlice:
    """Where the file of all hashes has those of one file."""

    start: int
    """First byte."""
    sha256: str
    """Of those bytes."""


def hash_slices(hashes: Mapping[str, Hashes]) -> dict[str, HashSlice]:
    """The slices of the file that ``hashes_file`` makes of these hashes."""
    layout = lay_out({name: TensorKind("U64", (len(found),)) for name, found in hashes.items()})
    return {
        name: HashSlice(start, hashlib.sha256(hashes[name].tobytes()).hexdigest())
        for name, (_, start) in layout.places.items()
    }


# ------------------------------------------------------------------------------------------------ writing


def to_parts(manifest: Manifest, slices: Mapping[str, HashSlice]) -> tuple[bytes, dict[str, bytes]]:
    """The index, and the parts by the names of their files.

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


def _divided(tensors: Mapping[str, Sequence[PieceRun]]) -> Iterator[list[str]]:
    """Names of tensors in the order of their parameters, so that a stage reads few parts."""
    order = {name: place for place, name in enumerate(tensors)}
    first: dict[str, int] = {}
    for name in tensors:
        first.setdefault(name.partition("/")[2], order[name])
    members, pieces = list[str](), 0
    for name in sorted(tensors, key=lambda name: (first[name.partition("/")[2]], order[name])):
        if members and pieces + len(tensors[name]) > PIECES:
            yield members
            members, pieces = [], 0
        members.append(name)
        pieces += len(tensors[name])
    if members:
        yield members


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
        """Those that have been read, by number."""

    def __len__(self) -> int:
        return len(self._entries)

    def part(self, number: int) -> Fields:
        """The contents of a part.

        Raises:
            CheckpointError: it is not the file that the index names.
        """
        if number not in self.read:
            name, entry = self._name(number), self._entries[number]
            size = entry.count("bytes")
            data = self._read(name, min(size, LIMIT))
            if len(data) != size or hashlib.sha256(data).hexdigest() != entry.text("sha256"):
                raise CheckpointError(f"{name} is damaged: its length or sha256 differs from that in the manifest.")
            self.read[number] = Fields(parse(data, name), name)
        return self.read[number]


class IndexedFiles(Mapping[str, int]):
    """Sizes of files by name; a part is read when one of its files is asked for."""

    def __init__(self, fields: Fields, read: ReadPart) -> None:
        entries = fields.list("file_parts")
        self._count, self._what = fields.count("file_count"), fields.what
        self._firsts = [Fields(entry, fields.what).text("first") for entry in entries]
        self._parts = _Parts(entries, _file_part, read, fields.what)
        self._rows: dict[int, dict[str, tuple[int, HashSlice]]] = {}
        if len(entries) != -(-self._count // FILES) or self._firsts != sorted(self._firsts):
            raise CheckpointError(f"{fields.what} is damaged: its parts do not hold its {self._count} files.")

    def __getitem__(self, name: str) -> int:
        return self._row(name)[0]

    def __iter__(self) -> Iterator[str]:
        for number in range(len(self._parts)):
            yield from self._part(number)

    def __len__(self) -> int:
        return self._count

    def names_of(self, number: int) -> list[str]:
        """Names of the files of a part, in order."""
        return list(self._part(number))

    def slice_of(self, name: str) -> HashSlice:
        """Where its hashes are."""
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
                raise CheckpointError(f"{fields.what} is damaged: it does not hold the {wanted} files of its part.")
            self._rows[number] = rows
        return self._rows[number]


class _Names:
    """The names of files by number, as a list has them."""

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
    """Tensors by name; a part is read when one of its tensors is asked for."""

    def __init__(self, fields: Fields, files: IndexedFiles, read: ReadPart) -> None:
        given = fields.each("tensors", lambda value, where: Fields(value, where))
        self.kinds = {name: read_kind(one) for name, one in given.items()}
        """Dtype and shape of every tensor, from the index."""
        self._part_of = {name: one.count("part") for name, one in given.items()}
        self._parts = _Parts(fields.list("tensor_parts"), _tensor_part, read, fields.what)
        self._names = _Names(files)
        self._known: dict[str, StoredTensor] = {}
        if any(part >= len(self._parts) for part in self._part_of.values()):
            raise CheckpointError(f"{fields.what} is damaged: a tensor is in a part that it does not have.")

    def __getitem__(self, name: str) -> StoredTensor:
        if name not in self._known:
            fields = self._parts.part(self._part_of[name])
            where = f"{fields.what}: {name}"
            told, kind = Fields(fields.object("tensors").get(name), where), self.kinds[name]
            if read_kind(told) != kind:
                raise CheckpointError(f"{where} is {read_kind(told)}, and {kind} in the index; the file is damaged.")
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
    """The manifest of an index; its parts are read when they are needed.

    Raises:
        CheckpointError: the index is damaged; later, when a part is.
    """
    check_version(fields, INDEXED)
    files = IndexedFiles(fields, read)
    return head_of(fields, IndexedTensors(fields, files, read), files)


def is_indexed(fields: Fields) -> bool:
    """Whether the manifest is in parts."""
    return str(fields.any("version")).split(".")[0] == str(INDEXED)
