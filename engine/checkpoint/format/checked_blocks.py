"""Block hashes of a file, and reads that check every block, so that no flipped bit is loaded.

Two threads read long files in chunks that fit the processor's cache, because reading and hashing release the GIL:

    thread 0    read chunk 0 | check | copy      read chunk 2 | check | copy
    thread 1           read chunk 1 | check | copy      read chunk 3 ...

Chunks in the page cache are read into the target; others bypass it through reused aligned buffers.
"""

import errno
import hashlib
import mmap
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from engine.checkpoint.format.filesystem import PAGE, Files
from engine.checkpoint.format.safetensors_file import TensorKind, lay_out
from engine.errors import CheckpointError

try:
    import xxhash
except ImportError:  # without xxhash, blocks are hashed with crc32, as the manifest states
    xxhash = None  # type: ignore[assignment]


BLOCK = 1 << 18
"""Bytes of a hashed block; small compared to a rank's shard, because reads are rounded to blocks."""

Hashes = NDArray[np.uint64]
_HashFunction = Callable[[memoryview], int]

_ALGORITHMS: Mapping[str, _HashFunction] = MappingProxyType(
    ({"xxh3-64": lambda data: int(xxhash.xxh3_64_intdigest(data))} if xxhash is not None else {})
    | {"crc32": lambda data: zlib.crc32(data)}
)
ALGORITHMS = ("xxh3-64", "crc32")
DEFAULT_ALGORITHM = next(iter(_ALGORITHMS))


def block_count(size: int, block: int = BLOCK) -> int:
    """Returns the number of blocks in a file of ``size`` bytes. Each has ``block`` bytes; the last may be shorter."""
    return -(-size // block)


def hash_function(algorithm: str) -> _HashFunction:
    """Returns the function that hashes one block with ``algorithm``.

    Raises:
        CheckpointError: the package of the algorithm is missing on this machine.
    """
    if algorithm not in _ALGORITHMS:
        raise CheckpointError(
            f"this checkpoint's blocks are hashed with {algorithm}, but the package that computes it is missing; "
            "run pip install xxhash."
        )
    return _ALGORITHMS[algorithm]


def hash_blocks(data: memoryview, algorithm: str = DEFAULT_ALGORITHM, block: int = BLOCK) -> Hashes:
    """Returns the hashes of ``data``, one for each block, as a uint64 array [blocks]. ``data`` must begin at a block
    boundary of its file; the last block may be shorter.
    """
    function = hash_function(algorithm)
    starts = range(0, len(data), block)
    return np.fromiter((function(data[start : start + block]) for start in starts), dtype=np.uint64, count=len(starts))


THREADS = 2
LONG = 1 << 20
"""Smallest bytes of a read that bypasses the page cache."""


ByteRange = NDArray[np.uint8]
Check = Callable[[memoryview, int], None]
"""Function (bytes read, their offset in the file) that raises if they are damaged."""


class ChunkReader:
    """Reader of open files in chunks of at most ``size`` bytes, a multiple of the page size. Two threads read the
    chunks.
    """

    def __init__(self, files: Files, size: int) -> None:
        self._files, self._size = files, size
        self._spare: deque[memoryview] = deque()
        self._pool = ThreadPoolExecutor(THREADS, "reader")  # threads start with the first read and end with the reader

    def read(self, file: int, target: ByteRange, start: int, check: Check) -> int:
        """Fills ``target`` from an open file, beginning at byte ``start``, a multiple of the page size. Returns the
        size of ``target`` in bytes. Calls ``check(chunk, offset in the file)`` for each chunk.

        Raises:
            OSError: the disk failed, or the file is too short. Errors of ``check`` are raised too. If there are several
                errors, the one at the lowest offset is raised.
        """

        def one(begin: int) -> int:
            return self._chunk(file, target[begin : begin + self._size], start + begin, check)

        if len(target) <= self._size:
            return one(0)
        return sum(_results([self._pool.submit(one, begin) for begin in range(0, len(target), self._size)]))

    def _chunk(self, file: int, target: ByteRange, start: int, check: Check) -> int:
        if len(target) < LONG or self._files.is_cached(file, start):
            _whole(self._files.read_into(file, target.data, start), target)
            check(target.data, start)
            return len(target)
        aligned = self._take()
        _whole(self._files.read_direct(file, aligned[: -(-len(target) // PAGE) * PAGE], start), target)
        data = aligned[: len(target)]
        check(data, start)
        np.copyto(target, np.frombuffer(data, dtype=np.uint8))
        self._spare.append(aligned)
        return len(target)

    def _take(self) -> memoryview:
        try:
            return self._spare.pop()
        except IndexError:
            return memoryview(mmap.mmap(-1, -(-self._size // PAGE) * PAGE))


def _whole(count: int, target: ByteRange) -> None:
    """Refuses a short read: the buffer may still contain equal bytes from before, and the check would pass."""
    if count < len(target):
        raise OSError(errno.EIO, "it has become shorter")


def _results(futures: Sequence[Future[int]]) -> list[int]:
    """Returns all results; every future has ended when this returns or raises."""
    try:
        return [future.result() for future in futures]
    finally:
        for future in futures:
            future.cancel()
        wait(futures)


@dataclass(frozen=True, slots=True)
class HashSlice:
    """Position of one file's block hashes in ``checksums.safetensors``, and their sha256."""

    start: int
    """Offset of the hashes in that file, in bytes."""
    sha256: str
    """sha256 of the file's hashes."""


def hash_slices(hashes: Mapping[str, Hashes]) -> dict[str, HashSlice]:
    """Returns, by file name, the position of the file's block hashes in ``checksums.safetensors``, and the sha256 of
    these hashes.

    ``hashes``: file name -> hashes of the file's blocks.
    """
    layout = lay_out({name: TensorKind("U64", (len(found),)) for name, found in hashes.items()})
    return {
        name: HashSlice(start, hashlib.sha256(hashes[name].tobytes()).hexdigest())
        for name, (_, start) in layout.places.items()
    }
