"""Predicted beside measured steps of this host: the table, its cases, and how far off the documents say it is."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from benchmarks.harness.figures import FOLDER
from benchmarks.planning.host_cases import CASES
from benchmarks.planning.host_report import GOAL, WorldRounds, compared, host_cells, run_cells
from engine.planning.host_step.host_rates import EngineSeconds, HostRates, SecondsTable

RATES = HostRates(
    ranks=1,
    operators={"add": SecondsTable(sizes=((1.0, 2.0),), seconds=(1e-9, 2e-9))},
    collectives={},
    overlap=1.0,
    engine=EngineSeconds(step=1.0, microbatch=0.0, operator=0.0),
)


def measured(rounds: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Rounds of one rank: (seconds of every step, what others took)."""
    names = [case.name for case in CASES if case.world == 1]
    rates = {"rates": RATES.as_json()}
    return {
        "began": "2026-01-01 00:00", "load": 0.5, "seconds": 60.0, "2": {"rounds": []},
        "1": {"rounds": [rates | {"others": took, "steps": dict.fromkeys(names, (s, took))} for s, took in rounds]},
    }  # fmt: skip


@pytest.mark.long
def test_a_row_for_each_measured_case() -> None:
    found = measured([(3.0, 0.9), (2.0, 0.1), (1.0, 0.0), (1.1, 0.2), (9.0, 0.8)])
    cases = compared(found)
    cells = host_cells(cases)
    assert {row for row, _ in cells} == {case.name for case in CASES if case.world == 1}
    assert {text for (_, column), text in cells.items() if column == "measured"} == {"1100 ms"}
    assert {text for (_, column), text in cells.items() if column == "steps of all rounds, ms"} == {"1000 to 9000"}
    run = run_cells(found, cases)
    assert run["2026-01-01 00:00", "rounds of 1 and 2 ranks"] == "5 and 0"
    assert run["2026-01-01 00:00", "others took of the processors"] == "20%"


def test_rounds_in_which_others_were_busy_do_not_count() -> None:
    name = CASES[0].name
    rounds = WorldRounds(measured([(3.0, 0.9), (2.0, 0.1), (1.0, 0.0), (1.1, 0.2), (9.0, 0.8)])["1"]["rounds"])
    assert rounds.measured(name) == 1.1 and rounds.steps(name) == [3.0, 2.0, 1.0, 1.1, 9.0]
    assert rounds.rates == RATES


def test_the_cases_differ_in_what_decides_on_a_step() -> None:
    assert len(CASES) == len({case.name for case in CASES}) == 12
    assert {case.family for case in CASES} == {"decoder", "llama", "gpt2"}
    grids = {tuple(case.grid) for case in CASES}
    assert grids == {(), ("data",), ("tensor",), ("pipeline",)} and {case.stage for case in CASES} == {0, 1, 2, 3}
    assert {case.width for case in CASES} == {256, 512, 1024} and len({case.microbatches for case in CASES}) == 3
    assert {case.recomputation for case in CASES} == {"none", "full"}


def test_the_documents_show_twelve_steps_within_the_goal() -> None:
    rows = json.loads((FOLDER / "planning-cpu.json").read_text(encoding="utf-8"))["rows"]
    assert set(rows) == {case.name for case in CASES}
    off = {name: float(row["off"].rstrip("%")) / 100 for name, row in rows.items()}
    assert {name: part for name, part in off.items() if abs(part) > GOAL} == {}
