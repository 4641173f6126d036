"""Compares predictions of ``trine plan`` with published speeds, each with its error, and fits the GPU factors."""

import argparse
import contextlib
import io
import json
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import mean
from types import MappingProxyType

from benchmarks.harness.figures import record_cells, record_text
from benchmarks.planning.agreement import agreement_cells
from benchmarks.planning.fit import fit
from benchmarks.planning.published import FITTED, PublishedRow, not_predicted, read_rows
from benchmarks.planning.recipes import recipe_cells
from engine.launch.cli import main as run_command
from engine.parallel.grid import Grid
from engine.planning.cost_model.hardware import load_gpu
from engine.planning.cost_model.links import placement_picture

GIB = 2**30
SEARCHED = (("1.7 B", 24, 2048, 16), ("70 B", 84, 8192, 64), ("177 B", 96, 12288, 96))
"""Sizes of searched models: (name, layers, width, heads)."""
CORNERS: Mapping[str, str] = MappingProxyType(
    {
        "planning": "run",
        "planning-errors": "kind of GPU",
        "planning-memory": "memory of the fullest GPU",
        "planning-left-out": "figure",
    }
)
"""Corner heading of each table."""
EXAMPLE = (
    "plan", "--layers", "32", "--width", "4096", "--heads", "32", "--context", "8192", "--vocabulary", "128256",
    "--world", "64", "--batch", "512", "--gpu", "h100", "--price", "2.5",
)  # fmt: skip
"""Command line of the documents' example, a decoder of 8 B parameters."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks planning", description=__doc__)
    parser.add_argument("--fit", action="store_true", help="choose the factors of each kind of GPU anew and print them")
    parser.add_argument("--write-figures", action="store_true", help="keep the tables in docs/figures and show them")
    parser.add_argument("--search", action="store_true", help="time searches for 1,024 GPUs instead")
    parser.add_argument("--experts", action="store_true", help="plan and search published mixtures of experts instead")
    asked = parser.parse_args(arguments)
    if asked.experts:
        for mixture in recipe_cells():
            print(*(f"{row:30} {column:50} {text}" for (row, column), text in mixture.items()), sep="\n", flush=True)
            if asked.write_figures:
                record_cells("planning-experts", "mixture on H100s", mixture)
        return 0
    rows = read_rows()
    if asked.search:
        cells = search_cells()
        print(*(f"{row:30} {column:30} {text}" for (row, column), text in cells.items()), sep="\n")
        if asked.write_figures:
            record_cells("planning-search", "decoder on 1,024 H100s, 1,024 rows", cells)
        return 0
    if asked.fit:
        for gpu in FITTED:
            found = fit([row for row in rows if row.gpu == gpu and row.fitted], load_gpu(gpu).reached)
            print(gpu, {name: round(value, 3) for name, value in asdict(found).items()})
        return 0
    tables = {
        "planning": row_cells(rows),
        "planning-errors": error_cells(rows),
        "planning-memory": memory_cells(rows),
        "planning-left-out": left_out_cells(),
    }
    for name, cells in tables.items():
        print(name, *(f"  {row:70} {column:12} {text}" for (row, column), text in cells.items()), sep="\n")
        if asked.write_figures:
            record_cells(name, CORNERS[name], cells)
    if asked.write_figures:
        record_cells("planning-agreement", "layout on H100s", agreement_cells())
        workers, stages = Grid(pp=4, dp=2, tp=4), Grid(pp=4, dp=2, tp=4, order="tp-pp-dp")
        record_text("placement", f"```\n{placement_picture(workers, 4)}\n```")
        record_text("placement-stages", f"```\n{placement_picture(stages, 4)}\n```")
        record_text("plan-example", f"```\n$ trine {shlex.join(EXAMPLE)}\n{example()}\n```")
    return 0


def search_cells() -> Mapping[tuple[str, str], str]:
    """Measures CPU seconds of searches in this process, after torch's import."""
    cells: dict[tuple[str, str], str] = {}
    for name, layers, width, heads in SEARCHED:
        sizes = ("--layers", layers, "--width", width, "--heads", heads, "--context", 4096, "--vocabulary", 131072)
        began, told = time.process_time(), io.StringIO()
        with contextlib.redirect_stdout(told):
            run_command(["plan", *map(str, sizes), "--world", "1024", "--batch", "1024", "--search", "--json"])
        found = json.loads(told.getvalue())
        cells[name, "layouts"] = f"{found['tried']:,}"
        cells[name, "grids"] = str(found["grids"])
        cells[name, "whole plans"] = str(len(found["finalists"]))
        cells[name, "processor seconds"] = f"{time.process_time() - began:.1f}"
        cells[name, "the best"] = found["finalists"][0]["layout"]
    return cells


def example() -> str:
    """Returns the output of the documents' example, without lines common to all banners."""
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        run_command(EXAMPLE)
    lines = told.getvalue().splitlines()
    wanted = ("grid", "model", "batch", "zero", "state", "sends", "gpu", "memory", "step", "speed", "price", "fits")
    return "\n".join(line for line in lines if line.startswith("  ") and line.split()[0] in wanted)


def row_cells(rows: Sequence[PublishedRow]) -> Mapping[tuple[str, str], str]:
    """Formats figure, prediction, error and assumed settings of every row."""
    cells: dict[tuple[str, str], str] = {}
    for row in rows:
        value, estimate = row.predict()
        exact = ".0f" if row.unit == "tokens/s" else ".1f"
        cells[row.name, "published"] = f"{row.published:{exact}} {row.unit}"
        cells[row.name, "predicted"] = f"{value:{exact}}"
        cells[row.name, "error"] = f"{value / row.published - 1:+.1%}"
        cells[row.name, "used to fit"] = "yes" if row.fitted else ""
        cells[row.name, "memory, published"] = f"{row.memory_gib:.1f} GiB" if row.memory_gib else ""
        cells[row.name, "memory, predicted"] = f"{estimate.memory.total / GIB:.1f} GiB"
        cells[row.name, "assumed"] = row.assumed
        cells[row.name, "source"] = f"{row.source}"
    return cells


def error_cells(rows: Sequence[PublishedRow]) -> Mapping[tuple[str, str], str]:
    """Formats mean and maximum absolute error by GPU type, for fitted rows and others."""
    cells: dict[tuple[str, str], str] = {}
    for gpu in dict.fromkeys(row.gpu for row in rows):
        for part, chosen in (("fitted", True), ("not fitted", False)):
            errors = [
                abs(row.predict()[0] / row.published - 1) for row in rows if (row.gpu, row.fitted) == (gpu, chosen)
            ]
            cells[gpu, f"rows {part}"] = str(len(errors))
            if not errors:
                continue
            cells[gpu, f"mean error, {part}"] = f"{mean(errors):.1%}"
            cells[gpu, f"largest error, {part}"] = f"{max(errors):.1%}"
    return cells


def memory_cells(rows: Sequence[PublishedRow]) -> Mapping[tuple[str, str], str]:
    """Formats the memory errors of rows with reported memory, to which nothing was fitted."""
    known = [(row.predict()[1].memory.total / GIB / row.memory_gib - 1) for row in rows if row.memory_gib]
    shown = {
        "figures": str(len(known)),
        "mean absolute error": f"{mean(map(abs, known)):.1%}",
        "mean error": f"{mean(known):+.1%}",
        "lowest": f"{min(known):+.1%}",
        "highest": f"{max(known):+.1%}",
    }
    return {("all", column): text for column, text in shown.items()}


def left_out_cells() -> Mapping[tuple[str, str], str]:
    """Formats the figures that the cost model does not predict."""
    return {(what, "why it is not predicted"): why for what, why in not_predicted()}
