"""On which rank each stage lies: the three placements of the built kinds, and how microbatches pass a loop.

    line    one stage a rank                     0  1  2
    loop    stage s on rank s % p                0  1  2     3  4  5
    v       there and back again                 0  1  2     5  4  3

In a line and in a loop every stage sends to the next rank, in a loop the last rank to the first. In a V the
last rank hands over to itself, and the loss is computed on rank 0, where the batch comes in.
"""

from itertools import pairwise

Placement = tuple[tuple[int, ...], ...]
"""The stages of each rank, ascending."""


def loop(ranks: int, virtual_stages: int) -> Placement:
    """Stage s on rank s % ``ranks``; a line, where each rank holds one stage."""
    return tuple(tuple(range(rank, ranks * virtual_stages, ranks)) for rank in range(ranks))


def v_shape(ranks: int) -> Placement:
    """Stages r and 2p-1-r on rank r (Qi et al. 2024, Pipeline Parallelism with Controllable Memory)."""
    return tuple((rank, 2 * ranks - 1 - rank) for rank in range(ranks))


def rounds(ranks: int, microbatches: int) -> list[range]:
    """The microbatches that go around a loop together, before the next ones enter.

    A round of fewer than p leaves gaps, for its first comes back to rank 0 after p clocks; each more than p
    costs memory. So there are m // p of them, as even as they can be: at least p in each where m allows it.
    """
    count = max(1, microbatches // ranks)
    starts = [-(-microbatches * index // count) for index in range(count + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]
