"""The cost model beside published figures: how far off it may be, and that the documents show what it says now."""

import json
from statistics import mean

import pytest

from benchmarks.harness.figures import FOLDER
from benchmarks.planning.command import error_cells, left_out_cells, memory_cells, row_cells
from benchmarks.planning.fit import BOUNDS, fit, loss
from benchmarks.planning.published import read_rows
from engine.planning.cost_model.hardware import load_gpu
from engine.planning.cost_model.workload import DecoderShape

ROWS = read_rows()


@pytest.mark.parametrize("gpu", ["h100", "a100", "h200"])
def test_errors_stay_within_their_bounds(gpu: str) -> None:
    errors = {row.name: row.predict()[0] / row.published - 1 for row in ROWS if row.gpu == gpu}
    assert mean(map(abs, errors.values())) <= 0.10
    assert not {name: error for name, error in errors.items() if abs(error) > 0.20}


def test_memory_is_near_what_sources_report() -> None:
    known = [row for row in ROWS if row.memory_gib]
    errors = [row.predict()[1].memory.total / 2**30 / (row.memory_gib or 1) - 1 for row in known]
    assert len(known) == 16 and mean(map(abs, errors)) <= 0.20 and max(map(abs, errors)) <= 0.40


def test_half_of_the_rows_only_check() -> None:
    assert len(ROWS) == 48 and len({row.name for row in ROWS}) == 48
    kinds = {gpu: [row.fitted for row in ROWS if row.gpu == gpu] for gpu in ("h100", "a100", "h200")}
    assert {gpu: (len(fitted), sum(fitted)) for gpu, fitted in kinds.items()} == {
        "h100": (33, 17),
        "a100": (13, 7),
        "h200": (2, 0),
    }


@pytest.mark.parametrize(
    ("name", "cells"),
    [
        ("planning", row_cells(ROWS)),
        ("planning-errors", error_cells(ROWS)),
        ("planning-memory", memory_cells(ROWS)),
        ("planning-left-out", left_out_cells()),
    ],
    ids=["planning", "planning-errors", "planning-memory", "planning-left-out"],
)
def test_the_documents_show_these_predictions(name: str, cells: dict[tuple[str, str], str]) -> None:
    kept = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))["rows"]
    assert {(row, column): text for row, found in kept.items() for column, text in found.items()} == cells


def test_recomputed_flops_are_one_more_forward_of_the_blocks() -> None:
    row = next(row for row in ROWS if row.name.startswith("Megatron-LM of 2021 1.7B"))
    h, s, layers, v = 2304, 2048, 24, 51200  # Narayanan et al. 2021, section 5.1: 96 l h^2 (1 + s/6h + V/16lh) a token
    counted = row.flops_of_token(DecoderShape(**row.shape).workload())
    assert counted == pytest.approx(96 * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h)))


def test_a_fit_goes_down_and_stays_within_bounds() -> None:
    rows = [row for row in ROWS if row.gpu == "a100"][:4]
    start = load_gpu("b200").reached
    found = fit(rows, start, rounds=40)
    assert loss(rows, found) < loss(rows, start)
    assert all(low <= getattr(found, name) <= high for name, (low, high) in BOUNDS.items() if name != "fp8")
