"""Figures of the documents: kept as JSON, merged by cell, shown in the one page that has their section."""

from pathlib import Path

import pytest

from benchmarks.harness import sources
from benchmarks.harness.figures import ROOT, read, record_cells, record_text, section, sections


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("a\n<!-- x:begin -->\nold\n<!-- x:end -->\nb\n")
    (tmp_path / "docs" / "page.md").write_text("<!-- table:begin -->\n<!-- table:end -->\n")
    return tmp_path


def test_a_text_is_kept_and_shown(root: Path) -> None:
    record_text("x", "new", root)
    assert (root / "README.md").read_text() == "a\n<!-- x:begin -->\nnew\n<!-- x:end -->\nb\n"
    kept = read("x", root)
    assert kept["text"] == "new" and {"command", "commit", "date", "machine", "versions"} <= kept.keys()


def test_the_command_of_a_module_is_its_name(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", [str(ROOT / "tests" / "faults" / "__main__.py"), "--jobs", "2"])
    record_text("x", "new", root)
    assert read("x", root)["command"] == "python -m tests.faults --jobs 2"


def test_cells_that_were_not_tried_again_stay(root: Path) -> None:
    record_cells("table", "model", {("a", "dp"): "1", ("b", "dp"): "2"}, root)
    record_cells("table", "model", {("b", "dp"): "3", ("c", "tp"): "4"}, root)
    ((name, text),) = sections((root / "docs" / "page.md").read_text())
    assert name == "table"
    assert text == "| model | dp | tp |\n|---|---|---|\n| a | 1 |  |\n| b | 3 |  |\n| c |  | 4 |"


def test_a_figure_whose_sources_have_changed_says_so(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("a", "b"):
        (root / folder).mkdir()
        (root / folder / "code.py").write_text('"""What it does."""\n\nx = 1\n')
    monkeypatch.setattr(sources, "SOURCES", {"x": ("a", "b")})
    record_text("x", "new", root)
    (root / "a" / "code.py").write_text('"""Other words."""\n\nx = 1  # and a comment\n')
    assert section("x", read("x", root), root) == "new"
    (root / "a" / "code.py").write_text("x = 2\n")
    told = section("x", read("x", root), root)
    assert told.startswith("new\n\n*Measured at ") and told.endswith("; `a` changed since.*")
    (root / "b" / "more.py").write_text("y = 1\n")
    assert section("x", read("x", root), root).endswith("; the code changed since.*")
    record_text("x", "again", root)
    assert section("x", read("x", root), root) == "again"
    assert section("x", {"text": "computed"}, root) == "computed", "what nobody has measured"


def test_cells_that_were_left_as_they_were_stay_marked(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "a").mkdir()
    monkeypatch.setattr(sources, "SOURCES", {"table": ("a",)})

    def measured(number: int, *rows: str) -> str:
        (root / "a" / "code.py").write_text(f"x = {number}\n")
        record_cells("table", "model", {(row, "dp"): str(number) for row in rows}, root)
        return section("table", read("table", root), root).partition("|\n\n")[2]

    assert measured(1, "a", "b", "c") == ""
    assert measured(2, "b").startswith("*2 of 3 cells are older, the first of them measured ")
    assert measured(3, "c").endswith("; the code changed since.*")
    assert [one["cells"] for one in read("table", root)["earlier"]] == [{"dp": ["a"]}, {"dp": ["b"]}]
    assert measured(3, "a").startswith("*1 of 3 cells are older, ")
    assert measured(3, "b") == "" and "earlier" not in read("table", root)
    measured(4, "a")
    (root / "a" / "code.py").write_text("x = 5\n")
    told = section("table", read("table", root), root)
    assert "*Measured at " in told and "changed since. 2 of 3 cells are older" in told
    (root / "a" / "code.py").write_text("x = 3\n")
    assert "older" not in section("table", read("table", root), root), "code that is as it was"


def test_every_source_exists() -> None:
    folders = {folder for found in (sources.RUN, *sources.SOURCES.values()) for folder in found}
    assert not [folder for folder in folders if folder != "tests/faults" and not (ROOT / folder).is_dir()]


def test_a_figure_is_shown_in_one_page(root: Path) -> None:
    (root / "docs" / "other.md").write_text("<!-- x:begin -->\n<!-- x:end -->\n")
    for name in ("x", "nowhere"):
        with pytest.raises(LookupError, match="one page has to show a figure"):
            record_text(name, "", root)
