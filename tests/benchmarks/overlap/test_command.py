"""The benchmark of products that communicate: its formulas, goals and winners, and tiny runs of every way."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.harness.budget import Budget
from benchmarks.kernels.winners import winners_json
from benchmarks.overlap import command
from benchmarks.overlap.cases import OPERATIONS, TILES, OverlapCase, llama_cases, tiny_cases
from benchmarks.overlap.measure import Sampling, describe, run_case, time_ways
from benchmarks.overlap.places import VirtualPlace
from benchmarks.overlap.report import (
    gain,
    gated_ratio,
    hidden,
    hidden_from_host,
    judge_overlap,
)
from benchmarks.overlap.trial import OverlapTrial
from benchmarks.overlap.winners import propose_overlap
from engine.kernels.gpu.launch_shapes import Tile, tile_of
from engine.kernels.overlap import OverlapChoice, ProductSizes, read_overlap
from tests.kernels.interpreter import repair
from tests.selection import wide
from tests.structure import ROOT

CPU = torch.device("cpu")
GPU = "NVIDIA H100 80GB HBM3"
CASE = llama_cases((8,), quick=True)[0]
TINY = {case.operation: case for case in tiny_cases((2,), quick=True)}


@pytest.fixture(autouse=True, scope="module")
def interpreter() -> None:
    """As tests of kernels have it."""
    repair()


def found_of(case: OverlapCase = CASE, passed: bool = True, **seconds: float) -> dict[str, Any]:
    """As ``run_case`` gives it."""
    rows = {name.replace("_", " "): {"seconds": taken} for name, taken in seconds.items()}
    return describe(case) | {"passed": passed, "tile": TILES[1], "checks": {}, "seconds": rows}


MEASURED = found_of(
    fused=1.2, copied=1.1, chunks=1.4, collectives=1.5, gated=1.0, transfer=0.4, product=0.95,
    communicating_alone=1.01, plain_alone=1.0, from_host=2.5, host_transfer=2.0,
)  # fmt: skip


def test_cases_are_the_products_of_llama() -> None:
    names = {(case.operation, case.of, case.ranks): case.sizes for case in llama_cases((2, 8))}
    assert len(names) == len(llama_cases((2, 8))) == 12
    assert names["gather_product", "70B up", 8] == ProductSizes(8192, 28672 // 8, 8192)
    assert names["product_scatter", "8B down", 2] == names["product_sum", "8B down", 2]
    assert names["product_sum", "8B down", 2] == ProductSizes(8192, 4096, 14336 // 2)
    assert TILES[0] == (tile_of(torch.bfloat16).rows, 128, 64, 8, 3), "the first tile ships"


def test_shares_and_ratios_follow_the_formulas() -> None:
    assert hidden(MEASURED) == pytest.approx((1.0 + 0.4 - 1.1) / 0.4)
    assert gated_ratio(MEASURED) == pytest.approx(1.01)
    assert hidden_from_host(MEASURED) == pytest.approx((1.0 + 2.0 - 2.5) / 1.0), "of the product, which is shorter"
    assert gain(MEASURED) == pytest.approx(1.4 / 1.1)
    assert gain(MEASURED | {"seconds": {}}) is None and hidden(found_of(fused=1.0)) is None


def test_goals_are_judged() -> None:
    share, ratio = judge_overlap(MEASURED)
    assert (share.passed, ratio.passed) == (False, True) and str(share).startswith("FAIL: gather_product 8B up tp8")
    assert [one.passed for one in judge_overlap(found_of(fused=1.05, gated=1.0, transfer=0.4))] == [True]


def test_winners_are_right_faster_by_a_margin_and_read_back() -> None:
    shipped = (
        OverlapChoice(
            operation="gather_product", device=GPU, dtype="bfloat16", ranks=8, rows=8192, columns=1792, depth=4096,
            way="chunks", speedup=0.5,
        ),
        OverlapChoice(
            operation="gather_product", device="another", dtype="bfloat16", ranks=8, rows=8192, columns=1792,
            depth=4096, way="fused", speedup=1.5,
        ),
    )  # fmt: skip
    rows = propose_overlap([MEASURED], GPU, shipped)
    assert rows == [replace(shipped[0], way="copied", speedup=1.273, tile=TILES[1]), shipped[1]]
    assert list(read_overlap(winners_json(rows))) == rows
    assert read_overlap(winners_json([])) == ()
    (close,) = propose_overlap([found_of(fused=1.0, collectives=1.01)], GPU, ())
    assert (close.way, close.fuses) == ("collectives", False), "less than the margin is noise"
    assert propose_overlap([found_of(passed=False, fused=1.0, chunks=2.0)], GPU, ()) == []
    assert propose_overlap([found_of(fused=1.0)], GPU, ()) == [], "nothing to compare with"


def test_a_run_without_a_gpu_checks_and_times_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in command.QUEUES:
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(command, "find_accelerator", lambda: None)
    small = replace(TINY["gather_product"], tiles=((32, 16, 32, 4, 2),))
    monkeypatch.setattr(command, "tiny_cases", lambda *_: [small])
    assert command.main(["--quick", "--ranks", "2", "--out", str(tmp_path)]) == 0
    figures = json.loads((tmp_path / "overlap.json").read_text())
    (case,) = figures["cases"]
    (check,) = case["checks"].values()
    assert figures["interpreted"] and case["passed"] and "seconds" not in case and not case["tuned"]
    assert {way: row["deviation"] for way, row in check["ways"].items()} == dict.fromkeys(
        ("in turns", "fused", "copied", "chunks", "collectives"), 0.0
    )
    text = (tmp_path / "overlap.md").read_text()
    assert "times would mean nothing" in text and " ms |" not in text and text in capsys.readouterr().out
    assert not (tmp_path / "overlap_winners.json").exists(), "nothing was measured"


@pytest.mark.parametrize("operation", [wide(operation) for operation in OPERATIONS])
@pytest.mark.parametrize("ranks", [wide(2), wide(4)])
def test_every_way_and_part_runs(operation: str, ranks: int) -> None:
    (case,) = [case for case in tiny_cases((ranks,), quick=True) if case.operation == operation]
    trial = OverlapTrial(case, VirtualPlace(ranks, CPU))
    found = time_ways(trial, Tile(*case.tiles[1], parts=2, described=False), Sampling(1, 1, 1), Budget(60))
    assert not {name: row for name, row in found.items() if "error" in row}
    assert {"fused", "collectives", "gated", "product", "transfer", "communicating alone", "plain alone"} <= set(found)


@pytest.mark.long
def test_tiny_cases_of_four_ranks_are_right() -> None:
    for case in tiny_cases((4,), quick=True):
        assert run_case(case, VirtualPlace(case.ranks, CPU), 60.0, Sampling())["passed"], case.name


@pytest.mark.long
def test_processes_of_torchrun_are_right(tmp_path: Path) -> None:
    command_line = [
        sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "-m", "benchmarks", "overlap",
        "--quick", "--out", str(tmp_path),
    ]  # fmt: skip
    own = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command_line, cwd=ROOT, env=own, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "overlap.json").read_text())
    assert figures["where"] == "2 processes, gloo and shared memory."
    assert [case["passed"] for case in figures["cases"]] == [True] * 3
