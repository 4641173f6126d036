"""Trains a small decoder on four sites that meet rarely: validation loss against pushed bytes.

    python -m benchmarks outer [--steps 600] [--periods 1,5,15,30,60,120,250,500] [--write-figures]

The text is Python's own sources, the model has 137 k parameters, and sites take turns in one process. Period 1 is
synchronous training. Two forms at 60 meetings push the largest 3 % alone, with and without error feedback; exit code 1
if feedback recovers less than half of the loss that sparse pushes cost.
"""

import argparse
import runpy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.harness.figures import ROOT, record_cells, render_cells
from benchmarks.outer.sites import Outcome, train_apart
from engine.config.outer_section import OuterConfig

PERIODS = (1, 5, 15, 30, 60, 120, 250, 500)
SITES, STEPS, MEETINGS = 4, 600, 60
RECOVERED = 0.5
"""Minimum fraction of the gap between sparse and dense pushes that feedback recovers."""
CORNER = "outer loop"
LOSS, RISE, BYTES, FEWER, SHARE = "loss", "more than period 1", "bytes of a site", "fewer bytes", "gap recovered"
SHORT_WIRES = ("int8", "int4")
SHORT_WIRE_PERIOD = 60
DRAWINGS = ROOT / "docs" / "drawings"


@dataclass(frozen=True, slots=True)
class Form:
    """Settings of an outer loop, with their name in the table."""

    name: str
    outer: OuterConfig


def forms(periods: Sequence[int], meeting: int) -> Iterator[Form]:
    """Yields all forms, synchronous training first; ``meeting``: period of the comparison of feedback."""
    yield _form("synchronous, period 1", period=1, rule="average")
    for rule in ("average", "diloco"):
        for period in periods:
            if period > 1:
                yield _form(f"{rule}, period {period}", period=period, rule=rule)
    for wire in SHORT_WIRES:
        yield _form(f"diloco, period {SHORT_WIRE_PERIOD}, {wire}", period=SHORT_WIRE_PERIOD, rule="diloco", wire=wire)
    yield from feedback_forms(meeting)


def feedback_forms(period: int) -> tuple[Form, ...]:
    """Returns dense pushes, sparse ones, and sparse ones with feedback in 32 and in 2 bits."""
    every = {"period": period, "rule": "average"}
    sparse = every | {"wire": "topk", "density": 0.03}
    return (
        _form(f"average, period {period}", **every),
        _form(f"average, period {period}, top 3 %", **sparse),
        _form(f"average, period {period}, top 3 %, feedback 1", **sparse, feedback=1.0),
        _form(f"average, period {period}, top 3 %, 2 bits, feedback 0.95", **sparse, bits=2, feedback=0.95),
    )


def _form(name: str, **settings: Any) -> Form:
    return Form(name, OuterConfig(sites=SITES, weights="equal", **settings))


def cells_of(outcomes: Mapping[str, Outcome], period: int) -> dict[tuple[str, str], str]:
    """Formats outcomes by name as cells; ``period``: that of the comparison of feedback."""
    base = next(iter(outcomes.values()))
    dense, sparse, *repaired = (form.name for form in feedback_forms(period))
    cells = {}
    for name, found in outcomes.items():
        cells[name, LOSS] = f"{found.loss:.4f}"
        cells[name, RISE] = f"{found.loss / base.loss - 1:+.1%}"
        cells[name, BYTES] = f"{found.pushed:,}"
        cells[name, FEWER] = f"{base.pushed / found.pushed:,.0f} x"
        cells[name, SHARE] = ""
    for name in repaired:
        cells[name, SHARE] = f"{recovered(outcomes[dense], outcomes[sparse], outcomes[name]):.0%}"
    return cells


def recovered(dense: Outcome, sparse: Outcome, repaired: Outcome) -> float:
    """Returns the fraction of the loss that sparse pushes cost and feedback recovers."""
    return (sparse.loss - repaired.loss) / (sparse.loss - dense.loss)


def main(command: Sequence[str] | None = None) -> int:
    """Trains every form, prints the table and writes figure and drawing; returns the exit code."""
    asked = _parse(command)
    torch.set_num_threads(1)
    period = max(2, asked.steps // MEETINGS)
    outcomes: dict[str, Outcome] = {}
    for form in forms(asked.periods, period):
        if form.name not in outcomes:
            outcomes[form.name] = train_apart(form.outer, asked.steps)
            print(f"{form.name}: loss {outcomes[form.name].loss:.4f}", flush=True)
    cells = cells_of(outcomes, period)
    print(render_cells(CORNER, cells))
    share = min(recovered(*(outcomes[form.name] for form in three)) for three in _threes(period))
    passed = share >= RECOVERED
    print(f"feedback recovers {share:.0%} of the gap; limit {RECOVERED:.0%} -> {'pass' if passed else 'FAIL'}")
    if asked.write_figures:
        record_cells("outer", CORNER, cells)
        drawing = runpy.run_path(str(DRAWINGS / "draw.py"))["outer"]()
        drawing.save(DRAWINGS / "outer.svg")
    return 0 if passed else 1


def _threes(period: int) -> Iterator[tuple[Form, Form, Form]]:
    dense, sparse, *repaired = feedback_forms(period)
    return ((dense, sparse, each) for each in repaired)


def _parse(command: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks outer", description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=STEPS, help="of every site; feedback is compared at 60 meetings")
    parser.add_argument(
        "--periods", type=lambda text: tuple(map(int, text.split(","))), default=PERIODS, help="steps between pushes"
    )
    parser.add_argument("--write-figures", action="store_true", help="keep table and drawing, and show them")
    return parser.parse_args(command)
