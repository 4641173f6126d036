"""Parts are disjoint, cover everything and are stable; groups are summed."""

import pytest

from tests.selection import items_of_part, time_by_group

NAMES = [f"tests/engine/test_a.py::test_{number}" for number in range(400)]


def test_parts_are_disjoint_and_cover_everything() -> None:
    parts = [items_of_part(f"{number}/4", NAMES) for number in range(1, 5)]
    assert sum(map(len, parts)) == len(NAMES) and frozenset().union(*parts) == frozenset(NAMES)
    assert all(len(part) > 60 for part in parts)
    assert items_of_part("1/1", NAMES) == frozenset(NAMES)


def test_a_test_stays_in_its_part() -> None:
    assert items_of_part("2/4", NAMES[:100]) == items_of_part("2/4", NAMES) & frozenset(NAMES[:100])


@pytest.mark.parametrize("part", ["0/4", "5/4", "4", "a/b", "1/0", "-1/2"])
def test_parts_that_are_not_there(part: str) -> None:
    with pytest.raises(pytest.UsageError, match="give K/N"):
        items_of_part(part, NAMES)


def test_time_by_group() -> None:
    reports = [
        ("tests/engine/parity/test_a.py::x", 2.0, "call"),
        ("tests/engine/parity/test_a.py::x", 1.0, "setup"),
        ("tests/engine/parity/test_b.py::y", 1.0, "call"),
        ("tests/zero/test_c.py::z", 9.0, "call"),
    ]
    assert [line.split() for line in time_by_group(reports)] == [
        ["9", "s", "1", "tests", "tests/zero/test_c.py"],
        ["4", "s", "2", "tests", "tests/engine/parity"],
    ]
