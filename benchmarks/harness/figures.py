"""Figures of the documents: JSON files that fill marked sections of pages.

    docs/figures/NAME.json                         the result, with its command, commit, date and machine
    <!-- NAME:begin --> .. <!-- NAME:end -->       the whole figure, in README.md or a page of docs/
    <!-- NAME:summary --> .. <!-- NAME:end -->     its summary in the repository, the whole figure on the site

A measurement writes the file and fills the sections; a table keeps the cells that were not measured anew. A line below
each figure names its origin. ``python -m benchmarks.harness.figures`` fills all sections from the files, and
``tests/test_documents.py`` compares them.
"""

import fcntl
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "figures"
VERSIONS = ("torch", "triton", "transformers")
UNKNOWN = "not recorded"
SMALL_BYTES = 350
"""Maximum bytes of a figure that serves as its own summary."""
COMMAND_CHARACTERS = 110
_ORIGIN = ("command", "commit", "date", "machine", "versions")
"""Keys of a figure that describe its measurement."""
_MARKED = re.compile(r"(<!-- ([\w-]+):(begin|summary) -->\n)(.*?)(\n?<!-- \2:end -->)", flags=re.DOTALL)
_DEVIATIONS = re.compile(r"\de[+-]\d\d(?: / \de[+-]\d\d)*")

Cells = Mapping[tuple[str, str], str]
"""Cells of a table: text by (row, column)."""


def record_text(name: str, text: str, root: Path = ROOT) -> None:
    """Stores a text figure and inserts it into the pages."""
    _write(name, {"text": text} | _source(), root)


def record_cells(
    name: str, corner: str, cells: Cells, root: Path = ROOT, measured: Mapping[str, Any] | None = None
) -> None:
    """Adds cells to a table of earlier measurements, and inserts the table into the pages.

    Rows and columns stay in the order of their first measurement. Older cells retain their origin (``earlier``).
    ``measured``: machine and versions of a measurement on another machine.
    """
    with _alone(root):
        before = read(name, root) if _file(name, root).exists() else {"columns": [], "rows": {}}
        source = _source() | dict(measured or {})
        earlier = _earlier(before, set(cells), source["commit"])
        _write(name, _with_cells(before, corner, cells) | source | earlier, root)


def _with_cells(before: Mapping[str, Any], corner: str, cells: Cells) -> dict[str, Any]:
    rows = {row: dict(found) for row, found in before["rows"].items()}
    for (row, column), text in cells.items():
        rows.setdefault(row, {})[column] = text
    columns = list(dict.fromkeys([*before["columns"], *(column for _, column in cells)]))
    return {"corner": corner, "columns": columns, "rows": rows}


def render_cells(corner: str, cells: Cells, columns: Sequence[str] = ()) -> str:
    """Formats cells as a Markdown table, in the order of the cells; ``columns``: first ones."""
    return render(_with_cells({"columns": columns, "rows": {}}, corner, cells))


def _earlier(figure: Mapping[str, Any], again: Set[tuple[str, str]], commit: str) -> dict[str, Any]:
    """Measurements at other commits that cells not measured ``again`` come from; their cells are rows by column."""
    known: list[dict[str, Any]] = figure.get("earlier", [])
    older = {(row, column) for one in known for column, rows in one["cells"].items() for row in rows}
    newest: dict[str, list[str]] = {}
    for row, column in ((row, column) for row, found in figure["rows"].items() for column in found):
        if (row, column) not in older:
            newest.setdefault(column, []).append(row)
    last = {key: figure[key] for key in _ORIGIN if key in figure} | {"cells": newest}
    left = [one | {"cells": _without(one["cells"], again)} for one in [*known, last]]
    stays = [one for one in left if one["cells"] and one.get("commit") != commit]
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
    """Formats a figure as Markdown."""
    if "text" in figure:
        return str(figure["text"])
    columns = figure["columns"]
    lines = [f"| {figure['corner']} | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    lines += [f"| {row} | {' | '.join(cells.get(c, '') for c in columns)} |" for row, cells in figure["rows"].items()]
    return "\n".join(lines)


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Formats rows as a Markdown table; cells that the end of a row lacks are empty."""
    filled = ([*row, *[""] * (len(headings) - len(row))] for row in (headings, ["---"] * len(headings), *rows))
    return "\n".join("| " + " | ".join(cell.replace("|", "/") for cell in row) + " |" for row in filled)


def section(figure: Mapping[str, Any]) -> str:
    """Formats a whole figure with the line of its origin."""
    return f"{render(figure)}\n\n{origin(figure)}"


def summary(figure: Mapping[str, Any]) -> str:
    """Formats a figure in a few lines with the line of its origin."""
    return f"{_abstract(figure)}\n\n{origin(figure)}"


def _abstract(figure: Mapping[str, Any]) -> str:
    whole = render(figure)
    if len(whole.encode()) <= SMALL_BYTES:
        return whole
    if "text" in figure:
        verdicts = [line for line in whole.splitlines() if " -> " in line]
        rows = f"{len(whole.splitlines())} lines on the site"
        return f"{rows}:\n\n```\n{chr(10).join(verdicts)}\n```" if verdicts else f"{rows}."
    found = [(row, column, text) for row, cells in figure["rows"].items() for column, text in cells.items() if text]
    told = [f"{len(figure['rows'])} rows x {len(figure['columns'])} columns on the site."]
    cells = [(row, column, text.split(" / ")) for row, column, text in found if _DEVIATIONS.fullmatch(text)]
    deviations = [(float(text), row, column) for row, column, texts in cells for text in texts]
    if deviations:
        worst, row, column = max(deviations)
        told.append(f"{len(deviations)} deviations, the largest {worst:.0e} ({row}, {column}).")
    if refused := sum(text.startswith("refused") for _, _, text in found):
        told.append(f"{refused} cells are refused with a sentence.")
    return " ".join(told)


def origin(figure: Mapping[str, Any]) -> str:
    """Formats command, commit, date and machine of a figure; for a table also the number of older cells."""
    command = str(figure.get("command") or "").removeprefix("-")
    if len(command) > COMMAND_CHARACTERS:
        command = command[:COMMAND_CHARACTERS].rsplit(" ", 1)[0] + " ..."
    told = [f"`{command}`" if command else f"Command {UNKNOWN}"]
    told.append(f"commit {figure.get('commit') or UNKNOWN}")
    told += [str(figure.get(key) or f"{key} {UNKNOWN}") for key in ("date", "machine")]
    if earlier := figure.get("earlier"):
        count = sum(len(rows) for one in earlier for rows in one["cells"].values())
        total = sum(len(cells) for cells in figure["rows"].values())
        oldest = min(str(one.get("date", UNKNOWN)) for one in earlier)
        told.append(f"{count} of {total} cells are older, the oldest of {oldest}")
    return f"*{', '.join(told)}.*"


class Section(NamedTuple):
    """Marked section of a page that shows a figure."""

    name: str
    kind: str
    """Kind of section: "begin" for the whole figure, "summary" for its summary."""
    text: str


def pages(root: Path = ROOT) -> list[Path]:
    """Returns the paths of README.md and all pages of docs/."""
    return [root / "README.md", *sorted((root / "docs").rglob("*.md"))]


def sections(text: str) -> Iterator[Section]:
    """Yields every marked section of a page."""
    for found in _MARKED.finditer(text):
        yield Section(found[2], found[3], found[4])


def with_sections(text: str, body: Callable[[Section], str]) -> str:
    """Returns ``text`` with each marked section replaced by ``body(section)``."""

    def replaced(found: re.Match[str]) -> str:
        return f"{found[1]}{body(Section(found[2], found[3], found[4]))}\n<!-- {found[2]}:end -->"

    return _MARKED.sub(replaced, text)


def with_whole_figures(text: str, root: Path = ROOT) -> str:
    """Returns ``text`` with every summary replaced by the whole figure, for the site."""
    return with_sections(text, lambda one: section(read(one.name, root)) if one.kind == "summary" else one.text)


def show(name: str, text: str, root: Path = ROOT, short: str = "") -> None:
    """Writes ``text`` to all page sections ``name``, and ``short`` to their summary sections.

    Raises:
        LookupError: no page has such a section.
    """
    shown = False
    bodies = {"begin": text, "summary": short}

    def body(one: Section) -> str:
        return bodies[one.kind] if one.name == name else one.text

    for page in pages(root):
        before = page.read_text(encoding="utf-8")
        if any(one.name == name for one in sections(before)):
            shown = True
            page.write_text(with_sections(before, body), encoding="utf-8")
    if not shown:
        raise LookupError(f"no page has a section {name!r}; add <!-- {name}:summary --> to a page of docs/reference.")


def read(name: str, root: Path = ROOT) -> dict[str, Any]:
    """Reads the JSON file of a figure."""
    found: dict[str, Any] = json.loads(_file(name, root).read_text(encoding="utf-8"))
    return found


def _file(name: str, root: Path) -> Path:
    return root / FOLDER.relative_to(ROOT) / f"{name}.json"


def _write(name: str, figure: Mapping[str, Any], root: Path) -> None:
    path = _file(name, root)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(figure, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    show(name, section(figure), root, summary(figure))


def _source() -> dict[str, Any]:
    """Origin of the measurement that runs now."""
    program = Path(sys.argv[0])
    command = f"python -m {program.parent.name}" if program.name == "__main__.py" else program.stem
    if program.is_relative_to(ROOT):
        command = "python -m " + ".".join(program.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
    return {
        "command": f"{command} {shlex.join(one.replace(f'{ROOT}/', '') for one in sys.argv[1:])}".strip(),
        "commit": described_commit(),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "versions": {"python": platform.python_version()}
        | {name: found for name in VERSIONS if (found := version_of(name))},
    }


def described_commit() -> str:
    """Returns the git commit, with "+" if files are changed; empty outside a repository."""
    try:
        told = subprocess.run(
            ["git", "describe", "--always", "--dirty=+"], cwd=ROOT, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return told.stdout.strip()


def version_of(name: str) -> str:
    """Returns the version of an installed package, "" if it is absent."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


if __name__ == "__main__":
    for file in sorted(FOLDER.glob("*.json")):
        show(file.stem, section(read(file.stem)), ROOT, summary(read(file.stem)))
