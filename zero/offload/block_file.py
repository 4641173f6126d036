"""A file of one size that is written and read as a whole, in blocks whose hashes stay in memory.

The process that wrote a block is the only one that reads it, so the hashes need no place on disk: a block that the disk
has lost, changed or kept from an older write differs from what was written last.
"""

import os
from pathlib import Path

import xxhash

from engine.errors import EngineError

BLOCK = 1 << 20
"""Bytes of a block: read, written and hashed at once."""


class BlockFile:
    """One file of ``size`` bytes, whose space is taken when it is made."""

    def __init__(self, path: Path, size: int) -> None:
        self.path, self.size = path, size
        self._hashes: list[int] = []
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            if size:
                os.posix_fallocate(self._file, 0, size)
        except OSError as error:
            raise _failure("made", path, error) from error

    def write(self, data: memoryview) -> None:
        """Write all of the file.

        Raises:
            EngineError: the disk is full or refuses.
        """
        hashes = []
        for start in range(0, self.size, BLOCK):
            block = data[start : min(start + BLOCK, self.size)]
            hashes.append(xxhash.xxh3_64_intdigest(block))
            try:
                written = 0
                while written < len(block):
                    written += os.pwrite(self._file, block[written:], start + written)
            except OSError as error:
                raise _failure("written", self.path, error) from error
        self._hashes = hashes

    def read(self, into: memoryview, checked: bool = True) -> None:
        """Read all of the file.

        ``checked``: the file has to hold what ``write`` wrote last; else somebody has written to it by other ways.

        Raises:
            EngineError: the disk refuses, the file ends early, or a block is not the one that was written last.
        """
        for number, start in enumerate(range(0, self.size, BLOCK)):
            block = into[start : min(start + BLOCK, self.size)]
            try:
                have = 0
                while have < len(block):
                    count = os.preadv(self._file, [block[have:]], start + have)
                    if not count:
                        raise OSError(f"it ends after {start + have} of {self.size} bytes")
                    have += count
            except OSError as error:
                raise _failure("read", self.path, error) from error
            if checked and xxhash.xxh3_64_intdigest(block) != self._hashes[number]:
                raise EngineError(
                    f"optimizer state on disk: bytes {start} to {start + len(block)} of {self.path} are not what was "
                    "written there last, so no update is made of them; check the disk and resume from the last "
                    "checkpoint."
                )

    def close(self) -> None:
        """Close and delete the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
            self.path.unlink(missing_ok=True)


def _failure(what: str, path: Path, error: OSError) -> EngineError:
    return EngineError(
        f"optimizer state on disk: {path} cannot be {what} ({error.strerror or error}); free the space or give another "
        "folder in zero_optimization.offload_optimizer.nvme_path, and resume from the last checkpoint."
    )
