"""Calls of the system that move blocks past the page cache, and the memory that they move them from and to.

A file opened with O_DIRECT takes and gives whole sectors from memory that begins on one, so that a block goes between
disk and buffer without a copy in the page cache. File systems that refuse it are written and read the usual way.
"""

import errno
import fcntl
import mmap
import os
from pathlib import Path

import numpy
import torch
from torch import Tensor

SECTOR = 4096
"""Bytes: addresses, lengths and places of direct transfers are multiples of it, on every usual disk."""
DEPTH = 8
"""Blocks under way at a time."""


def whole_sectors(size: int) -> int:
    """``size`` in bytes, rounded up to what a direct transfer can move."""
    return -(-size // SECTOR) * SECTOR


def sector_memory(size: int) -> Tensor:
    """Zeros that begin on a sector, uint8 [size]; their memory goes back to the system with the last view of them."""
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)


def begins_on_sector(block: memoryview) -> bool:
    """Whether a direct transfer can move this memory: it begins on a sector, and has whole ones."""
    address: int = numpy.frombuffer(block, numpy.uint8).__array_interface__["data"][0]
    return address % SECTOR == 0 and len(block) % SECTOR == 0


class DiskCalls:
    """The calls of the system, each as a method; a test has calls in their place that fail."""

    def open(self, path: Path) -> tuple[int, bool]:
        """(descriptor of a new file, whether transfers are direct)."""
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        try:
            return os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o600), hasattr(os, "O_DIRECT")
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return os.open(path, flags, 0o600), False

    def allocate(self, file: int, size: int) -> None:
        """Take the space on the disk."""
        os.posix_fallocate(file, 0, size)

    def read(self, file: int, into: memoryview, start: int) -> int:
        """Read at ``start``; returns the bytes read, which may be fewer."""
        return os.preadv(file, [into], start)

    def write(self, file: int, data: memoryview, start: int) -> int:
        """Write at ``start``; returns the bytes written, which may be fewer."""
        return os.pwritev(file, [data], start)

    def leave_direct(self, file: int) -> None:
        """Go through the page cache from now on."""
        fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) & ~getattr(os, "O_DIRECT", 0))
