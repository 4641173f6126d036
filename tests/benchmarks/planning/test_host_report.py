"""Predicted beside measured steps of this host: the table, its cases, and how far off the documents say it is."""

import json

import pytest

from benchmarks.harness.figures import FOLDER
from benchmarks.planning.host_cases import CASES
from benchmarks.planning.host_ranks import mean_rates
from benchmarks.planning.host_report import GOAL, host_cells
from engine.planning.host_step.host_rates import EngineSeconds, HostRates, SecondsTable

RATES = HostRates(
    ranks=1,
    operators={"add": SecondsTable(sizes=((1.0, 2.0),), seconds=(1e-9, 2e-9))},
    collectives={},
    overlap=1.0,
    engine=EngineSeconds(step=1.0, microbatch=0.0, operator=0.0),
)


@pytest.mark.long
def test_a_row_for_each_measured_case() -> None:
    steps = {case.name: [3.0, 2.0, 1.0] for case in CASES if case.world == 1}
    cells = host_cells({"1": {"rates": RATES.as_json(), "steps": steps}})
    assert {row for row, _ in cells} == set(steps)
    assert {text for (_, column), text in cells.items() if column == "measured"} == {"2000 ms"}


def test_the_cases_differ_in_what_decides_on_a_step() -> None:
    assert len(CASES) == len({case.name for case in CASES}) == 12
    assert {case.family for case in CASES} == {"decoder", "llama", "gpt2"}
    grids = {tuple(case.grid) for case in CASES}
    assert grids == {(), ("data",), ("tensor",), ("pipeline",)} and {case.stage for case in CASES} == {0, 1, 2, 3}
    assert {case.width for case in CASES} == {256, 512, 1024} and len({case.microbatches for case in CASES}) == 3
    assert {case.recomputation for case in CASES} == {"none", "full"}


def test_the_mean_of_two_measurements() -> None:
    other = HostRates(
        ranks=1,
        operators={"add": SecondsTable(sizes=((1.0, 2.0),), seconds=(3e-9, 4e-9))},
        collectives={},
        overlap=0.0,
        engine=EngineSeconds(step=3.0, microbatch=2.0, operator=0.0),
    )
    found = mean_rates(RATES, other)
    assert found.operators["add"].seconds == pytest.approx((2e-9, 3e-9)) and found.overlap == 0.5
    assert found.engine == EngineSeconds(step=2.0, microbatch=1.0, operator=0.0)


def test_the_documents_show_twelve_steps_within_the_goal() -> None:
    rows = json.loads((FOLDER / "planning-cpu.json").read_text(encoding="utf-8"))["rows"]
    assert set(rows) == {case.name for case in CASES}
    off = {name: float(row["off"].rstrip("%")) / 100 for name, row in rows.items()}
    assert {name: part for name, part in off.items() if abs(part) > GOAL} == {}
