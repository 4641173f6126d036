"""Cuts a row of costs into stages so that the largest stage is smallest."""

from collections.abc import Sequence
from itertools import accumulate


def balance(cost: Sequence[float], edges: Sequence[int], stages: int) -> list[int]:
    """Where stages 1 to ``stages`` - 1 start, each at one of ``edges``; the earliest of equally good cuts.

    ``edges`` ascend, without 0, and there are at least ``stages`` - 1.
    """
    before = [0, *accumulate(cost)]
    ends = [0, *edges, len(cost)]
    # best[j]: the smallest possible largest stage of what lies before ends[j], and the starts that give it
    best: list[tuple[float, list[int]] | None] = [(0, []), *[None] * (len(ends) - 1)]
    for _ in range(stages):
        best = [None, *(_extend(best, before, ends, j) for j in range(1, len(ends)))]
    found = best[-1]
    assert found is not None  # there are enough edges
    return found[1][:-1]


def _extend(
    best: Sequence[tuple[float, list[int]] | None], before: Sequence[float], ends: Sequence[int], j: int
) -> tuple[float, list[int]] | None:
    options = [
        (max(known[0], before[ends[j]] - before[ends[i]]), [*known[1], ends[j]])
        for i, known in enumerate(best[:j])
        if known is not None
    ]
    return min(options, default=None)
