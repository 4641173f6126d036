"""Reader of tensor pieces from a committed checkpoint; reads only the needed blocks, and checks the hash of each.

wanted runs     ....[=======]....[==]...........[=============================]....
blocks          |       |       |       |       |       |       |       |       |
reads              read, check, copy out of it     | directly into the target |
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from engine.checkpoint.format.checked_blocks import ByteRange, ChunkReader, Hashes, block_count, hash_function
from engine.checkpoint.format.filesystem import Files, opened, read_all
from engine.checkpoint.format.manifest import CHECKSUMS, Manifest, StoredPiece, StoredTensor
from engine.checkpoint.format.manifest_parts import IndexedFiles, sharing
from engine.checkpoint.format.pieces import Piece, Runs, runs
from engine.checkpoint.format.safetensors_file import HEADER_LIMIT, TensorKind, read_header
from engine.checkpoint.format.step_folders import read_manifest
from engine.errors import COPY_AGAIN, CheckpointError

BUFFER = 1 << 22
"""Largest bytes of a read into a temporary buffer."""
DIRECT = 4
"""Smallest number of whole blocks that are read directly into the target memory."""


class _DamageError(Exception):
    """Block that differs from its saved hash; ``byte`` is its offset in the file."""

    def __init__(self, byte: int) -> None:
        self.byte = byte


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """Request to read one piece of a stored tensor into memory."""

    tensor: str
    piece: Piece
    target: memoryview
    """Memory that receives the piece, in its stored dtype."""


class Copy(NamedTuple):
    """Byte range of a file to read, its target memory, and the name of the tensor for messages."""

    start: int
    length: int
    target: memoryview
    tensor: str


class OpenCheckpoint(Protocol):
    """Interface of a checkpoint that is open for reading, saved by this engine or by another one."""

    step: Path
    name: Path
    """Folder of the checkpoint, as ``step`` is."""
    manifest: Manifest
    kinds: dict[str, TensorKind]
    """Dtype and shape of every stored tensor."""

    def read(self, wanted: Iterable[ReadRequest]) -> None:
        """Reads each requested piece from the files into the request's memory."""

    def check_file(self, file: str) -> None:
        """Reads the file ``file`` and checks the hash of every block; raises CheckpointError for a damaged file. Does
        nothing if the checkpoint has no hashes.
        """

    def tensors_of(self, file: str) -> dict[str, tuple[TensorKind, memoryview]]:
        """Returns all tensors in the file ``file`` of the checkpoint: key -> (dtype and shape, contents)."""


class StepReader:
    """Checkpoint of this engine, open for reading. It checks the hash of every block that it reads.

    ``bytes_read``: bytes of tensor files read so far.

    Raises:
        CheckpointError: the checkpoint is not committed or is damaged, or a file is missing or has another length.
    """

    def __init__(self, files: Files, step: Path) -> None:
        self._files = files
        self.step = self.name = step
        self.manifest: Manifest = read_manifest(files, step)
        self._sized = set[str]()
        """Files with their saved length."""
        self._hashes = dict[str, Hashes]()
        if not isinstance(self.manifest.files, IndexedFiles):
            self._check_sizes()
            self._hashes = self._read_hashes()
        self._headers: dict[str, dict[str, tuple[TensorKind, int]]] = {}
        self._chunks = ChunkReader(files, max(BUFFER, self.manifest.checksum.block_bytes))
        self.bytes_read = 0
        self.kinds: dict[str, TensorKind] = self.manifest.kinds
        """Dtype and shape of every stored tensor."""

    def read(self, wanted: Iterable[ReadRequest]) -> None:
        """Reads each requested piece from the files into the request's memory.

        Raises:
            CheckpointError: names the damaged file, and the tensor in the damaged block.
        """
        for file, found in self._by_file(wanted).items():
            with self._open(file) as opened_file:
                self._fetch(file, opened_file, found)

    def verify(self) -> int:
        """Checks the hashes of all blocks of all files, and each file's header against the manifest. Returns the
        number of bytes read; raises CheckpointError at the first damage.
        """
        before = self.bytes_read
        for file in self.manifest.files:
            self.check_file(file)
        for tensor in self.manifest.tensors.values():
            for stored in tensor.pieces:
                self._place(stored.file, stored.key, tensor.kind, stored.piece)
        return self.bytes_read - before

    def check_file(self, file: str) -> None:
        """Reads the file ``file`` of the checkpoint and checks the hash of every block.

        Raises:
            CheckpointError: the file is damaged.
        """
        for _ in self.chunks(file):
            pass

    def chunks(self, file: str) -> Iterator[memoryview]:
        """Yields the checked bytes of the file ``file`` in consecutive chunks. A chunk is valid until the next is
        requested.
        """
        size = self.manifest.files[file]
        buffer = np.empty(min(size, 8 * max(BUFFER, self.manifest.checksum.block_bytes)), dtype=np.uint8)
        with self._open(file) as opened_file:
            for start in range(0, size, max(1, len(buffer))):
                chunk = buffer[: size - start]
                self._fill(file, opened_file, chunk, start)
                yield chunk.data

    def tensors_of(self, file: str) -> dict[str, tuple[TensorKind, memoryview]]:
        """Returns all tensors of a file: key -> (dtype and shape, contents).

        Raises:
            CheckpointError: the checkpoint has no such file.
        """
        if file not in self.manifest.files:
            raise CheckpointError(
                f"{self.step} has no file {file}: it was saved by fewer ranks or is damaged; {COPY_AGAIN}"
            )
        data = np.empty(self.manifest.files[file], dtype=np.uint8)
        with self._open(file) as opened_file:
            self._fill(file, opened_file, data, 0)
        header = read_header(lambda start, stop: data[start:stop].tobytes(), len(data), str(self.step / file))
        return {key: (kind, data.data[start : start + kind.bytes]) for key, (kind, start) in header.items()}

    def kind_of(self, stored: StoredPiece) -> TensorKind:
        """Returns dtype and shape of the safetensors entry that contains the piece ``stored``."""
        return self._header(stored.file)[stored.key][0]

    # ------------------------------------------------------------------ from pieces to bytes

    def _tensor(self, name: str) -> StoredTensor:
        if name not in self.manifest.tensors:
            raise CheckpointError(
                f"{self.step} has no tensor {name!r}: it was saved from another model or optimizer; build that one, or "
                "load another checkpoint."
            )
        return self.manifest.tensors[name]

    def _by_file(self, wanted: Iterable[ReadRequest]) -> dict[str, list[Copy]]:
        """Returns the copies that the requests need, grouped by file, in the order of the file."""
        found: dict[str, list[Copy]] = {}
        for want in wanted:
            tensor = self._tensor(want.tensor)
            got = 0
            # only for the requested shape: the runs of a hostile shape could fill any memory
            for stored in sharing(tensor, want.piece) if tensor.kind.shape == want.piece.part.shape else ():
                shared = runs(stored.piece, want.piece)
                if len(shared.length):
                    begin = self._place(stored.file, stored.key, tensor.kind, stored.piece)
                    found.setdefault(stored.file, []).extend(copies(shared, begin, tensor.kind.width, want))
                    got += int(shared.length.sum())
            # pieces cover a tensor once, so a number of elements proves that no element of the request is missing
            if got != want.piece.elements or got * tensor.kind.width != len(want.target):
                width = len(want.target) // max(1, want.piece.elements)
                raise CheckpointError(
                    f"{self.step} has {want.tensor!r} with shape {list(tensor.kind.shape)[:8]} and {tensor.kind.width} "
                    f"bytes per element ({tensor.kind.dtype}), but this run needs shape "
                    f"{list(want.piece.part.shape)[:8]} and {width} bytes per element; load a checkpoint of a model "
                    "with equal shapes and dtypes."
                )
        return {file: sorted(members, key=lambda copy: copy.start) for file, members in sorted(found.items())}

    def _place(self, file: str, key: str, kind: TensorKind, piece: Piece) -> int:
        """Returns the first byte of a stored piece, after a check of its file's header against the manifest."""
        held = self._header(file).get(key)
        if held is None or held[0].dtype != kind.dtype or held[0].bytes != piece.elements * kind.width:
            raise CheckpointError(
                f"{self.step / file} is damaged: tensor {key!r} differs from its description in the manifest; "
                f"{COPY_AGAIN}"
            )
        return held[1]

    def _header(self, file: str) -> dict[str, tuple[TensorKind, int]]:
        """Returns kind and first byte of the tensors in a file, read from checked blocks and cached."""
        if file not in self._headers:
            with self._open(file) as opened_file:
                self._headers[file] = read_header(
                    lambda start, stop: self._checked(file, opened_file, start, stop),
                    self.manifest.files[file],
                    str(self.step / file),
                )
        return self._headers[file]

    # ------------------------------------------------------------------ from bytes to blocks

    @contextmanager
    def _open(self, file: str) -> Iterator[int]:
        with opened(self._files, self.step, file) as opened_file:
            if file not in self._sized:
                self._check_size(file, self._files.size(opened_file))
            yield opened_file

    def _fetch(self, file: str, opened_file: int, wanted: Sequence[Copy]) -> None:
        block = self.manifest.checksum.block_bytes
        for start, stop, members in _extents(wanted, block, self.manifest.files[file]):
            only = members[0]
            if len(members) == 1 and only.start == start and only.start + only.length == stop:
                self._fill(file, opened_file, np.frombuffer(only.target, dtype=np.uint8), start, only.tensor)
                continue
            buffer = np.empty(stop - start, dtype=np.uint8)
            self._fill(file, opened_file, buffer, start, only.tensor)
            for copy in members:
                np.frombuffer(copy.target, dtype=np.uint8)[:] = buffer[copy.start - start :][: copy.length]

    def _fill(self, file: str, opened_file: int, target: ByteRange, start: int, tensor: str = "") -> None:
        """Reads whole blocks from ``start`` on and checks them."""
        checksum, hashes = self.manifest.checksum, self._hashes_of(file)
        size, digest = checksum.block_bytes, hash_function(checksum.algorithm)

        def check(data: memoryview, begin: int) -> None:
            for offset in range(0, len(data), size):
                if digest(data[offset : offset + size]) != int(hashes[(begin + offset) // size]):
                    raise _DamageError(begin + offset)

        try:
            self.bytes_read += self._chunks.read(opened_file, target, start, check)
        except _DamageError as damage:
            index = damage.byte // size
            where = f"block {index} (bytes {damage.byte}...)"
            raise CheckpointError(
                f"{self.step / file} is damaged in {where}{self._whose(file, index, tensor)}; {COPY_AGAIN}"
            ) from None

    def _whose(self, file: str, block: int, tensor: str) -> str:
        """Returns words about the tensors in a damaged block; about all tensors of the file if the header is damaged.

        Tensors in one block share its hash, so the damaged one among them cannot be determined.
        """
        size = self.manifest.checksum.block_bytes
        header = self._header_if_sound(file, block)
        held = [
            (name, stored.key)
            for name, of in self.manifest.tensors.items()
            for stored in of.pieces
            if stored.file == file
        ]
        places = [(name, *header[key]) for name, key in held if key in header]
        found = [
            name for name, kind, start in places if start < (block + 1) * size and start + kind.bytes > block * size
        ]
        named = [*dict.fromkeys(found)] or ([tensor] if tensor else [name for name, _ in held])
        return f": {'' if header or block else 'the header, or '}{_listed(named)}" if named else ""

    def _header_if_sound(self, file: str, block: int) -> dict[str, tuple[TensorKind, int]]:
        if file not in self._headers and block:
            with suppress(CheckpointError):
                self._header(file)
        return self._headers.get(file, {})

    def _checked(self, file: str, opened_file: int, start: int, stop: int) -> bytes:
        """Returns bytes ``start:stop``, from checked blocks."""
        block, size = self.manifest.checksum.block_bytes, self.manifest.files[file]
        first, last = start // block * block, min(block_count(stop, block) * block, size)
        buffer = np.empty(max(0, last - first), dtype=np.uint8)
        self._fill(file, opened_file, buffer, first)
        return buffer[start - first : stop - first].tobytes()

    # ------------------------------------------------------------------ opening

    def _check_sizes(self) -> None:
        """Checks the sizes of all files; with a manifest in parts, each rank checks only the files that it reads."""
        for file in self.manifest.files:
            try:
                with self._open(file):
                    pass
            except CheckpointError as error:
                raise CheckpointError(f"{error}{self._held_in(file)}") from error

    def _check_size(self, file: str, found: int) -> None:
        size = self.manifest.files[file]
        if found != size:
            raise CheckpointError(
                f"{self.step / file} is damaged: it has {found:,} bytes, but {size:,} were saved; {COPY_AGAIN}"
            )
        self._sized.add(file)

    def _held_in(self, file: str) -> str:
        named = [name for name, tensor in self.manifest.tensors.items() if any(p.file == file for p in tensor.pieces)]
        return f" It holds {_listed(named)}." if named else ""

    def _hashes_of(self, file: str) -> Hashes:
        """Returns the hashes of the blocks of a file; with a manifest in parts they are read on demand."""
        files = self.manifest.files
        if file not in self._hashes and isinstance(files, IndexedFiles):
            place = files.slice_of(file)
            data = bytearray(8 * block_count(files[file], self.manifest.checksum.block_bytes))
            with opened(self._files, self.step, CHECKSUMS) as hashes, memoryview(data) as target:
                count = self._files.read_into(hashes, target, place.start)
            if count != len(data) or hashlib.sha256(data).hexdigest() != place.sha256:
                raise CheckpointError(f"{self.step / CHECKSUMS} is damaged in the hashes of {file}; {COPY_AGAIN}")
            self._hashes[file] = np.frombuffer(data, dtype="<u8")
        return self._hashes[file]

    def _read_hashes(self) -> dict[str, Hashes]:
        checksum, what = self.manifest.checksum, self.step / CHECKSUMS
        blocks = {file: block_count(size, checksum.block_bytes) for file, size in self.manifest.files.items()}
        limit = min(checksum.bytes, 8 * sum(blocks.values()) + HEADER_LIMIT)
        data = read_all(self._files, self.step, CHECKSUMS, limit)
        if len(data) != checksum.bytes or hashlib.sha256(data).hexdigest() != checksum.sha256:
            raise CheckpointError(
                f"{what} is damaged: its length or sha256 differs from that in the manifest; {COPY_AGAIN}"
            )
        header = read_header(lambda start, stop: bytes(data[start:stop]), len(data), str(what))
        hashes: dict[str, Hashes] = {}
        for file, count in blocks.items():
            kind, start = header.get(file, (TensorKind("U8", ()), 0))
            if kind != TensorKind("U64", (count,)):
                raise CheckpointError(
                    f"{what} is damaged: it lacks the hashes of the {count} blocks of {file}; {COPY_AGAIN}"
                )
            hashes[file] = np.frombuffer(data, dtype="<u8", count=count, offset=start)
        return hashes


def _listed(tensors: Sequence[str]) -> str:
    more = f" and {len(tensors) - 3} more" if len(tensors) > 3 else ""
    return f"tensor {', '.join(map(repr, tensors[:3]))}{more}"


def copies(shared: Runs, begin: int, width: int, want: ReadRequest) -> Iterator[Copy]:
    """Yields the byte ranges to copy from a file into the target memory of the request ``want``.

    Args:
        shared: elements that the stored piece (source) and the requested piece (target) have in common.
        begin: offset of the stored piece in the file, in bytes.
        width: bytes per element.
    """
    for source, target, count in zip(*(column.tolist() for column in shared), strict=True):
        place = want.target[target * width : (target + count) * width]
        yield Copy(begin + source * width, count * width, place, want.tensor)


def _extents(wanted: Sequence[Copy], block: int, size: int) -> Iterator[tuple[int, int, list[Copy]]]:
    """Yields (start, stop, copies): whole blocks that are read together, for copies in the order of the file."""
    start = stop = 0
    members: list[Copy] = []
    for copy in sorted(_split(wanted, block, size), key=lambda copy: copy.start):
        first = copy.start // block * block
        last = min(block_count(copy.start + copy.length, block) * block, size)
        # a long aligned copy needs no buffer, so it is an extent of its own and the others never grow over it
        aligned = copy.start == first and copy.start + copy.length == last and copy.length >= DIRECT * block
        # adjacent blocks are read together, because two copies may share a block that is then checked once
        if members and (aligned or first > stop or last - start > BUFFER):
            yield start, stop, members
            members = []
        if aligned:
            yield first, last, [copy]
            continue
        if not members:
            start, stop = first, last
        stop = max(stop, last)
        members.append(copy)
    if members:
        yield start, stop, members


def _split(wanted: Iterable[Copy], block: int, size: int) -> Iterator[Copy]:
    """Splits long copies into head, whole blocks and tail, so that the middle needs no buffer."""
    for copy in wanted:
        end = copy.start + copy.length
        first = block_count(copy.start, block) * block
        last = end if end == size else end // block * block
        if last - first < DIRECT * block:
            yield from _bounded(copy)
            continue
        for start, stop in ((copy.start, first), (first, last), (last, end)):
            if start < stop:
                yield copy._replace(
                    start=start, length=stop - start, target=copy.target[start - copy.start : stop - copy.start]
                )


def _bounded(copy: Copy) -> Iterator[Copy]:
    """Splits a copy so that no extent exceeds the buffer."""
    for start in range(0, copy.length, BUFFER // 2):
        part = copy.target[start : start + BUFFER // 2]
        yield copy._replace(start=copy.start + start, length=len(part), target=part)
