"""The script of docs/guides/data.md runs as it stands there, goes on where it was stopped, and on other grids."""

import contextlib
import io
import os
import re
import runpy
from pathlib import Path

import pytest

from tests.launches import Launch, Line

PAGE = Path(__file__).parents[3] / "docs/guides/data.md"
EXACT = 1e-3
"""Of losses that are printed with four digits."""


def script() -> str:
    (found,) = re.findall(r"<!-- script -->\n```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return str(found)


def run(file: Path) -> list[str]:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        runpy.run_path(str(file), run_name="__main__")
    return said.getvalue().splitlines()


def losses(lines: list[str]) -> dict[int, float]:
    found = [re.fullmatch(r"step (\d+) loss (\d+\.\d{4})", line) for line in lines]
    return {int(match[1]): float(match[2]) for match in found if match}


def run_as_rank(line: Line, file: str, folder: str) -> None:
    os.chdir(folder)
    line(run(Path(file)))


def test_the_script_runs_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "pack.py"
    file.write_text(script(), encoding="utf-8")
    lines = run(file)
    whole = losses(lines)
    assert len(whole) == len(lines) > 10 and whole[len(whole)] < whole[1]
    again = run(file)
    assert again and again == lines[-len(again) :], "from the newest checkpoint to the end"


@pytest.mark.long
def test_the_script_runs_on_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "pack.py"
    file.write_text(script(), encoding="utf-8")
    expected = losses(run(file))
    (tmp_path / "two").mkdir()
    with Launch(run_as_rank, 2, str(file), str(tmp_path / "two")) as job:
        ended = job.end(120)
    assert [end.code for end in ended] == [0, 0], "\n".join(end.error for end in ended)
    assert losses(ended[0].said[0]) == pytest.approx(expected, rel=EXACT) and not ended[1].said[0]
