"""The tensors of several safetensors files, copied into one file or files of a set size; a few MiB are in memory."""

import mmap
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from engine.checkpoint.format.filesystem import PAGE, Files
from engine.checkpoint.format.safetensors_file import INDEX, SINGLE, TensorKind, lay_out, read_header
from engine.checkpoint.format.strict_json import dump
from engine.errors import EngineError

_AT_ONCE = 1 << 24
"""Bytes that are copied at a time; whole pages."""
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def shard_bytes(size: int | str) -> int:
    """Bytes of a size such as 5_000_000_000, "5GB" or "512MiB", as transformers reads it.

    Raises:
        EngineError: it is no size above 0.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", str(size).strip())
    unit = _UNITS.get(found[2].upper()) if found is not None else None
    if isinstance(size, bool) or found is None or unit is None or not (wanted := int(float(found[1]) * unit)):
        raise EngineError(
            f'max_shard_size was given {size!r}; give bytes above 0, or a size such as "5GB" or "512MiB".'
        )
    return wanted


def repack(files: Files, source: Path, target: Path, keys: Sequence[str], limit: int) -> None:
    """Write the tensors ``keys`` of the files in ``source`` into new files in ``target``, of ``limit`` bytes at most.

    A file ends before the tensor that does not fit; a larger tensor has a file of its own. Several files get an index.
    """
    with _opened(files, source) as opened:
        places = {key: (file, *place) for file, own in opened for key, place in own.items()}
        shards = _shards({key: places[key][1] for key in keys}, limit)
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


def _shards(kinds: Mapping[str, TensorKind], limit: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    size = 0
    for key, kind in kinds.items():
        if shards[-1] and size + kind.bytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(key)
        size += kind.bytes
    return shards


@contextmanager
def _opened(files: Files, folder: Path) -> Iterator[list[tuple[int, dict[str, tuple[TensorKind, int]]]]]:
    """Every safetensors file of a folder, open, with its tensors."""
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
    """A new file that is appended to, and written in whole pages."""

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
        """Append bytes."""
        rest = memoryview(data)
        while rest:
            room = self._room(len(rest))
            room[:] = rest[: len(room)]
            rest = rest[len(room) :]

    def copy(self, file: int, start: int, size: int) -> None:
        """Append ``size`` bytes of an open file from ``start`` on."""
        while size:
            room = self._room(size)
            self._files.read_into(file, room, start)
            start, size = start + len(room), size - len(room)

    def _room(self, wanted: int) -> memoryview:
        """Memory for the next bytes, ``wanted`` or fewer, which count as appended."""
        if self._filled == _AT_ONCE:
            self._files.write(self._file, self._buffer)
            self._written, self._filled = self._written + _AT_ONCE, 0
        room = self._buffer[self._filled : min(_AT_ONCE, self._filled + wanted)]
        self._filled += len(room)
        return room
