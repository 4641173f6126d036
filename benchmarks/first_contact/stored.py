"""Writes results of GPU runs as the figure ``first-contact`` of the documents: a row a part, a column a GPU."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.first_contact.findings import counted
from benchmarks.first_contact.parts import make_parts
from benchmarks.harness.figures import ROOT, VERSIONS, read, record_cells, render

NAME = "first-contact"
TOLD = ("step_ms", "MFU", "tokens_per_s", "peak_GB", "host_bound_ms", "busy_share", "waits")
"""Numbers of a result that a table cell shows."""
LINE_CHARACTERS = 60
"""Maximum characters of a failed process's last line that a table cell shows."""


def store(folders: Sequence[Path], root: Path = ROOT) -> str:
    """Merges the results of ``folders``, later over earlier, into the figure; returns its table.

    Raises:
        LookupError: a folder has no findings, or its run had no GPU.
    """
    parts = make_parts("cuda", Path())
    cells = {(part.name, "decides"): part.decides for part in parts}
    found = [rows for folder in folders for rows in read_parts(folder)]
    rows_ = [row for rows in found for row in rows]
    facts: dict[str, Any] = {
        key: row[key] for row in rows_ for key in ("gpu", "python", "packages", "cpus") if key in row
    }
    gpu = facts.get("gpu", "GPU")
    for rows in found:
        cells[rows[0]["part"], gpu] = cell(rows)
    record_cells(NAME, "part", cells, root, _origin(facts))
    return render(read(NAME, root))


def _origin(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Machine and versions of the run, in the form of a figure's own."""
    machine = f"one {facts['gpu']}" if "gpu" in facts else "one GPU"
    packages = facts.get("packages", {})
    versions = {"python": facts.get("python")} | {name: packages.get(name) for name in VERSIONS}
    return {
        "machine": f"{machine}, {facts['cpus']} cores" if "cpus" in facts else machine,
        "versions": {name: version for name, version in versions.items() if version},
    }


def read_parts(folder: Path) -> list[list[dict[str, Any]]]:
    """Returns the results of a run, grouped by part."""
    files = sorted(folder.glob("part-*.json"))
    read_ = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    if not read_ or any(one["device"] == "cpu" for one in read_):
        raise LookupError(f"{folder} has no findings of a GPU; give folders that first_contact has written on one.")
    return [one["rows"] for one in read_ if one["rows"]]


def cell(rows: Sequence[Mapping[str, Any]]) -> str:
    """Formats the cases of one part as a table cell: number that passed, names that failed, timings of a step."""
    wrong = [str(row["name"]) for row in rows if row["ok"] is False]
    figures = [f"{key} {row[key]}" for row in rows for key in TOLD if isinstance(row.get(key), int | float)]
    lines = [
        str(row["last"]) for row in rows if row["ok"] is False and len(row.get("last", "")) in range(1, LINE_CHARACTERS)
    ]
    told = [counted(rows), *([f"failed: {', '.join(wrong)}"] if wrong else []), *lines, *figures]
    return "; ".join(told).replace("|", "/")
