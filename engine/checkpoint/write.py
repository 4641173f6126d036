"""Write a file from memory: large chunks past the page cache, forced to the disk, while the blocks are hashed.

    this thread      | write chunk 0 | write chunk 1 | ... | truncate, sync |
    another one      | hash chunk 0 | hash chunk 1 | ...

Both let go of the interpreter lock, and nothing in the memory changes meanwhile.
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from engine.checkpoint.blocks import BLOCK, DEFAULT_ALGORITHM, Hashes, hash_blocks
from engine.checkpoint.files import PAGE, Files

CHUNK = 1 << 24
"""Bytes of one write."""


def write_file(files: Files, path: Path, memory: memoryview, size: int) -> Hashes:
    """Write the first ``size`` bytes of ``memory`` to a new file; returns the hashes of its blocks.

    ``memory`` begins at a page and, for the last write past the page cache, goes on to the end of one.

    Raises:
        OSError: names ``path``; the file may be there in part.
    """
    end = min(-(-size // PAGE) * PAGE, len(memory))
    with ThreadPoolExecutor(1, "hashes") as hasher:
        hashes = hasher.submit(hash_blocks, memory[:size], DEFAULT_ALGORITHM, BLOCK)
        try:
            file = files.create(path)
            try:
                for start in range(0, size, CHUNK):
                    files.write(file, memory[start : min(start + CHUNK, end)])
                files.truncate(file, size)
                files.sync(file)
            finally:
                files.close(file)
        except OSError as error:
            error.filename = error.filename or str(path)
            raise
        return hashes.result()
