"""A file of fixed size that is read and written as a whole, in blocks whose hashes are in memory.

    file      | block 0 | block 1 | block 2 | ...        threads take one block each: ``DEPTH`` are under way
    hashes         h0        h1        h2                of the last write

The process that wrote a block is the only one that reads it, so the hashes need no place on disk: a block that the disk
has lost, changed or kept from an older write differs from the last write. A block that fails is moved once more.

Calls of the system that move blocks past the page cache, and the memory that they move them from and to.

A file opened with O_DIRECT takes and gives whole sectors from memory that begins on one, so that a block goes between
disk and buffer without a copy in the page cache. File systems that refuse it are written and read the usual way.

Host memory for the buckets that are read, updated or written: a few pages that all buckets share.
"""

import errno
import fcntl
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, wait
from pathlib import Path

import numpy
import torch
import xxhash
from torch import Tensor

from engine.errors import EngineError

SECTOR = 4096
"""Alignment in bytes of addresses, lengths and offsets of direct I/O on usual disks."""
DEPTH = 8
"""Number of blocks in transfer at a time."""


def whole_sectors(size: int) -> int:
    """Returns ``size`` in bytes, rounded up to a multiple of the disk sector (4,096 bytes)."""
    return -(-size // SECTOR) * SECTOR


def sector_memory(size: int) -> Tensor:
    """Returns zeroed host memory, uint8 [size], for direct I/O. Its address is a multiple of the disk sector (4,096
    bytes).
    """
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)


def begins_on_sector(block: memoryview) -> bool:
    """Returns True if direct I/O can use ``block``: address and size are multiples of 4,096 bytes, a disk sector."""
    address: int = numpy.frombuffer(block, numpy.uint8).__array_interface__["data"][0]
    return address % SECTOR == 0 and len(block) % SECTOR == 0


class DiskCalls:
    """System calls on files, as methods, so that tests can replace them by failing ones."""

    def open(self, path: Path) -> tuple[int, bool]:
        """Creates the file ``path``, or empties an existing one, for reading and writing, with O_DIRECT if the file
        system supports it. Returns (descriptor, True if the I/O is direct).
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        try:
            return os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o600), hasattr(os, "O_DIRECT")
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return os.open(path, flags, 0o600), False

    def allocate(self, file: int, size: int) -> None:
        """Reserves disk space for the first ``size`` bytes of an open file."""
        os.posix_fallocate(file, 0, size)

    def read(self, file: int, into: memoryview, start: int) -> int:
        """Reads from offset ``start`` of an open file into ``into``. Returns the number of bytes read, possibly fewer
        than requested.
        """
        return os.preadv(file, [into], start)

    def write(self, file: int, data: memoryview, start: int) -> int:
        """Writes ``data`` at offset ``start`` of an open file. Returns the number of bytes written, possibly fewer than
        requested.
        """
        return os.pwritev(file, [data], start)

    def leave_direct(self, file: int) -> None:
        """Switches an open file from direct I/O to I/O through the page cache."""
        fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) & ~getattr(os, "O_DIRECT", 0))


BLOCK = 1 << 20
"""Bytes of a block, the unit of reads, writes and hashes."""


class BlocksUnderWay:
    """Handle of reads or writes of a file's blocks, which run on threads."""

    def __init__(self, futures: Sequence["Future[None]"]) -> None:
        self._futures = futures

    def joined(self, other: "BlocksUnderWay") -> "BlocksUnderWay":
        """Returns one handle for the reads and writes of this handle and of ``other``."""
        return BlocksUnderWay([*self._futures, *other._futures])

    def result(self) -> None:
        """Waits until all blocks are transferred. If some have failed, raises the error of the first one.

        Raises:
            EngineError: the disk fails, or a block differs from the last write.
        """
        wait(self._futures)
        for future in self._futures:
            future.result()


class BlockFile:
    """File of ``size`` bytes that is read and written as a whole. A hash of each block (1 MiB) is stored in memory to
    check reads.

    Raises:
        EngineError: the file cannot be made, or the disk is full.
    """

    def __init__(self, path: Path, size: int, calls: DiskCalls | None = None) -> None:
        self.path, self.size = path, size
        self._calls = calls or DiskCalls()
        self._file = -1
        self._hashes = [0] * len(range(0, size, BLOCK))
        self.direct = False
        """Transfers pass the page cache by."""
        try:
            self._file, self.direct = self._calls.open(path)
            if size:
                self._calls.allocate(self._file, whole_sectors(size) if self.direct else size)
        except OSError as error:
            self.close()
            raise _failure("made", path, error) from error

    def start_write(self, data: memoryview, threads: Executor) -> BlocksUnderWay:
        """Starts to write the whole file from ``data`` on ``threads``, and returns a handle. ``data`` must not change
        before the handle's ``result`` returns or raises.
        """
        jobs = self._blocks(data)
        return BlocksUnderWay([threads.submit(self._write_block, number, block) for number, block in jobs])

    def start_read(self, into: memoryview, threads: Executor, checked: bool = True) -> BlocksUnderWay:
        """Starts to read the whole file into the memory ``into`` on ``threads``, and returns a handle. ``checked``:
        True to check, by hashes, that each block is as last written.
        """
        jobs = self._blocks(into)
        return BlocksUnderWay([threads.submit(self._read_block, number, block, checked) for number, block in jobs])

    def close(self) -> None:
        """Closes and deletes the file. A second call does nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
            self.path.unlink(missing_ok=True)

    def _blocks(self, memory: memoryview) -> Iterator[tuple[int, memoryview]]:
        for number, start in enumerate(range(0, self.size, BLOCK)):
            yield number, memory[start : min(start + BLOCK, self.size)]

    def _write_block(self, number: int, block: memoryview) -> None:
        digest = xxhash.xxh3_64_intdigest(block)
        try:
            self._twice(lambda: self._transfer(self._calls.write, block, number * BLOCK))
        except OSError as error:
            raise _failure("written", self.path, error) from error
        self._hashes[number] = digest

    def _read_block(self, number: int, block: memoryview, checked: bool) -> None:
        start = number * BLOCK

        def read() -> None:
            self._transfer(self._calls.read, block, start)
            if checked and xxhash.xxh3_64_intdigest(block) != self._hashes[number]:
                raise EngineError(
                    f"optimizer state on disk: bytes {start} to {start + len(block)} of {self.path} differ from the "
                    "bytes last written there, so no update uses them; check the disk and resume from the last "
                    "checkpoint."
                )

        try:
            self._twice(read)
        except OSError as error:
            raise _failure("read", self.path, error) from error

    def _twice(self, move: Callable[[], None]) -> None:
        """Moves a block, and once more if that fails, because a fault of the disk or its connection may pass."""
        try:
            move()
        except (OSError, EngineError) as error:
            if self.direct and getattr(error, "errno", None) == errno.EINVAL:
                self._calls.leave_direct(self._file)  # some file systems refuse with the first transfer only
                self.direct = False
            move()

    def _transfer(self, call: Callable[[int, memoryview, int], int], block: memoryview, start: int) -> None:
        """Reads or writes a block at ``start``, in as many calls as the system needs."""
        if not self.direct or begins_on_sector(block):
            self._call_until_done(call, block, start)
            return
        with mmap.mmap(-1, whole_sectors(len(block))) as sectors, memoryview(sectors) as whole:
            whole[: len(block)] = block
            self._call_until_done(call, whole, start)
            if call == self._calls.read:
                block[:] = whole[: len(block)]

    def _call_until_done(self, call: Callable[[int, memoryview, int], int], block: memoryview, start: int) -> None:
        done = 0
        while done < len(block):
            count = call(self._file, block[done:], start + done)
            # a direct transfer that ends inside a sector begins again with that sector
            whole = count if done + count == len(block) or not self.direct else count - count % SECTOR
            if whole <= 0:
                raise OSError(f"it ends after {start + done + count} of {self.size} bytes")
            done += whole


def _failure(what: str, path: Path, error: OSError) -> EngineError:
    return EngineError(
        f"optimizer state on disk: {path} cannot be {what} ({error.strerror or error}); check the disk and free the "
        "space, or give another folder in zero_optimization.offload_optimizer.nvme_path."
    )


class MomentBuffers:
    """Pool of ``count`` host memory buffers (pages) of ``size`` bytes. An update reads moments from disk into a page,
    and later writes the page back.
    """

    def __init__(self, count: int, size: int) -> None:
        self.size = size
        self._pages = [sector_memory(size) for _ in range(count)]
        self._free = list(self._pages)
        self._busy: deque[tuple[Tensor, BlocksUnderWay]] = deque()

    @property
    def spare(self) -> bool:
        """True if ``take`` can return a page, at once or after it has waited for the write of a page in use."""
        return bool(self._free or self._busy)

    def take(self) -> Tensor:
        """Returns a free page, uint8 [size]. If none is free, waits for the oldest write; raises if it failed."""
        if not self._free:
            page, write = self._busy.popleft()
            write.result()
            return page
        return self._free.pop()

    def give_back(self, page: Tensor, write: BlocksUnderWay) -> None:
        """Returns ``page`` to the pool. The page becomes free when ``write`` has ended."""
        self._busy.append((page, write))

    def free_all(self) -> None:
        """Marks all pages as free. Call it only after all reads and writes have ended."""
        self._busy.clear()
        self._free = list(self._pages)
