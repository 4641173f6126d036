"""Hashes of the blocks of a file.

A flipped bit in a tensor loads without a word in every common format. Here each block of a file has a 64-bit hash,
checked whenever a part of the block is read. Hashing releases the interpreter lock.

Read long stretches of a file in chunks that stay in the processor's cache while they are checked.

    one thread       read chunk 0 | check | copy      read chunk 2 | check | copy
    another one             read chunk 1 | check | copy      read chunk 3 ...

So the disk has always something to do. Chunks that lie in the page cache are read straight into their place; others
go past it, through aligned memory that is used again and again: fresh pages of the cache cost more than the copy.
"""

import errno
import mmap
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from engine.checkpoint.format.filesystem import PAGE, Files
from engine.errors import CheckpointError

try:
    import xxhash
except ImportError:  # a machine without it writes crc32 and says so in the manifest
    xxhash = None  # type: ignore[assignment]


BLOCK = 1 << 18
"""Bytes that one hash covers. Reading rounds to it, so it is small against what a rank wants of a tensor."""

Hashes = NDArray[np.uint64]
_HashFunction = Callable[[memoryview], int]

_ALGORITHMS: Mapping[str, _HashFunction] = MappingProxyType(
    ({"xxh3-64": lambda data: int(xxhash.xxh3_64_intdigest(data))} if xxhash is not None else {})
    | {"crc32": lambda data: zlib.crc32(data)}
)
ALGORITHMS = ("xxh3-64", "crc32")
DEFAULT_ALGORITHM = next(iter(_ALGORITHMS))


def block_count(size: int, block: int = BLOCK) -> int:
    """Blocks of a file of ``size`` bytes."""
    return -(-size // block)


def hash_function(algorithm: str) -> _HashFunction:
    """The hash of one block.

    Raises:
        CheckpointError: the machine lacks the package that computes it.
    """
    if algorithm not in _ALGORITHMS:
        raise CheckpointError(
            f"this checkpoint's blocks are hashed with {algorithm}, which this machine cannot compute; "
            "pip install xxhash."
        )
    return _ALGORITHMS[algorithm]


def hash_blocks(data: memoryview, algorithm: str = DEFAULT_ALGORITHM, block: int = BLOCK) -> Hashes:
    """uint64 [blocks]: the hash of every block; ``data`` begins at one."""
    function = hash_function(algorithm)
    starts = range(0, len(data), block)
    return np.fromiter((function(data[start : start + block]) for start in starts), dtype=np.uint64, count=len(starts))


THREADS = 2
LONG = 1 << 20
"""Bytes from which going past the page cache is worth it."""


ByteRange = NDArray[np.uint8]
Check = Callable[[memoryview, int], None]
"""Takes what was read and where it begins in the file; raises if it is damaged."""


class ChunkReader:
    """Reads at most ``size`` bytes, whole pages, at a time."""

    def __init__(self, files: Files, size: int) -> None:
        self._files, self._size = files, size
        self._spare: deque[memoryview] = deque()
        self._pool = ThreadPoolExecutor(THREADS, "reader")  # threads start with the first work, and end with this

    def read(self, file: int, target: ByteRange, start: int, check: Check) -> int:
        """Fill ``target`` from byte ``start``, which begins a page; returns the bytes read.

        Raises:
            OSError: the disk's, or what ``check`` raises; of several problems the first in the file.
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
    """What was in the memory before could be the very bytes that are no longer in the file."""
    if count < len(target):
        raise OSError(errno.EIO, "it has become shorter")


def _results(futures: Sequence[Future[int]]) -> list[int]:
    """Of all; nothing runs any more when this returns or raises."""
    try:
        return [future.result() for future in futures]
    finally:
        for future in futures:
            future.cancel()
        wait(futures)
