"""Hugging Face's Trainer over the engine trains, evaluates, saves and goes on as the Trainer alone does."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.engine.huggingface.host_runs import Case, Ran, folder_logits, run, state_of

EXACT = 1e-5
"""Largest relative difference of a loss in fp32."""
HALF = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2}
"""Rows of each of two data ranks, where the host alone has twice as many."""
PLAIN = {"eval_strategy": "no", "save_strategy": "no", "load_best_model_at_end": False}
Grid = tuple[int, Mapping[str, Any], Mapping[str, Any]]
"""Ranks, the engine's configuration, arguments."""
GRIDS: Mapping[str, Grid] = {
    "dp2": (2, {}, HALF),
    "tp2": (2, {"parallel": {"tensor": 2}}, {}),
    "zero3": (2, {"zero_optimization": {"stage": 3}}, HALF),
    "pp2": (2, {"parallel": {"pipeline": 2}}, {}),
    "cp2": (2, {"parallel": {"context": 2}}, {}),
}
FURTHER: Mapping[str, Grid] = {
    "alone": (1, {}, {}),
    "zero1": (2, {"zero_optimization": {"stage": 1}}, HALF),
    "zero2": (2, {"zero_optimization": {"stage": 2}}, HALF),
    "dp2 x pp2": (4, {"parallel": {"pipeline": 2}, "zero_optimization": {"stage": 1}}, HALF),
    "dp2 x tp2": (4, {"parallel": {"tensor": 2}, "zero_optimization": {"stage": 3}}, HALF),
}
pytestmark = pytest.mark.long  # every run imports transformers' Trainer in each rank


class Runs:
    """Each run once; several tests look at the same."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self._factory = factory
        self._done: dict[str, tuple[Ran, Path]] = {}

    def __call__(self, name: str, **changes: Any) -> tuple[Ran, Path]:
        key = f"{name} {changes}"
        if key not in self._done:
            folder = self._factory.mktemp("run")
            ranks, config, arguments = {**GRIDS, **FURTHER}[name] if name != "host" else (1, None, {})
            arguments = {**arguments, **changes.pop("arguments", {})}
            case = replace(Case(folder=str(folder), config=config, arguments=arguments), **changes)
            self._done[key] = run(case, ranks), folder
        return self._done[key]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory)


def assert_same(found: Ran, host: Ran, *names: str) -> None:
    for name in names:
        left, right = found.of(name), host.of(name)
        assert left.keys() == right.keys() and left, name
        for step, value in left.items():
            assert value == pytest.approx(right[step], rel=EXACT, abs=1e-9), (name, step, left, right)


@pytest.mark.parametrize("grid", [*GRIDS, *FURTHER])
def test_logs_are_those_of_the_host_alone(grid: str, runs: Runs) -> None:
    found, host = runs(grid)[0], runs("host")[0]
    assert_same(found, host, "loss", "learning_rate", "eval_loss", "eval_rows", "eval_right", "train_loss")
    for step, norm in found.of("grad_norm").items():
        assert norm == pytest.approx(host.of("grad_norm")[step], rel=1e-4)
    assert found.of("total_flos") == host.of("total_flos")
    assert found.calls == host.calls == {
        "step begin": 8, "step end": 8, "substep end": 8, "evaluate": 3, "save": 3
    }  # fmt: skip


@pytest.mark.parametrize("grid", GRIDS)
def test_a_checkpoint_loads_in_transformers_and_the_best_is_loaded_at_the_end(grid: str, runs: Runs) -> None:
    found, folder = runs(grid)
    best = Path(state_of(folder / "checkpoint-8")["best_model_checkpoint"])
    assert best.parent == folder and {f"checkpoint-{step}" for step in (3, 6, 8)} == {p.name for p in folder.iterdir()}
    assert len(found.logits) == 10
    assert found.logits == pytest.approx(folder_logits(best), rel=1e-4, abs=1e-4)
    names = {name.removeprefix("checkpoint-6/") for name in found.names if name.startswith("checkpoint-6/")}
    assert {
        "config.json", "model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json",
        "trainer_state.json", "engine/step-00000006/COMMIT",
    } <= names  # fmt: skip
    assert "optimizer.pt" not in names


@pytest.mark.parametrize(("begun", "grid"), [*((grid, grid) for grid in GRIDS), ("zero3", "pp2"), ("tp2", "dp2")])
def test_a_resumed_run_has_the_losses_of_one_that_went_on(begun: str, grid: str, runs: Runs) -> None:
    """From a checkpoint inside an epoch, on the same grid or another."""
    whole = runs(begun)[0]
    resumed = runs(grid, resume=str(runs(begun)[1] / "checkpoint-3"))[0]
    assert_same(resumed, whole, "loss", "eval_loss", "learning_rate")
    assert resumed.calls["step end"] == 5


@pytest.mark.parametrize("grid", ["tp2", "pp2"])
def test_the_last_step_of_an_epoch_may_have_fewer_rows(grid: str, runs: Runs) -> None:
    """26 rows: three steps of eight, and one of two."""
    assert_same(runs(grid, rows=26)[0], runs("host", rows=26)[0], "loss", "train_loss")


@pytest.mark.parametrize("grid", GRIDS)
def test_label_smoothing(grid: str, runs: Runs) -> None:
    smooth = PLAIN | {"label_smoothing_factor": 0.1}
    found, host = (runs(name, arguments=smooth)[0] for name in (grid, "host"))
    assert_same(found, host, "loss")
    assert host.of("loss")[1] != runs("host")[0].of("loss")[1]


@pytest.mark.parametrize("grid", GRIDS)
def test_a_loss_of_the_users(grid: str, runs: Runs) -> None:
    found, host = (runs(name, own_loss=True)[0] for name in (grid, "host"))
    assert_same(found, host, "loss")


@pytest.mark.parametrize("grid", [*GRIDS, "dp2 x pp2"])
def test_a_subclass_computes_the_loss(grid: str, runs: Runs) -> None:
    """The last step of an epoch has fewer rows, and so has the last microbatch of evaluation."""
    found, host = (runs(name, subclass=True, rows=30 if grid == "pp2" else 32)[0] for name in (grid, "host"))
    assert_same(found, host, "loss", "eval_loss", "eval_right", "train_loss", "learning_rate")
    assert found.metrics["test_right"] == host.metrics["test_right"]
    assert host.of("loss")[1] != runs("host")[0].of("loss")[1] and found.calls == host.calls


@pytest.mark.parametrize("grid", GRIDS)
def test_bf16_is_autocast_as_the_host_has_it(grid: str, runs: Runs) -> None:
    found, host = (runs(name, arguments=PLAIN | {"bf16": True})[0].of("loss") for name in (grid, "host"))
    exact = runs("host")[0].of("loss")
    assert list(found) == list(exact) and list(found.values()) != list(exact.values())
    assert list(found.values()) == pytest.approx(list(host.values()), rel=2e-3)


@pytest.mark.parametrize("grid", GRIDS)
def test_a_stream_of_rows(grid: str, runs: Runs) -> None:
    """It has no first microbatch for the plan, which is made when one comes."""
    found, host = (runs(name, stream=True, rows=64, arguments=PLAIN | {"max_steps": 5})[0] for name in (grid, "host"))
    assert_same(found, host, "loss")
    assert found.calls == {"step begin": 5, "step end": 5, "substep end": 5}


@pytest.mark.parametrize("grid", GRIDS)
def test_evaluation_may_come_first_and_training_twice(grid: str, runs: Runs) -> None:
    found, host = (runs(name, twice=True, arguments=PLAIN)[0] for name in (grid, "host"))
    assert_same(found, host, "loss", "learning_rate")
    assert found.of("loss")[1] < runs("host")[0].of("loss")[1]


@pytest.mark.parametrize(
    ("ranks", "parallel"), [(2, {"expert": 2}), (4, {"data": 2, "expert": 2, "pipeline": 2})], ids=["ep2", "ep2 x pp2"]
)
def test_a_mixture_whose_experts_data_ranks_share_trains_as_the_host_alone(
    ranks: int, parallel: dict[str, int], tmp_path: Path
) -> None:
    host = run(Case(folder=str(tmp_path / "host"), experts=True), 1)
    folder = tmp_path / "found"
    found = run(Case(folder=str(folder), experts=True, config={"parallel": parallel}, arguments=HALF), ranks)
    assert_same(found, host, "loss", "learning_rate", "eval_loss", "eval_rows", "eval_right", "train_loss")
    best = Path(state_of(folder / "checkpoint-8")["best_model_checkpoint"])
    assert found.logits == pytest.approx(folder_logits(best), rel=1e-4, abs=1e-4)
