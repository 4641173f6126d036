"""Disks that fail: the calls of the system for some files of a process, in which something goes wrong."""

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engine.zero.offload.block_file import SECTOR, DiskCalls

Transfer = Callable[[int, memoryview, int], int]
"""Makes one transfer: file, memory, place."""
FOREVER = 10**9


def name_of(file: int) -> str:
    return Path(os.readlink(f"/proc/self/fd/{file}")).name


def refusing(code: int) -> Callable[[Transfer], Transfer]:
    """The call fails with this error."""

    def refuse(_: Transfer) -> Transfer:
        def call(*_: object) -> int:
            raise OSError(code, os.strerror(code))

        return call

    return refuse


def short(transfer: Transfer) -> Transfer:
    """The call moves a sector of two, and of more one and a bit, as it says."""

    def call(file: int, memory: memoryview, start: int) -> int:
        if len(memory) <= 2 * SECTOR:
            return transfer(file, memory[:SECTOR], start)
        return min(transfer(file, memory[: 2 * SECTOR], start), SECTOR + 100)

    return call


def torn(transfer: Transfer) -> Transfer:
    """The call moves the first half, and says that it has moved all."""

    def call(file: int, memory: memoryview, start: int) -> int:
        transfer(file, memory[: len(memory) // 2 // SECTOR * SECTOR], start)
        return len(memory)

    return call


def garbled(transfer: Transfer) -> Transfer:
    """The call gives back other bytes than the disk has."""

    def call(file: int, memory: memoryview, start: int) -> int:
        count = transfer(file, memory, start)
        memory[0] ^= 1
        return count

    return call


EIO, ENOSPC = refusing(errno.EIO), refusing(errno.ENOSPC)


@contextmanager
def failing(call: str, fault: Callable[[Transfer], Transfer], file: str, times: int = FOREVER) -> Iterator[list[str]]:
    """Let the first ``times`` calls of a kind ("read" or "write") go wrong for files whose names begin with ``file``.

    Yields the names of the files for which it went wrong.
    """
    met: list[str] = []
    sound = getattr(DiskCalls, call)

    def instead(self: DiskCalls, number: int, memory: memoryview, start: int) -> int:
        def transfer(*given: object) -> int:
            count: int = sound(self, *given)
            return count

        name = name_of(number)
        if not name.startswith(file) or len(met) >= times:
            return transfer(number, memory, start)
        met.append(name)
        return fault(transfer)(number, memory, start)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DiskCalls, call, instead)
        yield met
