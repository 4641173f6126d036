"""Predicted beside measured seconds of twelve configurations on the processors of this host."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness.figures import ROOT
from benchmarks.planning.host_cases import CASES, HostCase, TracedCase
from benchmarks.planning.quiet_rounds import quieter
from engine.planning.host_step.host_rates import HostRates, host_rates_of, typical_rates
from engine.planning.step_time.prediction import StepTime

GOAL = 0.15
"""Of the measured seconds: how far off a prediction may be."""
SHARES: Mapping[int, float] = {1: 0.25, 2: 0.75}
"""Ranks of a job -> its part of the time."""


def measure_host(seconds: float) -> dict[str, Any]:
    """What jobs of one and of two ranks have measured, by number of ranks, and when."""
    began = time.perf_counter()
    found: dict[str, Any] = {"began": f"{datetime.now(UTC):%Y-%m-%d %H:%M}", "load": os.getloadavg()[0]}
    for world, share in SHARES.items():
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "measured.json"
            command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(world), "--standalone"]
            command += ["-m", "benchmarks.planning.host_ranks", str(out), str(share * seconds)]
            path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH")) if part)
            subprocess.run(command, cwd=ROOT, check=True, env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path})
            found[str(world)] = json.loads(out.read_text(encoding="utf-8"))
    return found | {"seconds": time.perf_counter() - began}


@dataclass(frozen=True)
class WorldRounds:
    """The rounds of a job."""

    rounds: Sequence[Mapping[str, Any]]

    @cached_property
    def each(self) -> tuple[HostRates, ...]:
        """The rates of every round."""
        return tuple(host_rates_of(one["rates"]) for one in self.rounds)

    @cached_property
    def rates(self) -> HostRates:
        """The rates that predict: of the quieter rounds."""
        return typical_rates([self.each[place] for place in quieter([one["others"] for one in self.rounds])])

    def steps(self, name: str) -> list[float]:
        """Seconds of the step of every round."""
        return [one["steps"][name][0] for one in self.rounds]

    def measured(self, name: str) -> float:
        """Seconds of a step: of the quieter ones."""
        seconds = self.steps(name)
        return median(seconds[place] for place in quieter([one["steps"][name][1] for one in self.rounds]))


@dataclass(frozen=True, kw_only=True)
class ComparedCase:
    """A configuration that was measured."""

    case: HostCase
    traced: TracedCase
    world: WorldRounds

    @cached_property
    def measured(self) -> float:
        """Seconds."""
        return self.world.measured(self.case.name)

    @cached_property
    def predicted(self) -> StepTime:
        """From the rates of all of its world's quieter rounds."""
        return self.traced.predict(self.world.rates)

    @property
    def off(self) -> float:
        """Of the measured seconds."""
        return self.predicted.total / self.measured - 1

    def round_by_round(self) -> list[float]:
        """How far off the rates of a round alone are from the step of that round."""
        steps = self.world.steps(self.case.name)
        return [self.traced.predict(rates).total / step - 1 for rates, step in zip(self.world.each, steps, strict=True)]


def compared(measured: Mapping[str, Any]) -> list[ComparedCase]:
    """The cases that were measured, each predicted."""
    worlds = {name: WorldRounds(measured[name]["rounds"]) for name in map(str, SHARES) if measured[name]["rounds"]}
    return [
        ComparedCase(case=case, traced=case.traced(), world=worlds[str(case.world)])
        for case in CASES
        if str(case.world) in worlds
    ]


def host_cells(cases: Sequence[ComparedCase]) -> dict[tuple[str, str], str]:
    """A row of a table for each case."""
    cells: dict[tuple[str, str], str] = {}
    for one in cases:
        name, steps, rounds = one.case.name, one.world.steps(one.case.name), one.round_by_round()
        cells[name, "measured"] = f"{1e3 * one.measured:.0f} ms"
        cells[name, "predicted"] = f"{1e3 * one.predicted.total:.0f} ms"
        cells[name, "off"] = f"{one.off:+.1%}"
        cells[name, "steps of all rounds, ms"] = f"{1e3 * min(steps):.0f} to {1e3 * max(steps):.0f}"
        cells[name, "off in each round alone"] = f"{min(rounds):+.0%} to {max(rounds):+.0%}"
        parts: dict[str, float] = {"computation": one.predicted.computation, "bubble": one.predicted.bubble}
        parts |= {str(axis): part for axis, part in one.predicted.communication.items()}
        shown = [f"{part} {1e3 * seconds:.0f}" for part, seconds in parts.items() if seconds >= 5e-4]
        cells[name, "predicted parts, ms"] = ", ".join(shown)
        classes = list(one.traced.classes(one.world.rates).items())[:4]
        longest = ", ".join(f"{kind} {1e3 * seconds:.0f}" for kind, seconds in classes)
        cells[name, "longest operators of a microbatch, ms"] = longest
    return cells


def run_cells(measured: Mapping[str, Any], cases: Sequence[ComparedCase]) -> dict[tuple[str, str], str]:
    """The row of this run among all runs."""
    off = [one.off for one in cases]
    rounds = [one for name in map(str, SHARES) for one in measured[name]["rounds"]]
    shown = {
        f"within {GOAL:.0%}": f"{sum(abs(each) <= GOAL for each in off)} of {len(off)}",
        "lowest": f"{min(off):+.1%}",
        "highest": f"{max(off):+.1%}",
        "mean": f"{sum(map(abs, off)) / len(off):.1%}",
        "rounds of 1 and 2 ranks": " and ".join(str(len(measured[name]["rounds"])) for name in map(str, SHARES)),
        "others took of the processors": f"{median(one['others'] for one in rounds):.0%}",
        "load at the start": f"{measured['load']:.1f}",
        "seconds": f"{measured['seconds']:.0f}",
    }
    return {(measured["began"], column): text for column, text in shown.items()}
