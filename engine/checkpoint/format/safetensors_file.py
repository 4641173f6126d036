"""Safetensors format: a length, a JSON header, then the bytes of all tensors in sequence. Independent of torch.

    0         8                    page                              size
    | length | {"name": ...}  ... | tensor | tensor | ... | tensor |

Headers written here are padded with spaces to a page, as the format allows. Tensors are ordered by descending element
width, so each starts at a multiple of its width.
"""

import mmap
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, TypeVar

from engine.checkpoint.format.filesystem import PAGE, Files
from engine.checkpoint.format.strict_json import Fields, dump, naturals, parse
from engine.errors import COPY_AGAIN, CheckpointError, EngineError

T = TypeVar("T")

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
"""File names in a Hugging Face folder: the index of several safetensors files, and a single file."""
HEADER_LIMIT = 1 << 25
"""Largest bytes of a header, about 100,000 tensors; a parsed header takes ten times as much memory."""

DTYPES: Mapping[str, str] = MappingProxyType({
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "C64": "complex64",
})  # fmt: skip
"""Dtype names of safetensors -> names of torch and numpy."""
_WIDTHS: Mapping[str, int] = MappingProxyType({
    "F64": 8, "I64": 8, "U64": 8, "C64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
})  # fmt: skip
_METADATA = "__metadata__"
_CODES: Mapping[str, str] = MappingProxyType({name: code for code, name in DTYPES.items()})


class TensorKind(NamedTuple):
    """Dtype and full shape of a stored tensor."""

    dtype: str
    """Dtype as safetensors names it, such as "BF16"."""
    shape: tuple[int, ...]

    @property
    def width(self) -> int:
        """Bytes per element."""
        return _WIDTHS[self.dtype]

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        """Size of the tensor in bytes."""
        return self.elements * self.width


def code_of(dtype: str) -> str:
    """Returns the safetensors name ("BF16") of a torch dtype ("bfloat16").

    Raises:
        CheckpointError: safetensors has no such dtype.
    """
    if dtype not in _CODES:
        raise CheckpointError(
            f"a tensor of dtype {dtype} cannot be stored; safetensors has {', '.join(_CODES)}, so convert it to one of "
            "these."
        )
    return _CODES[dtype]


@dataclass(frozen=True, slots=True)
class FilePart:
    """Contiguous elements of a tensor, stored under their own key in a file, such as one expert of a stacked weight."""

    key: str
    shape: tuple[int, ...]
    start: int
    """First element, in row-major order of the tensor."""

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)


def file_parts(key: str, shape: tuple[int, ...], parts: Sequence[FilePart] = ()) -> Sequence[FilePart]:
    """Returns the file entries of the tensor ``key``: ``parts``, or one for the full tensor if ``parts`` is empty."""
    return parts or (FilePart(key, shape, 0),)


@dataclass(frozen=True, slots=True)
class FileLayout:
    """Layout of a safetensors file: header bytes, tensor offsets and file size."""

    header: bytes
    places: Mapping[str, tuple[TensorKind, int]]
    """Dtype, shape and byte offset of each tensor, by key; of a tensor in parts too."""
    size: int


def lay_out(
    tensors: Mapping[str, TensorKind],
    metadata: Mapping[str, str] | None = None,
    parts: Mapping[str, Sequence[FilePart]] = MappingProxyType({}),
) -> FileLayout:
    """Returns the layout of a safetensors file of ``tensors`` (dtype and shape by key), with ``metadata`` in its
    header.

    ``parts``: tensor key -> entries that replace the tensor's own one, such as one for each expert.

    Raises:
        CheckpointError: a tensor has the reserved name "__metadata__".
    """
    if _METADATA in tensors:
        raise CheckpointError(f"a tensor named {_METADATA!r} cannot be stored: safetensors reserves it; rename it.")
    ordered = sorted(tensors.items(), key=lambda item: -item[1].width)
    entries: dict[str, object] = {_METADATA: dict(metadata)} if metadata else {}
    offset, starts = 0, {}
    for key, kind in ordered:
        starts[key] = offset
        for part in file_parts(key, kind.shape, parts.get(key, ())):
            begin = offset + part.start * kind.width
            end = begin + part.elements * kind.width
            entries[part.key] = {"dtype": kind.dtype, "shape": list(part.shape), "data_offsets": [begin, end]}
        offset += kind.bytes
    text = dump(entries)
    begin = -(-(8 + len(text)) // PAGE) * PAGE
    header = (begin - 8).to_bytes(8, "little") + text.ljust(begin - 8)
    places = {key: (kind, begin + starts[key]) for key, kind in tensors.items()}
    return FileLayout(header, places, begin + offset)


def read_header(read: Callable[[int, int], bytes], size: int, what: str) -> dict[str, tuple[TensorKind, int]]:
    """Reads the header of a safetensors file. Returns key -> (dtype and shape, byte offset).

    Args:
        read: function that returns the bytes of the file from a start to a stop offset.
        size: number of bytes in the file.
        what: name of the file for errors.

    Raises:
        CheckpointError: the file is not safetensors, or its tensors leave gaps.
    """
    length = int.from_bytes(read(0, 8), "little") if size >= 8 else size
    if length > min(size - 8, HEADER_LIMIT):
        raise CheckpointError(f"{what} is damaged: a header of {length:,} bytes in a file of {size:,}; {COPY_AGAIN}")
    entries = parse(read(8, 8 + length), f"the header of {what}")
    entries.pop(_METADATA, None)
    places = {key: _place(entry, f"the header of {what}: {key!r}") for key, entry in entries.items()}
    end = 0
    for key, (kind, start) in sorted(places.items(), key=lambda item: (item[1][1], item[1][0].bytes)):
        if start != end:
            raise CheckpointError(
                f"{what} is damaged: tensor {key!r} begins at byte {start}, but the one before it ends at {end}; "
                f"{COPY_AGAIN}"
            )
        end += kind.bytes
    if 8 + length + end != size:
        raise CheckpointError(
            f"{what} is damaged: it has {size:,} bytes, but its tensors end at {8 + length + end:,}; {COPY_AGAIN}"
        )
    return {key: (kind, 8 + length + start) for key, (kind, start) in places.items()}


def _place(entry: object, what: str) -> tuple[TensorKind, int]:
    fields = Fields(entry, what)
    kind = read_kind(fields)
    offsets = naturals(fields.any("data_offsets"), f"{what}: data_offsets")
    if len(offsets) != 2 or offsets[1] - offsets[0] != kind.bytes:
        raise CheckpointError(
            f"{what}: data_offsets {list(offsets)} do not match {kind.dtype} {list(kind.shape)}: the file is damaged; "
            f"{COPY_AGAIN}"
        )
    return kind, offsets[0]


def read_kind(fields: Fields) -> TensorKind:
    """Returns the dtype and shape of a tensor from the fields "dtype" and "shape" of a JSON object.

    Raises:
        CheckpointError: the dtype is unknown, or the shape is too large for a tensor.
    """
    dtype = fields.text("dtype")
    if dtype not in DTYPES:
        raise CheckpointError(
            f"{fields.what}: dtype {dtype!r} is none of {', '.join(DTYPES)}; save the tensor in one of these."
        )
    shape = naturals(fields.any("shape"), f"{fields.what}: shape")
    if len(shape) > 64 or prod(size or 1 for size in shape) >= 2**63:
        raise CheckpointError(
            f"{fields.what}: shape {list(shape)[:8]} is too large for any tensor: the file is damaged; {COPY_AGAIN}"
        )
    return TensorKind(dtype, shape)


_AT_ONCE = 1 << 24
"""Bytes of one copy; whole pages."""
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def shard_bytes(size: int | str) -> int:
    """Returns the number of bytes of a size such as 1024, "5GB" (10^9) or "512MiB" (2^20).

    Raises:
        EngineError: the size is malformed or not above 0.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", str(size).strip())
    unit = _UNITS.get(found[2].upper()) if found is not None else None
    if isinstance(size, bool) or found is None or unit is None or not (wanted := int(float(found[1]) * unit)):
        raise EngineError(
            f'max_shard_size was given {size!r}; pass bytes above 0, or a size such as "5GB" or "512MiB".'
        )
    return wanted


def repack(files: Files, source: Path, target: Path, keys: Sequence[str], limit: int) -> None:
    """Copies tensors from the safetensors files of one folder into new files with at most ``limit`` bytes of tensors.

    A tensor larger than ``limit`` gets its own file. If there are several new files, adds an index in Hugging Face's
    format.
    """
    with _opened(files, source) as opened:
        places = {key: (file, *place) for file, own in opened for key, place in own.items()}
        shards = list(in_batches(keys, lambda key: places[key][1].bytes, limit)) or [[]]
        names = [SINGLE]
        if len(shards) > 1:
            names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
        for name, own in zip(names, shards, strict=True):
            layout = lay_out({key: places[key][1] for key in own}, {"format": "pt"})
            with _PagedFile(files, target / name) as made:
                made.append(layout.header)
                for key in sorted(own, key=lambda key: layout.places[key][1]):
                    file, kind, start = places[key]
                    made.copy(file, start, kind.bytes)
        if len(shards) > 1:
            total = sum(places[key][1].bytes for key in keys)
            listed = {key: name for name, own in zip(names, shards, strict=True) for key in own}
            with _PagedFile(files, target / INDEX) as made:
                made.append(dump({"metadata": {"total_size": total}, "weight_map": listed}))


def in_batches(items: Iterable[T], size_of: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Yields consecutive ``items`` in lists of total size ``limit`` at most; a larger item gets its own list.
    ``size_of``: size of an item, such as its bytes.
    """
    batch: list[T] = []
    size = 0
    for item in items:
        if batch and size + size_of(item) > limit:
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += size_of(item)
    if batch:
        yield batch


@contextmanager
def _opened(files: Files, folder: Path) -> Iterator[list[tuple[int, dict[str, tuple[TensorKind, int]]]]]:
    """Opens every safetensors file of a folder; yields each with its tensors."""
    opened: list[tuple[int, dict[str, tuple[TensorKind, int]]]] = []
    try:
        for name in files.names(folder):
            if name.endswith(".safetensors"):
                file = files.open(folder, name)
                opened.append((file, {}))

                def read(start: int, stop: int, file: int = file) -> bytes:
                    data = bytearray(stop - start)
                    files.read_into(file, memoryview(data), start)
                    return bytes(data)

                opened[-1][1].update(read_header(read, files.size(file), str(folder / name)))
        yield opened
    finally:
        for file, _ in opened:
            files.close(file)


class _PagedFile:
    """New file for appending, written in whole pages."""

    def __init__(self, files: Files, path: Path) -> None:
        self._files, self._file = files, files.create(path)
        self._buffer = memoryview(mmap.mmap(-1, _AT_ONCE))
        self._filled = self._written = 0

    def __enter__(self) -> "_PagedFile":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                size = self._written + self._filled
                self._files.write(self._file, self._buffer[: -(-self._filled // PAGE) * PAGE])
                self._files.truncate(self._file, size)
                self._files.sync(self._file)
        finally:
            self._files.close(self._file)

    def append(self, data: bytes | bytearray) -> None:
        """Appends bytes."""
        rest = memoryview(data)
        while rest:
            room = self._room(len(rest))
            room[:] = rest[: len(room)]
            rest = rest[len(room) :]

    def copy(self, file: int, start: int, size: int) -> None:
        """Appends ``size`` bytes of an open file from ``start`` on."""
        while size:
            room = self._room(size)
            self._files.read_into(file, room, start)
            start, size = start + len(room), size - len(room)

    def _room(self, wanted: int) -> memoryview:
        """Returns memory for the next bytes, ``wanted`` or fewer, and counts them as appended."""
        if self._filled == _AT_ONCE:
            self._files.write(self._file, self._buffer)
            self._written, self._filled = self._written + _AT_ONCE, 0
        room = self._buffer[self._filled : min(_AT_ONCE, self._filled + wanted)]
        self._filled += len(room)
        return room
