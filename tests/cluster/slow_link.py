"""Jobs that time their own steps on nodes with slow links, beside what a plan says: their options and figures."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.cluster.jobs import Job
from tests.cluster.network import LOSSLESS, Cluster

ALLOWED = 0.15
"""How far what a step wins may be off what the plan says."""
_PACKET, _PAYLOAD = 1514, 1448
"""Bytes of a full Ethernet frame, and of the data in it, under IP and TCP with time stamps."""
Found = dict[str, dict[str, float]]
"""By way of training: its figures by name."""


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

    Returns what a rank has printed as JSON behind "found ".
    """
    with TemporaryDirectory() as folder, Cluster(nodes, f"{int(rate * 1000)}kbit", LOSSLESS) as cluster:
        script = Path(folder) / "job.py"
        script.write_text(text)
        with Job(cluster, sys.executable, ranks, script) as job:
            ends = job.end(400)
    said = "\n".join(end.text for end in ends)
    line = next((line for line in said.splitlines() if line.startswith("found ")), None)
    assert line is not None, said[-3000:]
    found: Found = json.loads(line.removeprefix("found "))
    return found
