"""Covering arrays: few rows in which every pair (or triple) of values of any factors occurs together.

A defect that needs two settings at once is found by a row that has both. All combinations of ten settings are a hundred
thousand rows; all pairs of them fit into a few dozen.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, product
from random import Random
from typing import Any

Row = dict[str, Any]
Tuple = tuple[tuple[str, Any], ...]
"""Values of some factors, in the order of the factors."""
_TRIES = 60
"""Rows that are made for each row that is kept."""


def tuples_of(row: Mapping[str, Any], strength: int) -> Iterator[Tuple]:
    """The combinations of ``strength`` values that a row has."""
    yield from combinations(row.items(), strength)


def covering_array(
    factors: Mapping[str, Sequence[Any]],
    valid: Callable[[Row], bool],
    strength: int,
    cost: Callable[[Row], float] = lambda row: 1.0,
    seed: int = 0,
) -> list[Row]:
    """Valid rows in which every combination of ``strength`` values occurs that any valid row has.

    The same arguments give the same rows: greedily, of some random rows that contain the rarest missing combination
    the one that has most missing ones for its ``cost``.
    """
    every = [row for values in product(*factors.values()) if valid(row := dict(zip(factors, values, strict=True)))]
    having: dict[Tuple, list[int]] = {}
    for number, row in enumerate(every):
        for found in tuples_of(row, strength):
            having.setdefault(found, []).append(number)
    missing, rows, chance = dict.fromkeys(having), list[Row](), Random(seed)

    def worth(number: int) -> float:
        return sum(one in missing for one in tuples_of(every[number], strength)) / cost(every[number])

    while missing:
        rarest = min(missing, key=lambda one: len(having[one]))
        tried = chance.sample(having[rarest], min(_TRIES, len(having[rarest])))
        best = max(tried, key=worth)
        rows.append(every[best])
        for one in tuples_of(every[best], strength):
            missing.pop(one, None)
    return rows
