"""What calibration measures: a table for every class of operators, on inputs that a cache does not hold."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.launch.cli import main
from engine.launch.planner import operator_seconds as measuring
from engine.launch.planner.operator_seconds import MeasuredOperator, measure_operator, measured_operators
from engine.planning.host_step.operator_classes import ATTENTION, PASSES, describe


def test_every_class_has_a_table() -> None:
    known = {name for name, _ in measured_operators()}
    products = {"product nt", "product nn", "product tn"}
    attention = {f"{kind}{way}" for kind in ATTENTION.values() for way in ("", " backward")}
    assert known == {*PASSES.values(), *products, *attention, "add", "update", "squared norm"}


def test_every_operator_runs_on_its_inputs() -> None:
    for _, one in measured_operators():
        one.call(*one.make(*(steps[0] for steps in one.sizes)))


def test_each_combination_of_sizes_is_measured_by_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "POOL_BYTES", 64)
    seen: list[Any] = []
    operator = MeasuredOperator(
        sizes=((2, 4), (8,)), make=lambda a, b: (torch.ones(a, b),), call=lambda x: seen.append(x.shape), share=0.5
    )
    ready: list[int] = []
    table = measure_operator(operator, lambda: ready.append(len(seen)))
    assert table.sizes == ((2.0, 4.0), (8.0,)) and len(table.seconds) == 2 and min(table.seconds) > 0
    assert ready == [2, len(seen) - 3 * (1 + measuring.REPEATS)]  # two calls to see how long one takes
    assert set(seen) == {(2, 8), (4, 8)}


@pytest.mark.parametrize(
    ("name", "given", "made", "described"),
    [
        ("mm", [(4, 8), (8, 16)], [(4, 16)], ("product nn", (4.0, 8.0, 16.0), 1.0)),
        ("addmm", [(16,), (4, 8), (8, 16)], [(4, 16)], ("product nn", (4.0, 8.0, 16.0), 1.0)),
        ("bmm", [(3, 4, 8), (3, 8, 16)], [(3, 4, 16)], ("product nn", (4.0, 8.0, 16.0), 3.0)),
        ("gelu", [(4, 8)], [(4, 8)], ("gelu", (32.0,), 1.0)),
        ("sum", [(4, 8)], [(8,)], ("sum", (32.0,), 1.0)),
        ("embedding", [(100, 8), (3,)], [(3, 8)], ("embedding", (24.0,), 1.0)),
        ("mul", [(4, 6), (1, 6)], [(4, 6)], ("add", ((24 + 6 + 24) / 3,), 1.0)),
        ("empty", [], [(4, 6)], ("", (), 1.0)),
    ],
)
def test_which_table_an_operator_reads(name: str, given: Any, made: Any, described: Any) -> None:
    assert describe(name, [torch.empty(shape) for shape in given], [torch.empty(shape) for shape in made]) == described


def test_factors_as_they_lie_in_memory() -> None:
    x, weight = torch.empty(4, 8), torch.empty(16, 8)
    assert describe("mm", [x, weight.t()], [x])[:2] == ("product nt", (4.0, 8.0, 16.0))
    assert describe("mm", [torch.empty(4, 16).t(), x], [x])[:2] == ("product tn", (16.0, 4.0, 8.0))


@pytest.mark.long
def test_two_ranks_measure_this_host(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here, run = tmp_path / "here.json", tmp_path / "run.json"
    assert main(["plan", "--calibrate", str(here), "--world", "2"]) == 0
    grid = {"parallel": {"tensor": 2}, "optimizer": {"type": "AdamW"}, "train_micro_batch_size_per_gpu": 2}
    run.write_text(json.dumps(grid))
    capsys.readouterr()
    assert main(["plan", str(run), "--world", "2", "--gpu", str(here), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["step_seconds"] > 0 and found["seconds"]["tp"] > 0


def test_a_world_of_no_ranks_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--calibrate", str(tmp_path / "here.json"), "--world", "0"]) == 1
    assert "--calibrate with --world 0: it measures 1 or more ranks" in capsys.readouterr().err
