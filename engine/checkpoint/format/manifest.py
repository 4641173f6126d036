"""``manifest.json``: the tensors and files of a checkpoint, parsed into frozen dataclasses with every field checked.

Tensor names have four prefixes: "param/NAME" (in the dtype of forward), "buffer/NAME", "master/NAME" (fp32 masters of
bf16 or fp16 parameters), and the optimizer's, such as "exp_avg/NAME". NAME is the parameter's first name in
``model.named_parameters()``.
"""

import hashlib
import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Protocol

from engine.checkpoint.format.checked_blocks import ALGORITHMS, BLOCK, DEFAULT_ALGORITHM, Hashes
from engine.checkpoint.format.pieces import Part, Piece, covers_once
from engine.checkpoint.format.safetensors_file import TensorKind, lay_out, read_kind
from engine.checkpoint.format.strict_json import Fields, dump, natural, naturals
from engine.errors import COPY_AGAIN, CheckpointError

FORMAT, MAJOR, MINOR = "trine-checkpoint", 1, 0
INDEXED = 2
"""Major version of a manifest that is split into several files."""
NAME, COMMIT, CHECKSUMS = "manifest.json", "COMMIT", "checksums.safetensors"
LIMIT = 1 << 26
"""Largest bytes of a manifest, about 500,000 pieces; parsed, it takes up to 20 times as much memory."""
PARTS = 1 << 12
"""Most parts of a tensor, one for each tensor rank."""

_FILE = re.compile(r"(model|optim|state)/[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}")


class FileNames(Protocol):
    """Protocol of a sequence with the names of a checkpoint's files. Manifests refer to a file by its index in the
    sequence.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> str: ...


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """Piece of a tensor in a checkpoint, with the file and the safetensors key that contain its values."""

    file: str
    key: str
    piece: Piece


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Tensor of a checkpoint: dtype, full shape, and stored pieces, which contain each element exactly once."""

    kind: TensorKind
    pieces: Sequence[StoredPiece]


@dataclass(frozen=True, slots=True)
class Checksum:
    """Manifest entry about ``checksums.safetensors``: its size and sha256, and the algorithm and block size of its
    hashes.
    """

    algorithm: str
    block_bytes: int
    sha256: str
    """sha256 of ``checksums.safetensors``."""
    bytes: int
    """Size of ``checksums.safetensors`` in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Description of a checkpoint: tensors, files and metadata, without tensor values."""

    step: int
    """Number of weight updates."""
    attempt: str
    """Random id of the save that has written these files."""
    tensors: Mapping[str, StoredTensor]
    files: Mapping[str, int]
    """Size of each file in bytes, by name."""
    checksum: Checksum
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Second names of tied parameters -> their first name."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """Metadata for people: time, versions, grid, configuration."""
    progress: Mapping[str, Any] = field(default_factory=dict)
    """Counters, loss scale, learning-rate scheduler and registered objects."""
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    """Type of the optimizer, its groups by parameter names, scalars by group and by parameter."""
    user: Any = None

    @property
    def kinds(self) -> dict[str, TensorKind]:
        """Dtype and full shape of every tensor, by name. Reads no file."""
        known: dict[str, TensorKind] | None = getattr(self.tensors, "kinds", None)
        return {name: tensor.kind for name, tensor in self.tensors.items()} if known is None else known

    @property
    def signature(self) -> str:
        """Hex sha256 over names, shapes and dtypes of the model's parameters and buffers."""
        rows = [(name, kind.dtype, kind.shape) for name, kind in sorted(self.model_kinds().items())]
        return hashlib.sha256(repr(rows).encode()).hexdigest()

    def model_kinds(self) -> dict[str, TensorKind]:
        """Returns dtype and shape of the model's parameters and buffers, by name ("param/..." or "buffer/...")."""
        return {n: kind for n, kind in self.kinds.items() if n.startswith(("param/", "buffer/"))}


def hashes_file(hashes: Mapping[str, Hashes]) -> tuple[bytearray, Checksum]:
    """Returns the bytes of the file ``checksums.safetensors``, and its manifest entry.

    ``hashes``: file name -> hashes of the file's blocks, uint64 [blocks].
    """
    layout = lay_out({name: TensorKind("U64", (len(found),)) for name, found in hashes.items()})
    data = bytearray(layout.size)
    data[: len(layout.header)] = layout.header
    for name, (kind, start) in layout.places.items():
        data[start : start + kind.bytes] = hashes[name].tobytes()
    return data, Checksum(DEFAULT_ALGORITHM, BLOCK, hashlib.sha256(data).hexdigest(), len(data))


def to_json(manifest: Manifest) -> bytes:
    """Returns the text of ``manifest.json``, as UTF-8 bytes.

    Raises:
        CheckpointError: a value cannot be expressed in JSON.
    """
    names = sorted(manifest.files)
    number = {name: index for index, name in enumerate(names)}
    return dumped(head_to_json(manifest, f"{MAJOR}.{MINOR}") | {
        "files": [{"name": name, "bytes": manifest.files[name]} for name in names],
        "tensors": {
            name: {
                "dtype": tensor.kind.dtype, "shape": list(tensor.kind.shape),
                "pieces": [piece_to_json(stored, number[stored.file]) for stored in tensor.pieces],
            }
            for name, tensor in manifest.tensors.items()
        },
    })  # fmt: skip


def head_to_json(manifest: Manifest, version: str) -> dict[str, Any]:
    """Returns the JSON fields of a manifest, except for its tensors and files. ``version``: format version, such as
    "1.0".
    """
    return {
        "format": FORMAT, "version": version, "step": manifest.step, "attempt": manifest.attempt,
        "signature": manifest.signature, "aliases": dict(manifest.aliases), "info": dict(manifest.info),
        "progress": dict(manifest.progress), "optimizer": dict(manifest.optimizer), "user": manifest.user,
        "checksum": {
            "algorithm": manifest.checksum.algorithm, "block_bytes": manifest.checksum.block_bytes,
            "sha256": manifest.checksum.sha256, "bytes": manifest.checksum.bytes,
        },
    }  # fmt: skip


def dumped(fields: Mapping[str, Any]) -> bytes:
    """Returns manifest fields as JSON text.

    Raises:
        CheckpointError: a value cannot be expressed in JSON.
    """
    try:
        return dump(fields)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"not saved: {error}; client_state and the states of registered objects must be JSON: dicts with string "
            "keys, lists, strings, finite numbers, true, false and null."
        ) from error


def piece_to_json(stored: StoredPiece, file: int | str) -> dict[str, Any]:
    """Returns a stored piece as a JSON dict. ``file``: the file's index, for a manifest; or its name, for a message to
    rank 0, which makes the manifest.
    """
    part = stored.piece.part
    rows = None if part.dim is None else [part.dim, [list(row) for row in part.rows]]
    if rows is not None and part.outer is not None:
        rows.append(list(part.outer))
    return {"file": file, "key": stored.key, "rows": rows, "flat": [stored.piece.start, stored.piece.stop]}


def piece_from_json(value: Any, shape: tuple[int, ...], file: str, what: str) -> StoredPiece:
    """Returns the stored piece of a tensor of ``shape`` from its JSON dict ``value``.

    ``file``: name of its file. ``what`` names the tensor in errors.

    Raises:
        CheckpointError: the value is damaged, or the piece is outside the tensor.
    """
    fields = Fields(value, what)
    flat = naturals(fields.any("flat"), f"{what}: flat")
    piece = Piece(_part(fields.any("rows"), shape, what), *flat) if len(flat) == 2 else None
    if piece is None or not piece.start <= piece.stop <= piece.part.elements:
        raise CheckpointError(
            f"{what}: elements {list(flat)[:4]} are outside the part: the file is damaged; {COPY_AGAIN}"
        )
    return StoredPiece(file, fields.text("key"), piece)


def from_fields(fields: Fields) -> Manifest:
    """Parses and checks a manifest that is one file, ``manifest.json``. ``fields``: the JSON object in it.

    Raises:
        CheckpointError: the manifest is damaged, has an unknown format or version, names a file outside its folder, or
            has pieces that do not cover a tensor exactly once.
    """
    check_version(fields)
    files = _files(fields)
    names = list(files)
    return head_of(fields, fields.each("tensors", lambda value, where: read_tensor(value, names, where)), files)


def head_of(fields: Fields, tensors: Mapping[str, StoredTensor], files: Mapping[str, int]) -> Manifest:
    """Returns a manifest with ``tensors`` and ``files`` (name -> size in bytes); its other values are read from the
    JSON ``fields``.

    Raises:
        CheckpointError: a field is damaged, or the saved hash of names, shapes and dtypes does not match.
    """
    what = fields.what
    aliases = fields.each("aliases", lambda value, where: _text(value, where))
    checksum = _checksum(Fields(fields.any("checksum"), f"{what}: checksum"))
    manifest = Manifest(
        step=fields.count("step"),
        attempt=fields.text("attempt"),
        tensors=tensors,
        files=files,
        checksum=checksum,
        aliases=aliases,
        info=fields.object("info"),
        progress=fields.object("progress"),
        optimizer=fields.object("optimizer"),
        user=fields.any("user"),
    )
    if fields.text("signature") != manifest.signature:
        raise CheckpointError(f"{what} is damaged: its signature does not match its tensors; {COPY_AGAIN}")
    return manifest


def check_version(fields: Fields, known: int = MAJOR) -> None:
    """Raises CheckpointError if ``fields`` name another format than this engine's, or another major version than
    ``known``.
    """
    if fields.text("format") != FORMAT:
        raise CheckpointError(
            f"{fields.what} has format {fields.text('format')[:40]!r}, but this engine reads {FORMAT!r}; pass a "
            "checkpoint of this engine."
        )
    version = fields.text("version")
    major = version.split(".")[0]
    if major != str(known):
        raise CheckpointError(
            f"{fields.what} has version {version[:20]!r}, but this engine reads {MAJOR}.x and {INDEXED}.x; use the "
            "engine version that saved it."
        )


def _files(fields: Fields) -> dict[str, int]:
    files: dict[str, int] = {}
    for value in fields.list("files"):
        entry = Fields(value, f"{fields.what}: files")
        name = entry.text("name")
        check_file_name(name, files, fields.what)
        files[name] = entry.count("bytes")
    return files


def check_file_name(name: Any, known: Container[str], what: str) -> None:
    """Raises CheckpointError if ``name`` is not of the form "model/NAME", "optim/NAME" or "state/NAME", or is in
    ``known`` already. ``what`` names the manifest in the error.
    """
    if not isinstance(name, str) or not _FILE.fullmatch(name) or name in known:
        raise CheckpointError(
            f"{what} names file {str(name)[:80]!r}; files must be in model/, optim/ or state/ and be listed once: the "
            f"manifest is damaged; {COPY_AGAIN}"
        )


def _checksum(fields: Fields) -> Checksum:
    algorithm, block = fields.text("algorithm"), fields.count("block_bytes")
    if algorithm not in ALGORITHMS:
        raise CheckpointError(
            f"{fields.what}: algorithm {algorithm[:40]!r} is none of {', '.join(ALGORITHMS)}: the file is damaged or "
            "of a later version; copy it again, or load it with that version."
        )
    if block not in (1 << power for power in range(12, 25)):
        raise CheckpointError(
            f"{fields.what}: block_bytes is {block}, not a power of 2 from 4 KiB to 16 MiB: the file is damaged; "
            f"{COPY_AGAIN}"
        )
    return Checksum(algorithm, block, fields.text("sha256"), fields.count("bytes"))


def read_tensor(value: Any, files: FileNames, what: str) -> StoredTensor:
    """Returns a tensor from its JSON entry ``value`` in a manifest. ``files``: file names, by index. ``what`` names
    the tensor in errors.

    Raises:
        CheckpointError: the entry is damaged, or its pieces do not cover each element exactly once.
    """
    fields = Fields(value, what)
    kind = read_kind(fields)
    parts = _Parts(kind.shape, what)
    pieces = [_sound(entry, files, parts) or _piece(entry, files, parts) for entry in fields.list("pieces")]
    check_cover(what, kind.shape, pieces)
    return StoredTensor(kind, tuple(pieces))


class _Parts:
    """Parts of a tensor of ``shape``, each created once: a manifest may have 100,000 pieces."""

    def __init__(self, shape: tuple[int, ...], what: str) -> None:
        self.shape, self.what = shape, what
        self._whole = Part(shape)
        self._known: dict[tuple[Any, ...], Part] = {}

    def of(self, rows: Any) -> Part:
        """Returns the part with these rows."""
        if rows is None:
            return self._whole
        part = _part(rows, self.shape, self.what)
        if len(self._known) == PARTS:
            raise CheckpointError(
                f"{self.what} has more than {PARTS} parts, more than any number of tensor ranks: the file is damaged; "
                f"{COPY_AGAIN}"
            )
        return self._known.setdefault(_key(rows), part)

    def known(self, rows: Any) -> Part | None:
        """Returns the part with these rows if it was created before, otherwise None."""
        if rows is None:
            return self._whole
        try:
            return self._known.get(_key(rows))
        except (TypeError, ValueError):
            return None


def _key(rows: Any) -> tuple[Any, ...]:
    dim, pairs, *outer = rows
    return (dim, tuple(map(tuple, pairs)), *map(tuple, outer))


def _sound(entry: Any, files: FileNames, parts: _Parts) -> StoredPiece | None:
    """Returns a valid piece of a known part; None if it needs a check field by field."""
    if type(entry) is not dict:
        return None
    file, key, flat, part = entry.get("file"), entry.get("key"), entry.get("flat"), parts.known(entry.get("rows"))
    if part is None or type(file) is not int or type(key) is not str or type(flat) is not list or len(flat) != 2:
        return None
    start, stop = flat
    if type(start) is not int or type(stop) is not int or not 0 <= start <= stop <= part.elements:
        return None
    return StoredPiece(files[file], key, Piece(part, start, stop)) if 0 <= file < len(files) else None


def _piece(entry: Any, files: FileNames, parts: _Parts) -> StoredPiece:
    """Returns a piece, checked field by field."""
    what, fields = parts.what, Fields(entry, parts.what)
    index = natural(fields.any("file"), f"{what}: file")
    if index >= len(files):
        raise CheckpointError(
            f"{what}: file number {index} is not below {len(files)}: the file is damaged; {COPY_AGAIN}"
        )
    stored = piece_from_json(entry, parts.shape, files[index], what)
    return replace(stored, piece=replace(stored.piece, part=parts.of(fields.any("rows"))))


def check_cover(what: str, shape: tuple[int, ...], pieces: Sequence[StoredPiece]) -> None:
    """Raises CheckpointError if ``pieces`` omit an element of a tensor of ``shape``, or contain an element twice.

    ``what`` names the tensor in the error.
    """
    if not covers_once(shape, [stored.piece for stored in pieces]):
        held = sum(stored.piece.elements for stored in pieces)
        raise CheckpointError(
            f"{what}: its pieces have {held} elements and must cover its {prod(shape)} elements exactly once; "
            f"{COPY_AGAIN}"
        )


def _part(rows: Any, shape: tuple[int, ...], what: str) -> Part:
    if rows is None:
        return Part(shape)
    if not isinstance(rows, list) or len(rows) not in (2, 3) or not isinstance(rows[1], list):
        raise CheckpointError(f"{what}: rows are not [dim, [[start, stop], ...]]: the file is damaged; {COPY_AGAIN}")
    dim = natural(rows[0], f"{what}: dim")
    pairs = [naturals(pair, f"{what}: rows") for pair in rows[1]]
    end, right = 0, dim < len(shape)
    for pair in pairs:
        right = right and len(pair) == 2 and end <= pair[0] < pair[1] <= shape[dim]
        end = pair[-1] if pair else 0
    outer = naturals(rows[2], f"{what}: rows") if len(rows) == 3 else (0, 1)
    right = right and len(outer) == 2 and outer[0] < outer[1] <= (shape[0] if len(rows) == 3 and dim else 1)
    if not right or not pairs:
        raise CheckpointError(
            f"{what}: rows {str(rows)[:60]} are not ascending ranges inside shape {list(shape)}: the file is damaged; "
            f"{COPY_AGAIN}"
        )
    return Part(
        shape, dim, tuple((start, stop) for start, stop in pairs), (outer[0], outer[1]) if len(rows) == 3 else None
    )


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise CheckpointError(f"{what} is not a string: the file is damaged; {COPY_AGAIN}")
    return value
