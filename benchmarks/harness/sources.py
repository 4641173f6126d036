"""Which code decides a figure, and whether it has changed since the figure was measured.

    record    the figure keeps a digest of each folder that decides it
    show      a digest that is another one now makes a line under the figure: measured at which commit, what has changed

A digest is of the code alone: comments, docstrings and layout may change.
"""

import ast
from collections.abc import Mapping, Sequence
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType
from typing import Any

RUN = ("engine/build", "engine/optim", "engine/precision", "engine/program", "engine/step", "parallel", "zero")
"""What trains, whatever is trained."""
STEPS = (*RUN, "benchmarks/peers", "benchmarks/training")
SOURCES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "activation-memory": (*RUN, "engine/planning", "engine/dry_run"),
        "checkpoint": ("engine/checkpoint", "benchmarks/checkpoint"),
        "faults": ("tests/faults",),
        "first-contact": (*RUN, "kernels", "benchmarks/first_contact"),
        "goodput": ("engine/checkpoint", "engine/watchdog", "parallel/comm"),
        **dict.fromkeys(("soak", "watchdog-cost", "watchdog-faults"), ("engine/watchdog", "parallel/comm")),
        **dict.fromkeys(("reliability", "versions"), ()),  # each row tells its own commit, or is of versions alone
        "protocol-defects": ("kernels/gpu/overlap", "tests/kernels/gpu/overlap"),
        **dict.fromkeys(
            (
                "planning",
                "planning-errors",
                "planning-left-out",
                "planning-memory",
                "planning-agreement",
                "placement",
                "plan-example",
            ),
            ("engine/planning/cost_model", "benchmarks/planning"),
        ),
        "planning-search": ("engine/planning", "benchmarks/planning"),
        "scale": (
            "engine/build",
            "engine/checkpoint",
            "engine/planning",
            "engine/step",
            "parallel",
            "benchmarks/scale",
        ),
        "scale-planning": ("engine/planning", "benchmarks/scale"),
        "kernels-models": (*RUN, "kernels"),
        "integrity": ("engine/integrity",),
        "integrity-cost": ("engine/integrity", "engine/step", "zero"),
        **dict.fromkeys(("offload-update", "offload-disk"), ("kernels/optim", "zero/offload", "zero/optim")),
        "offload-step": (*RUN, "kernels/optim"),
        "plan-search": ("engine/planning", "parallel/tensor", "parallel/trace"),
        "timeline": ("engine/step", "parallel/pipeline"),
        **dict.fromkeys(("step", "zero", "pipeline", "tensor"), STEPS),
        "host-time": (*STEPS, "kernels/ops"),
    }
)
"""Folders by figure; for others :data:`RUN`."""


def digests(name: str, root: Path) -> dict[str, str]:
    """The digest of each folder that decides the figure ``name``."""
    return {folder: _digest(root / folder) for folder in SOURCES.get(name, RUN)}


def changes(name: str, figure: Mapping[str, Any], root: Path) -> str:
    """What has changed since ``figure`` was measured, as a line; empty if nothing has, or nothing was measured.

    Cells that the last measurement has left as they were are told apart, with the oldest commit that they come from.
    """
    if "command" not in figure:
        return ""
    now = digests(name, root)
    older = [one for one in figure.get("earlier", ()) if _changed(one, now)]
    told = []
    if changed := _changed(figure, now):
        told.append(f"Measured {_when(figure)}; {_named(changed, now)} changed since.")
    if older:
        count = sum(len(rows) for one in older for rows in one["cells"].values())
        total = sum(len(cells) for cells in figure["rows"].values())
        oldest = min(older, key=lambda one: str(one.get("date", "")))
        every = list(dict.fromkeys(folder for one in older for folder in _changed(one, now)))
        told.append(
            f"{count} of {total} cells are older, the first of them measured {_when(oldest)}; {_named(every, now)} "
            "changed since."
        )
    return f"*{' '.join(told)}*" if told else ""


def _changed(measurement: Mapping[str, Any], now: Mapping[str, str]) -> list[str]:
    kept: Mapping[str, str] = measurement.get("sources", {})
    return [folder for folder, digest in now.items() if kept.get(folder) != digest]


def _named(changed: Sequence[str], now: Mapping[str, str]) -> str:
    return "the code" if len(changed) == len(now) else ", ".join(f"`{one}`" for one in changed)


def _when(measurement: Mapping[str, Any]) -> str:
    commit = str(measurement.get("commit", "")) or "without a commit"
    place = commit if commit.startswith(("before", "without")) else f"at {commit}"
    return f"{place} ({measurement.get('date', 'no date')})"


def _digest(folder: Path) -> str:
    files = sorted(folder.rglob("*.py"))
    return _digest_of(tuple((str(file.relative_to(folder)), file.read_text(encoding="utf-8")) for file in files))


@lru_cache(maxsize=32)  # most figures have the same folders, and to parse them all takes seconds
def _digest_of(files: tuple[tuple[str, str], ...]) -> str:
    found = sha256()
    for name, text in files:
        tree = ast.parse(text)
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                node.body = [one for one in node.body if not _is_text(one)]
        found.update(f"{name} {ast.dump(tree)}".encode())
    return found.hexdigest()[:16]


def _is_text(node: ast.stmt) -> bool:
    """A docstring, of whatever it stands under."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
