"""Jobs that time their own steps on nodes with slow links, beside what a plan says: their options and figures."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.harness.figures import record_cells
from tests.cluster.jobs import Job
from tests.cluster.network import LOSSLESS, Cluster

ALLOWED = 0.15
"""How far what a step wins may be off what the plan says."""
_PACKET, _PAYLOAD = 1514, 1448
"""Bytes of a full Ethernet frame, and of the data in it, under IP and TCP with time stamps."""
Found = dict[str, dict[str, float]]
"""By way of training: its figures by name."""
Cells = dict[tuple[str, str], str]
_TIMED = """
import json, statistics, time
import torch
from torch import nn
import engine

def perceptron(layers):
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(layers) for layer in (nn.Linear(512, 512), nn.GELU())))

def mean_square(out, rows):
    return out.square().mean()

def seconds(engines, rows_of, steps):
    times = {name: [] for name in engines}
    for step in range(steps):
        for name, eng in engines.items():
            rows = rows_of(eng)
            begun = time.perf_counter()
            eng.train_batch(rows)
            if step > 1:
                times[name].append(time.perf_counter() - begun)
    return {name: statistics.median(taken) for name, taken in times.items()}

def planned_bytes(eng, axis):
    return sum(row.bytes for row in eng.plan.rank(eng.grid.rank).traffic if row.axis == axis)

def tell(engines, found):
    if next(iter(engines.values())).grid.rank == 0:
        print("found " + json.dumps(found), flush=True)
    for eng in engines.values():
        eng.close()
"""
"""What the scripts have in common: a model, steps of all engines in turn, and how figures are told."""


def read_options(name: str, about: str | None, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Rate, rounds and whether the figures are kept, of ``python -m tests.cluster.NAME``."""
    parser = argparse.ArgumentParser(prog=f"python -m tests.cluster.{name}", description=(about or "").split("\n")[0])
    parser.add_argument("--rate", type=float, default=80.0, help="of a link, in megabits a second each way")
    parser.add_argument("--rounds", type=int, default=1, help="jobs, of which the medians are taken")
    parser.add_argument("--write-figures", action="store_true", help="keep the table in docs/figures and show it")
    return parser.parse_args(arguments)


def link_seconds(count: float, rate: float) -> float:
    """Seconds that so many bytes take on a link of ``rate`` megabits a second, with the headers of their packets."""
    return count * _PACKET / _PAYLOAD / (rate * 1e6 / 8)


def run_job(text: str, nodes: int, ranks: int, rate: float) -> Found:
    """Run the script ``text`` with ``ranks`` on each node, whose links have ``rate`` megabits a second.

    Returns what the script tells.
    """
    with TemporaryDirectory() as folder, Cluster(nodes, f"{int(rate * 1000)}kbit", LOSSLESS) as cluster:
        script = Path(folder) / "job.py"
        script.write_text(_TIMED + text)
        with Job(cluster, sys.executable, ranks, script) as job:
            ends = job.end(400)
    said = "\n".join(end.text for end in ends)
    line = next((line for line in said.splitlines() if line.startswith("found ")), None)
    assert line is not None, said[-3000:]
    found: Found = json.loads(line.removeprefix("found "))
    return found


def won_cells(cells: Cells, name: str, won: float, planned: float) -> float:
    """Add what a step of the way ``name`` wins, in seconds, beside the plan; returns how far off it is."""
    cells[name, "won"], cells[name, "by the plan"] = f"{won:.2f} s", f"{planned:.2f} s"
    cells[name, "off"] = f"{won / planned - 1:+.0%}"
    return abs(won / planned - 1)


def judge(figure: str, cells: Cells, worst: float, options: argparse.Namespace) -> int:
    """Print the table and keep it if asked; the exit status, 1 where ``worst`` is further off than ALLOWED."""
    print("\n".join(f"{row:42} {column:32} {text}" for (row, column), text in cells.items()), flush=True)
    if options.write_figures:
        record_cells(figure, f"two nodes, links of {options.rate:g} Mbit/s", cells)
    return int(worst > ALLOWED)
