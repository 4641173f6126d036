"""Ranges of rows of a sharded dim on each tensor rank, and the error for sizes that do not divide.

    8 heads over 4 ranks      0 0 1 1 2 2 3 3
    2 kv heads over 4 ranks   0,1     2,3              each head is on several ranks
    fused thirds over 2       0 1 | 0 1 | 0 1          each rank has a slice of every third
    5 rows over 2 ranks       0 0 0 1 1                vocabularies only: the first ranks have one row more

Pure arithmetic. A size is divided evenly among the ranks, in whole heads; the error for other sizes lists the tensor
sizes that fit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import itemgetter

from engine.errors import PlanError
from engine.parallel.shard_table import Range


@dataclass(frozen=True, slots=True)
class Divisibility:
    """Divisibility condition between the number of tensor ranks and a size of the model, such as a number of heads.
    ``count``: the size; ``owner`` and ``noun``: names of its module and of the size in error texts.
    """

    owner: str
    noun: str
    count: int
    rule: str = "divide"
    """Rule: "divide": equal shares; "share": equal shares, or several ranks per unit; "rows": at least one row per
    rank.
    """

    def allows(self, tp: int) -> bool:
        """Returns True if this size suits ``tp`` tensor ranks."""
        if self.rule == "rows":
            return self.count >= tp
        return self.count % tp == 0 or (self.rule == "share" and tp % self.count == 0)

    def complaint(self, tp: int) -> str:
        """Returns the clause of an error text that explains why this size does not suit ``tp`` tensor ranks."""
        verb = {"divide": "does not divide", "share": "neither divides nor is a multiple of", "rows": "is more than"}
        return f"tensor = {tp} {verb[self.rule]} the {self.count} {self.noun} of {self.owner}"


def check_fits(fits: Sequence[Divisibility], tp: int) -> None:
    """Checks that ``tp`` tensor ranks suit every size in ``fits``, such as a number of heads.

    Raises:
        PlanError: the message names the first size that they do not suit, and every number of ranks, up to the
            largest size, that suits all sizes.
    """
    wrong = next((fit for fit in fits if not fit.allows(tp)), None)
    if wrong is None:
        return
    largest = max(fit.count for fit in fits)
    sizes = [size for size in range(1, largest + 1) if all(fit.allows(size) for fit in fits)]
    listed = ", ".join(str(size) for size in sizes)
    raise PlanError(f"{wrong.complaint(tp)}; choose a size that fits the whole model: {listed}.")


def cut_parts(size: int, tp: int, parts: int = 1, unit: int = 1) -> tuple[Range, ...]:
    """Divides ``size`` rows among ``tp`` ranks. Returns contiguous ranges of rows, each with the ranks that store it.

    Each of ``parts`` equal parts (3 for fused q, k and v) is divided evenly, in units of ``unit`` rows, such as heads.
    With fewer units than ranks, consecutive ranks share a unit.
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
    """Divides ``size`` rows into contiguous ranges, one for each of ``tp`` ranks. The first ``size % tp`` ranks get one
    row more.
    """
    small, more = divmod(size, tp)
    starts = [rank * small + min(rank, more) for rank in range(tp + 1)]
    return tuple(Range(starts[rank], starts[rank + 1], (rank,)) for rank in range(tp))


def held(ranges: tuple[Range, ...], index: int) -> int:
    """Returns the number of rows that tensor rank ``index`` stores. ``ranges``: all ranges of rows with their ranks."""
    return sum(part.stop - part.start for part in ranges if index in part.holders)


def ranges_of_runs(runs: Sequence[Sequence[tuple[int, int]]]) -> tuple[Range, ...]:
    """Divides the rows of a dim into ranges, each with the ranks that store it.

    ``runs``: for each rank, the intervals [start, stop) of rows that it stores; intervals of different ranks may
    overlap.
    """
    edges = [
        (row, rank, step)
        for rank, own in enumerate(runs)
        for run in own
        for row, step in zip(run, (1, -1), strict=True)
    ]
    depth, found = [0] * len(runs), list[tuple[int, tuple[int, ...]]]()
    for row, changed in groupby(sorted(edges), key=itemgetter(0)):
        for _, rank, step in changed:
            depth[rank] += step
        holders = tuple(rank for rank, open_runs in enumerate(depth) if open_runs)
        if not found or found[-1][1] != holders:
            found.append((row, holders))
    return tuple(Range(start, stop, holders) for (start, holders), (stop, _) in pairwise(found))


def runs_of(ranges: Sequence[Range], tp: int) -> list[list[tuple[int, int]]]:
    """Converts ``ranges``, each with its ranks, to a list of row intervals [start, stop) for each of ``tp`` ranks.
    Adjacent intervals are joined.

    This is the inverse of :func:`ranges_of_runs`.
    """
    found: list[list[tuple[int, int]]] = [[] for _ in range(tp)]
    for part in sorted(ranges, key=lambda part: part.start):
        for holder in part.holders:
            runs = found[holder]
            if runs and runs[-1][1] == part.start:
                runs[-1] = runs[-1][0], part.stop
            else:
                runs.append((part.start, part.stop))
    return found


def rows_of_rank(ranges: Sequence[Range], index: int) -> list[int]:
    """Returns the indices of all rows that rank ``index`` stores, ascending. ``ranges``: all ranges of rows, with their
    ranks.
    """
    return [row for part in ranges if index in part.holders for row in range(part.start, part.stop)]
