"""What calibration measures: a table for every class of operators, on inputs that a cache does not hold."""

import json
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.launch.cli import main
from engine.launch.planner.calibration import operator_samples as sampling
from engine.launch.planner.calibration.operator_samples import OperatorSamples
from engine.launch.planner.calibration.operator_seconds import LINE, MeasuredOperator, OperandPool, measured_operators
from engine.parallel.comm.world import World
from engine.planning.host_step.operator_classes import ATTENTION, PASSES, describe


def test_every_class_has_a_table() -> None:
    known = {name for name, _ in measured_operators()}
    products = {"product nt", "product nn", "product tn"}
    attention = {f"{kind}{way}" for kind in ATTENTION.values() for way in ("", " backward")}
    assert known == {*PASSES.values(), *products, *attention, "add", "update", "squared norm"}


def test_every_operator_runs_on_its_inputs() -> None:
    pool = OperandPool(1 << 20)
    for _, one in measured_operators():
        one.call(*one.make(pool, *(steps[0] for steps in one.sizes)))


def test_attention_finds_its_results_as_its_forward_leaves_them() -> None:
    operator = dict(measured_operators())["attention backward"]
    query, key, value, out, sums, grad = operator.make(OperandPool(1 << 20), 32, 64)
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    for given, made in zip((out, sums, grad), (*(left := forward(query, key, value)), left[0]), strict=True):
        assert (given.shape, given.stride()) == (made.shape, made.stride())


def test_inputs_lie_one_behind_the_other_and_then_at_the_start() -> None:
    pool = OperandPool(200)
    first, second = pool.take(4, 16), pool.take(64)
    assert first.shape == (4, 16) and (second.data_ptr() - first.data_ptr()) // 4 == 64 + 2 * LINE
    assert pool.take(64).data_ptr() == first.data_ptr()
    pool.rewind()
    assert pool.take(1).data_ptr() == first.data_ptr()


class LoneRank:
    """A job of one rank."""

    def __init__(self, seen: list[Any]) -> None:
        self.world = self.alone = World(0, 1, 0, torch.device("cpu"))
        self.met: list[int] = []
        self._seen = seen

    def ready(self) -> None:
        self.met.append(len(self._seen))

    def mean(self, values: Sequence[float]) -> tuple[float, ...]:
        return tuple(values)


def counted(sizes: tuple[tuple[int, ...], ...], seen: list[Any], share: float = 1.0) -> MeasuredOperator:
    return MeasuredOperator(
        sizes=sizes, make=lambda pool, *shape: (pool.take(*shape),), call=seen.append, share=share
    )  # fmt: skip


def test_each_combination_of_sizes_is_sampled_by_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "SAMPLE_SECONDS", 0.0)
    monkeypatch.setattr(sampling, "LEAST_SECONDS", 0.0)
    seen: list[Any] = []
    ranks = LoneRank(seen)
    samples = OperatorSamples([("a", counted(((2, 4), (8,)), seen)), ("b", counted(((3,),), seen))], ranks)
    assert len(seen) == 2 * 3 and not ranks.met  # two calls of each to see how long one takes
    tables = samples.sample()
    assert ranks.met == [6, 6 + 4, 6 + 8] and len(seen) == 6 + 12  # two calls to warm up, and two that count
    assert {name: (table.sizes, len(table.seconds)) for name, table in tables.items()} == {
        "a": (((2.0, 4.0), (8.0,)), 2), "b": (((3.0,),), 1),
    }  # fmt: skip
    assert [tuple(each.shape) for each in seen[6:]] == [(2, 8)] * 4 + [(4, 8)] * 4 + [(3,)] * 4
    assert len({seen[place].data_ptr() for place in (6, 10, 14)}) == 1  # what fits a cache stays in it


def test_large_inputs_are_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "SAMPLE_SECONDS", 0.0)
    monkeypatch.setattr(sampling, "SMALL_BYTES", 64)
    seen: list[Any] = []
    samples = OperatorSamples([("large", counted(((64,),), seen))], LoneRank(seen))
    del seen[:]
    samples.sample()
    samples.sample()
    assert len(seen) == 2 * 3 and len({each.data_ptr() for each in seen}) == 2 * 2  # one of each sample to warm up


def test_seconds_are_those_of_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = count(0.0, 0.5)
    monkeypatch.setattr(time, "thread_time", lambda: next(clock))
    operator = counted(((2,),), [], share=0.25)
    (table,) = OperatorSamples([("slow", operator)], LoneRank([])).sample().values()
    assert table.seconds == (0.25 * 0.5 / 2,)  # a tick passes over the two calls of a sample


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
