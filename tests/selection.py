"""Parts of a run of all tests, and what its groups took."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import PurePosixPath
from typing import Any
from zlib import crc32

import pytest


def items_of_part(part: str, names: Sequence[str]) -> frozenset[str]:
    """Names of the tests in part "K/N". A test stays in its part when others are added.

    Raises:
        UsageError: no such part.
    """
    number, _, count = part.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise pytest.UsageError(f"--part {part}: give K/N with K from 1 to N, such as 2/4.")
    return frozenset(name for name in names if crc32(name.encode()) % int(count) == int(number) - 1)


def wide(*values: Any, id: str | None = None) -> Any:
    """Values of one case of a test that is tried with ``-m long`` only."""
    return pytest.param(*values, marks=pytest.mark.long, id=id)


def time_by_group(reports: Iterable[tuple[str, float, str]]) -> list[str]:
    """Lines "seconds  tests  folder", the longest first, from (name of a test, seconds, phase)."""
    seconds: dict[str, float] = defaultdict(float)
    tests: dict[str, int] = defaultdict(int)
    for name, taken, phase in reports:
        group = str(PurePosixPath(*PurePosixPath(name.partition("::")[0]).parts[:3]))
        seconds[group] += taken
        tests[group] += phase == "call"
    rows = sorted(seconds.items(), key=lambda row: -row[1])
    return [f"{taken:8.0f} s  {tests[group]:5d} tests  {group}" for group, taken in rows]
