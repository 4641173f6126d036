"""Tensors that are not rows of the batch go to every microbatch whole, by their names, inside the hosts' loops too."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.engine.huggingface.picture_models import PATCHES, PICTURES, Pictured, run_pictured

GRIDS: Mapping[str, tuple[int, Mapping[str, Any]]] = {
    "tp2": (2, {"parallel": {"tensor": 2}}),
    "pp2": (2, {"parallel": {"pipeline": 2}}),
    "tp2 x pp2": (4, {"parallel": {"tensor": 2, "pipeline": 2}}),
}
pytestmark = pytest.mark.long  # every run imports transformers' Trainer in each rank


@pytest.mark.parametrize("loop", ["trainer", "accelerator", "lightning"])
@pytest.mark.parametrize("grid", GRIDS)
def test_models_of_pictures_train_as_in_the_host_alone(grid: str, loop: str, tmp_path: Path) -> None:
    """Two microbatches a step; evaluation over more rows than a microbatch has, and positions of three rows."""
    ranks, config = GRIDS[grid]
    models = PATCHES if loop != "lightning" else PATCHES[:1]  # Lightning makes one run in a process
    run = Pictured(folder=str(tmp_path), loop=loop, models=models)
    host, found = run_pictured(run, 1), run_pictured(replace(run, config=config), ranks)
    for name, values in host.items():
        assert len(values) == {"trainer": 7, "accelerator": 9, "lightning": 6}[loop], values
        assert found[name] == pytest.approx(values, rel=1e-4), name


@pytest.mark.parametrize("grid", ["tp2", "pp2"])
def test_models_of_pictures_of_one_size_train_as_in_the_trainer_alone(grid: str, tmp_path: Path) -> None:
    host = run_pictured(Pictured(folder=str(tmp_path), models=PICTURES), 1)
    found = run_pictured(Pictured(folder=str(tmp_path), models=PICTURES, config=GRIDS[grid][1]), 2)
    for name, values in host.items():
        assert len(values) == 7 and found[name] == pytest.approx(values, rel=1e-4), name


@pytest.mark.parametrize("stage", [0, 3])
def test_two_data_ranks(stage: int, tmp_path: Path) -> None:
    half = {"per_device_eval_batch_size": 4}
    models = (*PATCHES, *PICTURES)
    run = Pictured(folder=str(tmp_path), arguments={"per_device_train_batch_size": 1} | half, models=models)
    host = run_pictured(run, 2)
    found = run_pictured(replace(run, config={"zero_optimization": {"stage": stage}}), 2)
    for name, values in host.items():
        assert len(values) == 7 and found[name] == pytest.approx(values, rel=1e-4), name


def test_without_names_the_first_microbatch_tells_what_has_no_rows(tmp_path: Path) -> None:
    host = run_pictured(Pictured(folder=str(tmp_path), models=("positions",)), 1)
    run = Pictured(folder=str(tmp_path), config=GRIDS["pp2"][1], whole=(), models=("positions",))
    assert run_pictured(run, 2)["positions"] == pytest.approx(host["positions"], rel=1e-4)
