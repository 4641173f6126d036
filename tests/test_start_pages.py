"""The script of docs/start/your_model.md prints what the page says, on every grid; the drawings are current."""

import json
import re
import runpy
import sys
from pathlib import Path

import pytest

from tests.launches import Launch
from tests.selection import wide
from tests.test_examples import QUIET, ROOT, run_as_rank

PAGE = (ROOT / "docs/start/your_model.md").read_text(encoding="utf-8")
GRIDS = {
    "tp2": {"parallel": {"tensor": 2}},
    "pp2": {"parallel": {"pipeline": 2}},
    "zero3": {"zero_optimization": {"stage": 3}},
}
LINE = r"^step (\d+) loss ([\d.]+) norm ([\d.]+)$"


def losses(text: str) -> dict[int, tuple[float, float]]:
    """Return step -> loss and norm."""
    return {int(step): (float(loss), float(norm)) for step, loss, norm in re.findall(LINE, text, re.MULTILINE)}


@pytest.mark.parametrize("grid", ["tp2", wide("zero3"), wide("pp2")])
def test_the_script_prints_the_losses_of_the_page_on_every_grid(grid: str, tmp_path: Path) -> None:
    (script,) = re.findall(r"<!-- script -->\n```python\n(.*?)```", PAGE, re.DOTALL)
    (given,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    config = json.loads(given)
    assert config.pop("parallel") == GRIDS["tp2"]["parallel"]
    (tmp_path / "mine.py").write_text(script)
    (tmp_path / f"{grid}.json").write_text(json.dumps(config | GRIDS[grid]))
    with Launch(run_as_rank, 2, "mine.py", [f"{grid}.json"], str(tmp_path), env=QUIET) as job:
        first, second = job.end(120)
    assert (first.code, second.code) == (0, 0), first.error or second.error
    printed, shown = losses(first.said[0]), losses(PAGE)
    assert list(printed) == list(shown) == [10, 20, 30, 40] and not second.said[0]
    for step, found in printed.items():
        assert found == pytest.approx(shown[step], rel=1e-3, abs=2e-5)
    assert (tmp_path / "runs/mine/step-00000040/COMMIT").exists()


def test_drawings_are_those_that_their_script_makes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = ROOT / "docs/drawings"
    monkeypatch.setattr(sys, "path", list(sys.path))
    drawings = runpy.run_path(str(folder / "draw.py"))["DRAWINGS"]
    names = [draw.__name__ for draw in drawings]
    measured = {"timeline", "two_schedules"}  # written with the figures of ``benchmarks`` and of a test
    assert sorted({*names, *measured}) == sorted(file.stem for file in folder.glob("*.svg"))
    for draw, name in zip(drawings, names, strict=True):
        draw().save(tmp_path / f"{name}.svg")
        made, kept = (place.joinpath(f"{name}.svg").read_text(encoding="utf-8") for place in (tmp_path, folder))
        assert made == kept, f"python docs/drawings/draw.py writes another {name}.svg"


def test_every_drawing_is_shown_by_a_page() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").rglob("*.md"))
    assert all(f"drawings/{file.name})" in text for file in (ROOT / "docs/drawings").glob("*.svg"))
