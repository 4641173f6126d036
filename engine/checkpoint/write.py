"""Write a file from memory: hash the blocks, write large chunks past the page cache, force them to the disk."""

from pathlib import Path

import numpy as np

from engine.checkpoint.blocks import BLOCK, DEFAULT_ALGORITHM, Hashes, hash_blocks
from engine.checkpoint.files import PAGE, Files, named

CHUNK = 1 << 24
"""Bytes of one write; a multiple of the block."""


def write_file(files: Files, path: Path, memory: memoryview, size: int) -> Hashes:
    """Write the first ``size`` bytes of ``memory`` to a new file; returns the hashes of its blocks.

    ``memory`` begins at a page and, for the last write past the page cache, goes on to the end of one.

    Raises:
        OSError: names ``path``; the file may be there in part.
    """
    hashes = []
    end = min(-(-size // PAGE) * PAGE, len(memory))
    with named(path):
        file = files.create(path)
        try:
            for start in range(0, size, CHUNK):
                hashes.append(hash_blocks(memory[start : min(start + CHUNK, size)], DEFAULT_ALGORITHM, BLOCK))
                files.write(file, memory[start : min(start + CHUNK, end)])
            files.truncate(file, size)
            files.sync(file)
        finally:
            files.close(file)
    return np.concatenate([np.zeros(0, dtype=np.uint64), *hashes])
