"""The figures of the documents: each is a JSON file, and a marked section of one page shows it.

    docs/figures/NAME.json                       what was measured, by which command, of which commit, when and where
    <!-- NAME:begin --> .. <!-- NAME:end -->     in README.md or a page of docs/

Measuring writes the file and fills the section; a table keeps the cells that this measurement did not try. A line below
a figure says which code has changed since (``sources``). ``python -m benchmarks.harness.figures`` fills all sections
from the files, and ``tests/test_documents.py`` compares them.
"""

import fcntl
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.harness.sources import changes, digests

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "figures"
VERSIONS = ("torch", "triton", "transformers")
_ORIGIN = ("command", "commit", "sources", "date", "machine", "versions")
"""What a figure tells about its measurement."""

Cells = Mapping[tuple[str, str], str]
"""Text by (row, column)."""


def record_text(name: str, text: str, root: Path = ROOT) -> None:
    """Keep a figure that is a text as it is printed, and show it."""
    _write(name, {"text": text} | _source(name, root), root)


def record_cells(name: str, corner: str, cells: Cells, root: Path = ROOT) -> None:
    """Keep the cells of a table, beside those that other measurements have left, and show it.

    Rows and columns stay in the order in which they were first measured. A cell that stays keeps where it comes from
    (``earlier``), as long as code that decides it has changed since.
    """
    with _alone(root):
        before = read(name, root) if _file(name, root).exists() else {"columns": [], "rows": {}}
        rows = {row: dict(found) for row, found in before["rows"].items()}
        for (row, column), text in cells.items():
            rows.setdefault(row, {})[column] = text
        columns = list(dict.fromkeys([*before["columns"], *(column for _, column in cells)]))
        source = _source(name, root)
        earlier = _earlier(before, set(cells), source["sources"])
        _write(name, {"corner": corner, "columns": columns, "rows": rows} | source | earlier, root)


def _earlier(figure: Mapping[str, Any], again: Set[tuple[str, str]], sources: Mapping[str, str]) -> dict[str, Any]:
    """Measurements of other code that cells not measured ``again`` come from; their cells are rows by column."""
    known: list[dict[str, Any]] = figure.get("earlier", [])
    older = {(row, column) for one in known for column, rows in one["cells"].items() for row in rows}
    newest: dict[str, list[str]] = {}
    for row, column in ((row, column) for row, found in figure["rows"].items() for column in found):
        if (row, column) not in older:
            newest.setdefault(column, []).append(row)
    last = {key: figure[key] for key in _ORIGIN if key in figure} | {"cells": newest}
    left = [one | {"cells": _without(one["cells"], again)} for one in [*known, last]]
    stays = [one for one in left if one["cells"] and one.get("sources") != sources]
    return {"earlier": stays} if stays else {}


def _without(cells: Mapping[str, list[str]], again: Set[tuple[str, str]]) -> dict[str, list[str]]:
    left = {column: [row for row in rows if (row, column) not in again] for column, rows in cells.items()}
    return {column: rows for column, rows in left.items() if rows}


@contextmanager
def _alone(root: Path) -> Iterator[None]:
    """Processes of one test run keep their cells one after another."""
    folder = os.open(root, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def render(figure: Mapping[str, Any]) -> str:
    """The Markdown of a figure."""
    if "text" in figure:
        return str(figure["text"])
    columns = figure["columns"]
    lines = [f"| {figure['corner']} | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    lines += [f"| {row} | {' | '.join(cells.get(c, '') for c in columns)} |" for row, cells in figure["rows"].items()]
    return "\n".join(lines)


def section(name: str, figure: Mapping[str, Any], root: Path = ROOT) -> str:
    """What a page shows of a figure: itself, and a line below it if code that decides it has changed since."""
    note = changes(name, figure, root)
    return f"{render(figure)}\n\n{note}" if note else render(figure)


def pages(root: Path = ROOT) -> list[Path]:
    """Return README and the pages of docs/ and its folders."""
    return [root / "README.md", *sorted((root / "docs").rglob("*.md"))]


def sections(text: str) -> Iterator[tuple[str, str]]:
    """(name, content) of every marked section of a page."""
    for found in re.finditer(r"<!-- ([\w-]+):begin -->\n(.*?)\n?<!-- \1:end -->", text, flags=re.DOTALL):
        yield found[1], found[2]


def show(name: str, text: str, root: Path = ROOT) -> None:
    """Put ``text`` into the section ``name``, which one page has.

    Raises:
        LookupError: no page has it, or several have.
    """
    begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
    having = [page for page in pages(root) if page.exists() and begin in page.read_text(encoding="utf-8")]
    if len(having) != 1:
        raise LookupError(f"section {name!r} is in {len(having)} pages; one page has to show a figure.")
    head, rest = having[0].read_text(encoding="utf-8").split(begin)
    having[0].write_text(f"{head}{begin}{text}\n{end}{rest.split(end)[1]}", encoding="utf-8")


def read(name: str, root: Path = ROOT) -> dict[str, Any]:
    """The file of a figure."""
    found: dict[str, Any] = json.loads(_file(name, root).read_text(encoding="utf-8"))
    return found


def _file(name: str, root: Path) -> Path:
    return root / FOLDER.relative_to(ROOT) / f"{name}.json"


def _write(name: str, figure: Mapping[str, Any], root: Path) -> None:
    path = _file(name, root)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(figure, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    show(name, section(name, figure, root), root)


def _source(name: str, root: Path) -> dict[str, Any]:
    """Where the last measurement comes from."""
    program = Path(sys.argv[0])
    command = f"python -m {program.parent.name}" if program.name == "__main__.py" else program.stem
    if program.is_relative_to(ROOT):
        command = "python -m " + ".".join(program.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
    return {
        "command": " ".join([command, *(argument.replace(f"{ROOT}/", "") for argument in sys.argv[1:])]),
        "commit": described_commit(),
        "sources": digests(name, root),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "versions": {"python": platform.python_version()}
        | {name: found for name in VERSIONS if (found := _version(name))},
    }


def described_commit() -> str:
    """The commit, with "+" where files differ from it; empty outside a repository."""
    try:
        told = subprocess.run(
            ["git", "describe", "--always", "--dirty=+"], cwd=ROOT, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return told.stdout.strip()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


if __name__ == "__main__":
    for file in sorted(FOLDER.glob("*.json")):
        show(file.stem, section(file.stem, read(file.stem)))
