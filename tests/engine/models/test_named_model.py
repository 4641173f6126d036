"""Models by their name on a command line: the import of a user's module."""

import sys
from pathlib import Path

import pytest

from engine.errors import PlanError
from engine.models.named_model import build_named, find_function

PARSES = """
import argparse, sys
parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, {})
width = parser.parse_args().width
def build():
    return width, parser.parse_args().width, sys.argv
"""


def test_a_script_that_parses_arguments_sees_none_of_the_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "parses_by_default.py").write_text(PARSES.format("default=8"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "argv", line := ["trine", "plan", "parses_by_default:build", "--world", "2"])
    assert find_function("parses_by_default:build")() == (8, 8, ["parses_by_default.py"])
    assert sys.argv is line


def test_a_script_that_ends_while_it_is_imported_is_refused_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "parses_a_must.py").write_text(PARSES.format("required=True"))
    (tmp_path / "raises_at_import.py").write_text("raise ValueError('no data here')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(PlanError, match=r"parses_a_must:build cannot be imported \(SystemExit: 2\); parse arguments"):
        find_function("parses_a_must:build")
    with pytest.raises(PlanError, match=r"raises_at_import:build cannot be imported \(ValueError: no data here\)"):
        find_function("raises_at_import:build")


def test_a_function_that_ends_the_process_is_refused_in_a_sentence() -> None:
    with pytest.raises(PlanError, match=r"MODEL mine:build cannot be built \(SystemExit: 3\)"):
        build_named("mine:build", lambda: sys.exit(3))
