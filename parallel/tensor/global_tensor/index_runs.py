"""Sets of indices as runs of neighbours: an array [m, 2] of (first, last + 1), ascending, with gaps between runs.

A rank's part of a sequence of 10 M positions is one run or two, so its size, its intersections and its slices cost
nothing. Pure arithmetic.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Runs = NDArray[np.int64]


def runs_from(indices: NDArray[np.int64]) -> Runs:
    """Returns the ascending ``indices`` as runs: an array [m, 2] of (first, last + 1) of consecutive indices."""
    if not len(indices):
        return np.empty((0, 2), np.int64)
    borders = np.flatnonzero(np.diff(indices) != 1)
    return np.stack((indices[np.append(0, borders + 1)], indices[np.append(borders, -1)] + 1), 1)


def one_run(start: int, stop: int) -> Runs:
    """Returns the indices from ``start`` to ``stop`` - 1 as runs: an array [1, 2], or [0, 2] if there are none."""
    return np.array([(start, stop)] if start < stop else [], np.int64).reshape(-1, 2)


def indices_of(runs: Runs) -> NDArray[np.int64]:
    """Returns all indices in ``runs``, ascending. ``runs``: array [m, 2] of (first, last + 1)."""
    if len(runs) == 1:
        return np.arange(runs[0, 0], runs[0, 1])
    lengths = runs[:, 1] - runs[:, 0]
    first = np.repeat(runs[:, 0] - np.cumsum(lengths) + lengths, lengths)
    return first + np.arange(len(first))


def run_length(runs: Runs) -> int:
    """Returns the total number of indices in ``runs``, an array [m, 2] of (first, last + 1)."""
    return int((runs[:, 1] - runs[:, 0]).sum())


def depth(sets: list[Runs], weights: list[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Sums, for each index, the ``weights`` of the index sets ``sets`` that contain it; returns (borders, sums).

    ``sums[i]`` is the sum for the indices from ``borders[i]`` up to the next border.
    """
    points = np.concatenate([side for runs in sets for side in (runs[:, 0], runs[:, 1])])
    steps = np.concatenate(
        [np.full(len(runs), sign * w) for runs, w in zip(sets, weights, strict=True) for sign in (1, -1)]
    )
    borders, place = np.unique(points, return_inverse=True)
    changes = np.zeros(len(borders), np.int64)
    np.add.at(changes, place, steps)
    return borders, np.cumsum(changes)


def meet(a: Runs, b: Runs) -> Runs:
    """Returns the indices in both ``a`` and ``b``, as runs: an array [m, 2] of (first, last + 1)."""
    if len(a) == 1 or len(b) == 1:  # the usual case, without a sort
        one, other = (a, b) if len(a) == 1 else (b, a)
        cut = np.clip(other, one[0, 0], one[0, 1])
        return cut[cut[:, 0] < cut[:, 1]]
    if not len(a) or not len(b):
        return a[:0]
    borders, depths = depth([a, b], [1, 1])
    inside = np.flatnonzero(depths == 2)
    return join_runs(np.stack((borders[inside], borders[inside + 1]), 1))


def join_runs(runs: Runs) -> Runs:
    """Joins adjacent runs (first, last + 1), such as (0, 4) and (4, 6). ``runs`` must be sorted."""
    if len(runs) < 2:
        return runs
    apart = runs[1:, 0] != runs[:-1, 1]
    return np.stack((runs[np.append(True, apart), 0], runs[np.append(apart, True), 1]), 1)


def places_in(held: Runs, wanted: Runs) -> Runs | None:
    """Returns the positions of the indices ``wanted`` among the ascending indices ``held``, or None if one is missing.

    The arguments and the result are runs: arrays [m, 2] of (first, last + 1).
    """
    if not len(wanted):
        return wanted
    if not len(held):
        return None
    lengths = held[:, 1] - held[:, 0]
    before = np.cumsum(lengths) - lengths
    run = np.searchsorted(held[:, 0], wanted[:, 0], side="right") - 1
    if run[0] < 0 or bool((wanted[:, 1] > held[run, 1]).any()):
        return None
    return join_runs(wanted + (before[run] - held[run, 0])[:, None])


def as_slices(runs: Runs) -> list[slice]:
    """Returns a list with ``slice(first, last + 1)`` for each run in ``runs``."""
    found: Any = runs.tolist()
    return [slice(start, stop) for start, stop in found]
