"""Figures of the documents: kept as JSON, merged by cell, shown in every page that has their section."""

import platform
from pathlib import Path

import pytest

from benchmarks.harness import figures
from benchmarks.harness.figures import (
    ROOT,
    UNKNOWN,
    origin,
    read,
    record_cells,
    record_text,
    section,
    sections,
    with_whole_figures,
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("a\n<!-- x:begin -->\nold\n<!-- x:end -->\nb\n")
    (tmp_path / "docs" / "page.md").write_text("<!-- table:begin -->\n<!-- table:end -->\n")
    return tmp_path


def test_a_text_is_kept_and_shown(root: Path) -> None:
    record_text("x", "new", root)
    assert (root / "README.md").read_text().startswith("a\n<!-- x:begin -->\nnew\n\n*`")
    assert (root / "README.md").read_text().endswith(".*\n<!-- x:end -->\nb\n")
    kept = read("x", root)
    assert kept["text"] == "new" and {"command", "commit", "date", "machine", "versions"} <= kept.keys()


def test_the_command_of_a_module_is_its_name(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", [str(ROOT / "tests" / "faults" / "__main__.py"), "--jobs", "2"])
    record_text("x", "new", root)
    assert read("x", root)["command"] == "python -m tests.faults --jobs 2"


def test_cells_that_were_not_tried_again_stay(root: Path) -> None:
    record_cells("table", "model", {("a", "dp"): "1", ("b", "dp"): "2"}, root)
    record_cells("table", "model", {("b", "dp"): "3", ("c", "tp"): "4"}, root)
    ((name, _, text),) = sections((root / "docs" / "page.md").read_text())
    assert name == "table"
    assert text.partition("\n\n*")[0] == "| model | dp | tp |\n|---|---|---|\n| a | 1 |  |\n| b | 3 |  |\n| c |  | 4 |"


def test_the_origin_stands_below_a_figure(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["pytest", "-m", "long"])
    record_text("x", "new", root)
    told = section(read("x", root))
    assert told.startswith("new\n\n*`pytest -m long`, commit ") and told.endswith(f"{platform.machine()}.*")
    assert origin({"text": "computed"}).count(UNKNOWN) == 4
    assert len(origin({"command": "python -m tests.faults " + "a-name " * 90})) < 220, "a long command is shortened"


def test_cells_that_were_left_as_they_were_are_counted(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(commit: str, *rows: str) -> str:
        monkeypatch.setattr(figures, "described_commit", lambda: commit)
        record_cells("table", "model", {(row, "dp"): commit for row in rows}, root)
        return origin(read("table", root))

    assert "older" not in measured("1", "a", "b", "c")
    assert ", 2 of 3 cells are older, the oldest of " in measured("2", "b")
    measured("3", "c")
    assert [one["cells"] for one in read("table", root)["earlier"]] == [{"dp": ["a"]}, {"dp": ["b"]}]
    assert ", 1 of 3 cells are older" in measured("3", "a")
    assert "older" not in measured("3", "b") and "earlier" not in read("table", root)


def test_a_summary_counts_and_the_site_has_the_whole_figure(root: Path) -> None:
    page = root / "docs" / "reference" / "proofs.md"
    page.parent.mkdir()
    page.write_text("<!-- table:summary -->\n<!-- table:end -->\n")
    cells = {(f"model {n}", axis): f"{n % 7}e-08" for n in range(40) for axis in ("dp", "tp")}
    record_cells("table", "model", cells | {("model 3", "tp"): "refused: it is cut"}, root)
    short = page.read_text()
    assert "40 rows x 2 columns on the site. " in short
    assert "79 deviations, the largest 6e-08 (" in short and "1 cells are refused" in short
    assert "| model 39 |" not in short and "| model 39 |" in with_whole_figures(short, root)
    assert "| model 39 |" in (root / "docs" / "page.md").read_text()
    record_text("table", "\n".join(f"row {n}" for n in range(100)) + "\ntime is 1.02 -> pass", root)
    assert "time is 1.02 -> pass" in page.read_text() and "row 7" not in page.read_text()


def test_a_figure_is_shown_in_every_page_that_has_its_section(root: Path) -> None:
    (root / "docs" / "other.md").write_text("<!-- x:begin -->\n<!-- x:end -->\n")
    record_text("x", "new", root)
    assert "new" in (root / "README.md").read_text() and "new" in (root / "docs" / "other.md").read_text()
    with pytest.raises(LookupError, match="no page has a section 'nowhere'"):
        record_text("nowhere", "", root)
