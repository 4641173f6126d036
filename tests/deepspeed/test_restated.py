"""What DeepSpeed's own tests describe, on the door: each small program gives what the real DeepSpeed has given."""

import json
from pathlib import Path
from typing import Any

import pytest

import engine.deepspeed as deepspeed
from tests.deepspeed.record import RECORD
from tests.deepspeed.restated import CASES


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


def test_every_program_is_recorded(recorded: dict[str, list[Any]]) -> None:
    assert recorded.keys() == CASES.keys() and len(CASES) >= 40
