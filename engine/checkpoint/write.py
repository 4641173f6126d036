"""Write a file from memory: large chunks past the page cache, forced to the disk, while the blocks are hashed.

    this thread      | write chunk 0 | write chunk 1 | ... | truncate, sync |
    another one      | hash chunk 0 | hash chunk 1 | ...

Both let go of the interpreter lock, and nothing in the memory changes meanwhile.
"""

from pathlib import Path
from threading import Thread

from engine.checkpoint.blocks import BLOCK, DEFAULT_ALGORITHM, Hashes, hash_blocks
from engine.checkpoint.files import PAGE, Files, named

CHUNK = 1 << 24
"""Bytes of one write."""


def write_file(files: Files, path: Path, memory: memoryview, size: int) -> Hashes:
    """Write the first ``size`` bytes of ``memory`` to a new file; returns the hashes of its blocks.

    ``memory`` begins at a page and, for the last write past the page cache, goes on to the end of one.

    Raises:
        OSError: names ``path``; the file may be there in part.
    """
    end = min(-(-size // PAGE) * PAGE, len(memory))
    hashes: list[Hashes] = []
    # no executor: those refuse work once the interpreter ends, which is when the last save of a run is often written
    hasher = Thread(target=lambda: hashes.append(hash_blocks(memory[:size], DEFAULT_ALGORITHM, BLOCK)), name="hashes")
    hasher.start()
    try:
        with named(path):
            _write(files, path, memory[:end], size)
    finally:
        hasher.join()
    return hashes[0]


def _write(files: Files, path: Path, memory: memoryview, size: int) -> None:
    file = files.create(path)
    try:
        for start in range(0, len(memory), CHUNK):
            files.write(file, memory[start : start + CHUNK])
        files.truncate(file, size)
        files.sync(file)
    finally:
        files.close(file)
