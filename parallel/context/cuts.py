"""Positions of a sequence on each context rank. Pure arithmetic.

zigzag        0 0 1 1 2 2 | 2 2 1 1 0 0    chunks r and 2n-1-r of 2n: equal work under a causal mask
contiguous    0 0 0 1 1 1 2 2 2            blocks in rank order
"""

import numpy as np

from engine.parallel.tensor.global_tensor.index_sets import Index


def zigzag(length: int, ranks: int, unit: int = 1) -> Index:
    """Returns the zig-zag sharding of ``length`` positions; chunks are multiples of ``unit``, and differ by at most
    one unit.
    """
    borders = [unit * (length // unit * chunk // (2 * ranks)) for chunk in range(2 * ranks)]
    chunks = np.split(np.arange(length), borders[1:])
    return Index([np.concatenate([chunks[rank], chunks[2 * ranks - 1 - rank]]) for rank in range(ranks)], length)


def contiguous(length: int, ranks: int) -> Index:
    """Returns blocks of ``length`` positions in rank order, which differ by at most one position."""
    return Index(np.array_split(np.arange(length), ranks), length)


def position_runs(positions: np.ndarray) -> list[tuple[int, int]]:
    """Lists the runs of neighbouring positions as (first index, last index + 1) into ``positions``, ascending."""
    borders = np.flatnonzero(np.diff(positions) != 1) + 1
    ends = [*borders.tolist(), len(positions)]
    return [(start, stop) for start, stop in zip([0, *ends[:-1]], ends, strict=True) if start < stop]
