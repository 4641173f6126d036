"""What DeepSpeed's own tests describe, on the door: each small program gives what the real DeepSpeed has given."""

import json
import re
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

import engine.deepspeed as deepspeed
from tests.deepspeed.record import RECORD
from tests.deepspeed.restated import CASES
from tests.structure import ROOT


@pytest.fixture(scope="module")
def recorded() -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = json.loads(RECORD.read_text(encoding="utf-8"))["restated"]
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_program_gives_what_deepspeed_gives(name: str, recorded: dict[str, list[Any]], tmp_path: Path) -> None:
    found, expected = json.loads(json.dumps(CASES[name](deepspeed))), recorded[name]
    assert len(found) == len(expected)
    for own, other in zip(found, expected, strict=True):
        both = isinstance(own, float) or isinstance(other, float)
        assert own == (pytest.approx(other, rel=1e-5, abs=1e-8) if both and None not in (own, other) else other)


def test_the_page_about_deepspeeds_tests_names_every_program_once() -> None:
    page = (ROOT / "docs/reference/deepspeed_tests.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| ") and "tests/unit" not in line]
    patterns = re.findall(r"`([^`]+)`", "".join(rows))
    assert [name for name in CASES if sum(fnmatch(name, pattern) for pattern in patterns) != 1] == []
    assert [pattern for pattern in patterns if not any(fnmatch(name, pattern) for name in CASES)] == []
    numbers = [[int(cell.strip(" *")) for cell in row.split("|")[2:6]] for row in rows]
    assert [sum(column) for column in zip(*numbers[:-1], strict=True)] == numbers[-1]


def test_every_program_is_recorded(recorded: dict[str, list[Any]]) -> None:
    assert recorded.keys() == CASES.keys() and len(CASES) >= 40
