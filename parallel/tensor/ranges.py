"""Which rows of a cut dim each tensor rank holds. Pure arithmetic.

8 heads over 4 ranks      0 0 1 1 2 2 3 3
2 kv heads over 4 ranks   0,1     2,3              each head is held by several ranks
fused thirds over 2       0 1 | 0 1 | 0 1          each rank holds a piece of every third
5 rows over 2 ranks       0 0 0 1 1                vocabularies only: the first ranks hold one more
"""

from engine.parallel.shards import Range


def cut_parts(size: int, tp: int, parts: int = 1, unit: int = 1) -> tuple[Range, ...]:
    """``size`` rows as ``parts`` equal parts, each cut evenly by whole ``unit``s (heads).

    Where there are fewer units than ranks, each is held by several consecutive ranks. The caller has checked
    that the numbers divide.
    """
    width = size // parts
    units = width // unit
    pieces, holders = max(units // tp, 1) * unit, max(tp // units, 1)
    return tuple(
        Range(start, start + pieces, tuple(range(index * holders, (index + 1) * holders)))
        for part in range(parts)
        for index, start in enumerate(range(part * width, (part + 1) * width, pieces))
    )


def cut_unevenly(size: int, tp: int) -> tuple[Range, ...]:
    """``size`` rows in contiguous pieces, one for each rank; the first ``size % tp`` hold one more."""
    small, more = divmod(size, tp)
    starts = [rank * small + min(rank, more) for rank in range(tp + 1)]
    return tuple(Range(starts[rank], starts[rank + 1], (rank,)) for rank in range(tp))


def held(ranges: tuple[Range, ...], index: int) -> int:
    """Rows that rank ``index`` holds."""
    return sum(part.stop - part.start for part in ranges if index in part.holders)
