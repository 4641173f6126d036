"""Every pair or triple that can occur does, and nothing that is not valid."""

from itertools import combinations, product
from typing import Any

import pytest

from tests.covering import covering_array, tuples_of

FACTORS: dict[str, list[Any]] = {"a": [1, 2, 3], "b": [1, 2], "c": ["x", "y", "z"], "d": [False, True]}


def valid(row: dict[str, Any]) -> bool:
    return not (row["a"] == 3 and row["d"]) and (row["b"] == 2 or row["c"] != "z")


@pytest.mark.parametrize("strength", [1, 2, 3])
def test_every_combination_that_can_occur_occurs(strength: int) -> None:
    rows = covering_array(FACTORS, valid, strength)
    every = [dict(zip(FACTORS, values, strict=True)) for values in product(*FACTORS.values())]
    wanted = {one for row in every if valid(row) for one in tuples_of(row, strength)}
    assert {one for row in rows for one in tuples_of(row, strength)} == wanted
    assert all(map(valid, rows)) and len(rows) < len(every)
    assert all(one != other for one, other in combinations(rows, 2))


def test_the_rows_are_the_same_every_time() -> None:
    assert covering_array(FACTORS, valid, 2) == covering_array(FACTORS, valid, 2)
