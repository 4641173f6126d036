"""Measures how costs grow with the world size: one rank of each world runs alone, with the engine's own code.

python -m benchmarks scale                          worlds of 64 to 16,384 ranks
python -m benchmarks scale --worlds 64,512          some of them
python -m benchmarks scale --planning               seconds and memory of large plans and searches instead
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.harness.figures import ROOT, record_cells
from benchmarks.scale.checkpoint import paper_checkpoint, read_as
from benchmarks.scale.groups import all_groups, open_groups
from benchmarks.scale.step import replay
from benchmarks.scale.store import start_over_store
from benchmarks.scale.worlds import TRILLION, WORLDS, ScaledWorld

Cells = dict[tuple[str, str], str]
CORNER = "ranks"
SIZES = (
    "--layers", str(TRILLION.layers), "--width", str(TRILLION.width), "--heads", str(TRILLION.heads),
    "--context", str(TRILLION.context), "--vocabulary", str(TRILLION.vocabulary),
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks scale", description=__doc__.partition("\n")[0])
    parser.add_argument("--worlds", default=",".join(map(str, WORLDS)), help="numbers of ranks, by default %(default)s")
    parser.add_argument("--planning", action="store_true", help="time large plans and searches instead")
    parser.add_argument("--write-figures", action="store_true", help="keep the tables in docs/figures and show them")
    asked = parser.parse_args(arguments)
    if asked.planning:
        name, corner, cells = "scale-planning", "on one core", planning_cells()
        _print(cells)
    else:
        name, corner, cells = "scale", CORNER, {}
        for size in map(int, asked.worlds.split(",")):
            found = world_cells(WORLDS[size])
            _print(found)
            cells |= found
    if asked.write_figures:
        record_cells(name, corner, cells)
    return 0


def _print(cells: Mapping[tuple[str, str], str]) -> None:
    print(*(f"{row:36} {column:44} {text}" for (row, column), text in cells.items()), sep="\n", flush=True)


def world_cells(world: ScaledWorld) -> Cells:
    """Measures a row of the table; figures are the maximum over sampled ranks."""
    row, plan = str(world), world.plan()
    nccl = [open_groups(world, plan, rank, linked=True) for rank in world.ranks]
    gloo = [open_groups(world, plan, rank, linked=False) for rank in world.ranks]
    stores = {rank: start_over_store(world.size, rank) for rank in world.ranks}
    steps = [replay(world, rank) for rank in world.ranks]
    cells = {
        "communicators of a rank, NCCL": f"{max(one.own for one in nccl)}",
        "in all": f"{all_groups(world, plan, linked=True):,}",
        "calls that open them": f"{nccl[0].rounds}",
        "communicators of a rank, gloo": f"{max(one.own for one in gloo)}",
        "store of a rank: operations": f"{stores[world.size - 1].calls.total()}",
        "keys": f"{len(stores[world.size - 1].keys)}",
        "bytes": f"{stores[world.size - 1].moved_bytes:,}",
        "operations of rank 0": f"{stores[0].calls.total():,}",
        "bytes of set-up a rank": f"{max(one.setup_bytes for one in steps):,}",
        "calls of a step": f"{max(one.step_calls for one in steps)}",
    }
    paper = paper_checkpoint(plan)
    cells |= {
        "files of a checkpoint": f"{len(paper.manifest.files):,}",
        "pieces": f"{paper.pieces:,}",
    }
    readings = [read_as(paper, plan, rank) for rank in world.ranks]
    cells |= {
        "manifest": f"{readings[0].manifest_bytes / 2**20:.1f} MiB",
        "read of it by a rank": f"{max(one.read_bytes for one in readings) / 2**20:.1f} MiB",
        "hashes read by a rank": f"{max(one.hash_bytes for one in readings) / 2**20:.1f} MiB",
        "seconds of a rank": f"{max(one.seconds for one in readings):.2f}",
    }
    spent = spend(["benchmarks.scale.worlds", str(world.size)])
    cells |= {"plan of a rank": f"{spent.seconds:.1f} s", "its memory": f"{spent.peak_bytes / 2**30:.2f} GiB"}
    return {(row, column): text for column, text in cells.items()}


@dataclass(frozen=True, slots=True)
class Spent:
    """Resources that a process used."""

    seconds: float
    """CPU seconds, user and system."""
    peak_bytes: int


def spend(arguments: Sequence[str]) -> Spent:
    """Runs ``python -m`` with ``arguments`` on one core; includes the import of torch.

    Raises:
        RuntimeError: the command failed.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", *arguments], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{' '.join(arguments)} ended with {process.returncode}: {output[-500:]}")
    return Spent(used.ru_utime + used.ru_stime, used.ru_maxrss << 10)


def plan_in_process(world: ScaledWorld) -> Spent:
    """Runs ``trine plan`` of the model with 1 T parameters in a process."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "config.json"
        file.write_text(json.dumps(world.settings()), encoding="utf-8")
        return spend(["engine.launch.cli", "plan", str(file), *SIZES, "--world", str(world.size), "--json"])


def planning_cells() -> Cells:
    """Measures CPU seconds and memory of whole commands, including torch's import."""
    cells: Cells = {}
    runs: dict[str, Callable[[], Spent]] = {
        f"plan of 1 T on {WORLDS[3072]}": lambda: plan_in_process(WORLDS[3072]),
        "search for 1.7 B on 1,024": lambda: _search(24, 2048, 16),
        "search for 70 B on 1,024": lambda: _search(84, 8192, 64),
        "search for 177 B on 1,024": lambda: _search(96, 12288, 96),
    }
    for row, run in runs.items():
        began = time.perf_counter()
        spent = run()
        cells[row, "processor seconds"] = f"{spent.seconds:.1f}"
        cells[row, "seconds"] = f"{time.perf_counter() - began:.1f}"
        cells[row, "memory"] = f"{spent.peak_bytes / 2**30:.2f} GiB"
    return cells


def _search(layers: int, width: int, heads: int) -> Spent:
    sizes = ("--layers", layers, "--width", width, "--heads", heads, "--context", 4096, "--vocabulary", 131072)
    asked = ["engine.launch.cli", "plan", *map(str, sizes), "--world", "1024", "--batch", "1024", "--search", "--json"]
    return spend(asked)
