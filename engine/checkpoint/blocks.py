"""Hashes of the blocks of a file.

A flipped bit in a tensor loads without a word in every common format. Here each block of a file has a 64-bit hash,
checked whenever a part of the block is read. Hashing releases the interpreter lock.
"""

import zlib
from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

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
