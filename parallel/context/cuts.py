"""Positions of a sequence on each context rank. Pure arithmetic.

zigzag        0 0 1 1 2 2 | 2 2 1 1 0 0    chunks r and 2n-1-r of 2n: equal work under a causal mask
contiguous    0 0 0 1 1 1 2 2 2            blocks in rank order
"""

from itertools import pairwise

import numpy as np

from engine.parallel.tensor.global_tensor.index_runs import join_runs, one_run
from engine.parallel.tensor.global_tensor.index_sets import Index


def zigzag(length: int, ranks: int, unit: int = 1) -> Index:
    """Returns the zig-zag sharding of ``length`` positions: rank r of n ranks stores the chunks r and 2n-1-r of 2n
    chunks.

    Chunks are multiples of ``unit`` and differ by at most one ``unit``; ``length`` must be a multiple of it.
    """
    chunks = [one_run(unit * start, unit * stop) for start, stop in evenly(length // unit, 2 * ranks)]
    pairs = ((chunks[rank], chunks[2 * ranks - 1 - rank]) for rank in range(ranks))
    return Index.of_runs((join_runs(np.concatenate(pair)) for pair in pairs), length)


def contiguous(length: int, ranks: int, unit: int = 1) -> Index:
    """Returns the sharding of ``length`` positions over ``ranks`` ranks in contiguous blocks, in rank order.

    Blocks are multiples of ``unit`` and differ by at most one ``unit``; ``length`` must be a multiple of it.
    """
    ends = evenly(length // unit, ranks)
    return Index.of_runs((one_run(unit * start, unit * stop) for start, stop in ends), length)


def evenly(length: int, parts: int) -> list[tuple[int, int]]:
    """Divides ``length`` positions into ``parts`` contiguous runs; returns (start, stop) of each.

    Sizes differ by at most one; longer runs come first.
    """
    size, more = divmod(length, parts)
    starts = [size * part + min(part, more) for part in range(parts + 1)]
    return list(pairwise(starts))
