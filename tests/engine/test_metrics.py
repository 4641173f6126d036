"""Further values of ``loss_fn``: averaged as they say, equal on every rank and on every grid, in every sink."""

import csv
import json
import math
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import engine
from engine.errors import ConfigError, EngineError
from engine.models.decoder import loss_sum
from engine.parallel.comm.threads import run_thread_ranks
from engine.parallel.comm.world import World
from engine.reporting.sinks import make_sinks
from engine.reporting.step_report import StepReport
from tests import models
from tests.resumed_runs import own_rows
from tests.selection import wide

NAMES = ["accuracy", "entropy"]
CONFIG: dict[str, Any] = {
    "train_batch_size": 8, "train_micro_batch_size_per_gpu": 1, "monitor": {"metrics": NAMES, "every": 1},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-5}},
}  # fmt: skip
BATCHES: list[dict[str, Tensor]] = models.batches_for("decoder", 8, 3)


def with_metrics(logits: Tensor, batch: Mapping[str, Tensor]) -> Any:
    """Counts by token and a mean by microbatch, as a user would write them."""
    total, weight = loss_sum(logits, batch)
    right = (logits.argmax(-1) == batch["labels"]).sum()
    log = logits.float().log_softmax(-1)
    entropy = -(log.exp() * log).sum(-1).mean()
    return total, weight, {"entropy": entropy, "accuracy": (right, batch["labels"].numel())}


def rank(settings: Mapping[str, Any], world: World) -> tuple[list[StepReport], StepReport, dict[Any, Any]]:
    config = engine.load_config(settings, world.size)
    with engine.initialize(models.decoder, config, with_metrics, world=world) as eng:
        mine = [own_rows(eng, batch) for batch in BATCHES]
        reports = [eng.train_batch(mine[0])]
        before = eng.sent
        reports.append(eng.train_batch(mine[1]))
        sent: Any = {(row.axis, row.label): row.bytes for row in eng.sent.since(before).rows()}
        planned = {(row.axis, row.label): row.bytes for row in eng.plan.rank(eng.grid.rank).traffic}
        differs = {
            key: (sent.get(key), planned.get(key)) for key in sent | planned if sent.get(key) != planned.get(key)
        }
        return reports, eng.eval_batch(mine[2]), differs


def on(**parallel: Any) -> list[Any]:
    ranks = 1
    for size in parallel.values():
        ranks *= size if isinstance(size, int) else 1
    return run_thread_ranks(ranks, partial(rank, CONFIG | {"parallel": parallel}))


GRIDS = [{"data": 2}, {"pipeline": 2}, wide({"tensor": 2}), wide({"data": 2, "tensor": 2, "pipeline": 2})]


@pytest.mark.parametrize("parallel", GRIDS, ids=str)
def test_every_grid_has_the_metrics_of_one_process(parallel: dict[str, int]) -> None:
    ((alone, evaluated, _),) = on(data=1)
    assert set(alone[0].metrics) == set(NAMES) and alone[0].metrics["entropy"] > 0
    found = on(**parallel)
    for reports, evaluation, differs in found:
        for report, expected in zip([*reports, evaluation], [*alone, evaluated], strict=True):
            assert report.metrics == pytest.approx(expected.metrics, rel=1e-5)
        assert reports[0].metrics == found[0][0][0].metrics, "the same bits on every rank"
        assert not differs, "sums of metrics travel with the loss, as planned"


def test_a_sum_and_weight_is_averaged_by_weight() -> None:
    model = torch.nn.Linear(2, 1)

    def weighed(output: Tensor, batch: Tensor) -> Any:
        numpy = batch[0].numpy()
        return output.square().mean(), {
            "by weight": (batch.sum(), batch[0, 0]), "plain": batch[0, 0], "numpy": (numpy[1], numpy[0]),
        }  # fmt: skip

    settings = CONFIG | {"monitor": {"metrics": ["plain", "by weight", "numpy"]}, "train_batch_size": 2}
    with engine.initialize(model, settings, weighed) as eng:
        report = eng.train_batch(torch.tensor([[1.0, 5.0], [3.0, 6.0]]))
    assert report.metrics == {"plain": 2.0, "by weight": 15 / 4, "numpy": 11 / 4}


def looped(settings: Mapping[str, Any], world: World) -> list[dict[str, float]]:
    """Metrics of two steps of a loop of the user's own."""
    config = engine.load_config(settings, world.size)
    found = []
    with engine.initialize(models.decoder, config, world=world) as eng:
        start = eng.grid.coord().dp * config.micro * config.accumulation
        for batch in BATCHES[:2]:
            for row in range(start, start + config.micro * config.accumulation):
                mine = {key: value[row : row + 1] for key, value in batch.items()}
                total, weight, metrics = with_metrics(eng(mine["input_ids"]), mine)
                eng.backward((total, weight), metrics=metrics)
            report = eng.step()
            assert report is not None
            found.append(dict(report.metrics))
    return found


@pytest.mark.parametrize("ranks", [1, wide(2)])
def test_a_loop_of_your_own_gives_them_to_backward(ranks: int) -> None:
    ((alone, _, _),) = on(data=1)
    for found in run_thread_ranks(ranks, partial(looped, CONFIG | {"parallel": {"data": ranks}})):
        for metrics, report in zip(found, alone, strict=True):
            assert metrics == pytest.approx(report.metrics, rel=1e-5)


def test_what_backward_is_not_given_counts_nothing() -> None:
    with engine.initialize(torch.nn.Linear(2, 1), CONFIG | {"train_batch_size": 2}) as eng:
        with pytest.raises(EngineError, match=r'backward was given the metric "a", which monitor\.metrics does not'):
            eng.backward(eng(torch.ones(1, 2)).mean(), metrics={"a": 1.0})
        for value in ({"accuracy": (3, 4)}, {}):
            eng.backward(eng(torch.ones(1, 2)).mean(), metrics=value)
        report = eng.step()
    assert report is not None and report.metrics["accuracy"] == 0.75 and math.isnan(report.metrics["entropy"])


def failure(loss_fn: Callable[..., Any], **monitor: Any) -> str:
    settings = CONFIG | {"monitor": monitor}
    with engine.initialize(torch.nn.Linear(2, 1), settings, loss_fn) as eng, pytest.raises(EngineError) as caught:
        eng.train_batch(torch.ones(8, 2))
    return str(caught.value)


@pytest.mark.parametrize(
    ("metrics", "names", "sentence"),
    [
        (
            {"a": 1.0},
            [],
            ('loss_fn returned the metric "a", which monitor.metrics does not name; add it to'),
        ),
        ({}, ["a"], 'loss_fn returned no metric "a", which monitor.metrics names; return (loss, {"a": value}) for'),
        (
            {"a": torch.ones(2)},
            ["a"],
            'the metric "a" that loss_fn returned is a tensor of shape (2,); give a',
        ),
        ({"a": "high"}, ["a"], 'the metric "a" that loss_fn returned is a str; give a number, a 0-dim tensor, or'),
        ({"a": None}, ["a"], 'the metric "a" that loss_fn returned is a NoneType; give a number, a 0-dim tensor, or'),
        ({"a": [1.0]}, ["a"], 'the metric "a" that loss_fn returned is a list; give a number, a 0-dim tensor, or'),
        ({"a": (1.0, "all")}, ["a"], 'the metric "a" that loss_fn returned is a str; give a number, a 0-dim tensor,'),
        (
            {"a": torch.tensor(1j)},
            ["a"],
            'the metric "a" that loss_fn returned is a complex64 tensor of shape ()',
        ),
    ],
)
def test_what_is_no_metric_is_one_sentence(metrics: dict[str, Any], names: list[str], sentence: str) -> None:
    said = failure(lambda output, batch: (output.square().mean(), metrics), metrics=names)
    assert said.startswith(sentence) and "\n" not in said


def trained(**monitor: Any) -> list[StepReport]:
    told: list[StepReport] = []
    settings = CONFIG | {"monitor": {"metrics": NAMES, "every": 1} | monitor}
    with engine.initialize(models.decoder, settings, with_metrics) as eng:
        eng.add_callback(told.append)
        reports = [eng.train_batch(batch) for batch in BATCHES[:2]]
    assert told == reports, "a callback is given every report"
    return reports


def test_files_hold_the_metrics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines, table = tmp_path / "steps.jsonl", tmp_path / "log/steps.csv"
    reports = [*trained(jsonl=str(lines), csv=str(table), progress=True), *trained(csv=str(table))]
    said = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [line["metrics"] for line in said] == [dict(report.metrics) for report in reports[:2]]
    with table.open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["loss"]) for row in rows] == [report.loss for report in reports], "a second run goes on"
    assert [float(row["metrics/accuracy"]) for row in rows] == [report.metrics["accuracy"] for report in reports]
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert len(shown) == 2 and f"entropy {reports[0].metrics['entropy']:.4g}" in shown[0]


def test_a_sink_that_fails_to_close_leaves_no_other_open(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []

    class Sink:
        def __init__(self, name: str) -> None:
            self.name = name

        def write(self, report: StepReport) -> None:
            pass

        def close(self) -> None:
            closed.append(self.name)
            if self.name == "first":
                raise ConnectionError("of a server")

    monkeypatch.setattr("engine.reporting.sinks.make_sinks", lambda config: [Sink("first"), Sink("second")])
    eng = engine.initialize(models.decoder(), CONFIG, loss_fn=loss_sum)
    with pytest.raises(ConnectionError, match="of a server"):
        eng.close()
    assert closed == ["first", "second"]


def test_a_table_with_other_columns_is_not_mixed_up(tmp_path: Path) -> None:
    (tmp_path / "steps.csv").write_text("step,loss\n1,2\n")
    config = engine.load_config({"train_batch_size": 8, "monitor": {"csv": str(tmp_path / "steps.csv")}}, 1)
    with pytest.raises(ConfigError, match="has other columns than this run would write"):
        make_sinks(config)


@pytest.mark.long
def test_mlflow_gets_every_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/runs.db")
    reports = trained(mlflow="text")
    from mlflow import MlflowClient

    client = MlflowClient()
    experiment: Any = client.get_experiment_by_name("text")
    (run,) = client.search_runs([str(experiment.experiment_id)])
    assert [point.value for point in client.get_metric_history(run.info.run_id, "train/loss")] == [
        report.loss for report in reports
    ]
    assert run.data.metrics["metrics/accuracy"] == reports[-1].metrics["accuracy"]
    assert run.data.params["optimizer.params.lr"] == "0.01" and run.info.status == "FINISHED"


class Recorded:
    """In the place of the package: what a run of Weights & Biases is told."""

    def __init__(self) -> None:
        self.given: dict[str, Any] = {}
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.finished = False

    def init(self, **given: Any) -> "Recorded":
        self.given = given
        return self

    def log(self, numbers: dict[str, float], step: int) -> None:
        self.rows.append((step, numbers))

    def finish(self) -> None:
        self.finished = True


def test_a_run_of_weights_and_biases_is_told_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    package = Recorded()
    monkeypatch.setitem(sys.modules, "wandb", package)
    monkeypatch.setattr("engine.config.sections.find_spec", lambda name: name)  # looks for files, not for modules
    reports = trained(wandb="text")
    assert package.finished and package.given["project"] == "text"
    assert package.given["config"]["optimizer"]["params"]["lr"] == 1e-2
    assert [(step, row["train/loss"], row["metrics/entropy"]) for step, row in package.rows] == [
        (report.step, report.loss, report.metrics["entropy"]) for report in reports
    ]


@pytest.mark.long
def test_weights_and_biases_gets_every_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}.items():
        monkeypatch.setenv(key, value)
    reports = trained(wandb="text")
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    written = next(folder.glob("*.wandb")).read_bytes()
    assert b"train/loss" in written and b"metrics/accuracy" in written
    assert str(reports[-1].metrics["accuracy"]).encode() in written
