"""Predicted beside measured seconds of twelve configurations on the processors of this host."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.figures import ROOT
from benchmarks.planning.host_cases import CASES, HostCase
from benchmarks.planning.host_ranks import typical
from engine.planning.host_step.host_rates import HostRates, host_rates_of
from engine.planning.step_time.prediction import StepTime

GOAL = 0.15
"""Of the measured seconds: how far off a prediction may be."""


def measure_host(rounds: int, worlds: Sequence[int] = (1, 2)) -> dict[str, Any]:
    """What jobs of one and of two ranks have measured, by number of ranks."""
    found: dict[str, Any] = {}
    for world in worlds:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "measured.json"
            command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(world), "--standalone"]
            command += ["-m", "benchmarks.planning.host_ranks", str(out), str(rounds)]
            path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH")) if part)
            subprocess.run(command, cwd=ROOT, check=True, env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path})
            found[str(world)] = json.loads(out.read_text(encoding="utf-8"))
    return found


def compared(measured: Mapping[str, Any]) -> list[tuple[HostCase, float, StepTime]]:
    """(case, measured seconds, predicted seconds) of the cases that were measured."""
    rows = []
    for case in CASES:
        of_world = measured.get(str(case.world))
        if of_world is not None:
            rates: HostRates = host_rates_of(of_world["rates"])
            rows.append((case, typical(of_world["steps"][case.name]), case.predict(rates)))
    return rows


def host_cells(measured: Mapping[str, Any]) -> dict[tuple[str, str], str]:
    """A row of a table for each case."""
    cells: dict[tuple[str, str], str] = {}
    for case, seconds, time in compared(measured):
        cells[case.name, "measured"] = f"{1e3 * seconds:.0f} ms"
        cells[case.name, "predicted"] = f"{1e3 * time.total:.0f} ms"
        cells[case.name, "off"] = f"{time.total / seconds - 1:+.1%}"
        parts: dict[str, float] = {"computation": time.computation, "bubble": time.bubble}
        parts |= {str(axis): part for axis, part in time.communication.items()}
        shown = [f"{name} {1e3 * part:.0f}" for name, part in parts.items() if part >= 5e-4]
        cells[case.name, "predicted parts, ms"] = ", ".join(shown)
        classes = list(case.classes(host_rates_of(measured[str(case.world)]["rates"])).items())[:4]
        cells[case.name, "longest operators of a microbatch, ms"] = ", ".join(
            f"{name} {1e3 * part:.0f}" for name, part in classes
        )
    return cells
