"""Checkpoints without frozen parameters: those of adapters alone, which go on on any grid."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from torch import Tensor

import engine
from tests import models
from tests.engine.parity.adapted_models import ADAPTED
from tests.engine.parity.launches import settings
from tests.engine.parity.test_axes import same
from tests.models import take_rows

RunRanks = Callable[..., list[Any]]
NAME = "Llama with LoRA"


def keys_of(folder: Path) -> list[str]:
    keys: list[str] = []
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            keys += opened.keys()
    return keys


def goes_on(changes: dict[str, Any], folder: str, steps: tuple[int, int]) -> tuple[list[float], dict[str, Tensor]]:
    """Body of a rank: load what is there, take some of the steps, and save."""
    model = ADAPTED[NAME]
    config = settings(1, **changes) | {"checkpoint": {"folder": folder, "frozen": False}}
    config["train_batch_size"] = 8
    batches = [model.batches(8)[0], *model.batches(8)[1:], model.batches(8)[0]]
    with engine.initialize(model.build, config, example_batch=take_rows(batches[0], 0, 2)) as eng:
        eng.load_checkpoint(missing_ok=True)
        rows, first = eng.config.micro * eng.config.accumulation, eng.grid.coord().dp
        reports = [eng.train_batch(take_rows(batch, first * rows, rows)) for batch in batches[slice(*steps)]]
        eng.save_checkpoint().wait()
        return [report.loss for report in reports], eng.full_state_dict()


@pytest.mark.long
def test_adapters_alone_go_on_on_another_grid(run_ranks: RunRanks, tmp_path: Path) -> None:
    tensor: dict[str, Any] = {"parallel": {"tensor": 2}}
    sharded: dict[str, Any] = {"parallel": {"data": 2}, "zero_optimization": {"stage": 3}}
    (whole, weights), _ = run_ranks(goes_on, 2, tensor, str(tmp_path / "whole"), (0, 4))
    (begun, _), _ = run_ranks(goes_on, 2, tensor, str(tmp_path / "run"), (0, 2))
    (ended, found), _ = run_ranks(goes_on, 2, sharded, str(tmp_path / "run"), (2, 4))
    assert [*begun, *ended] == pytest.approx(whole, rel=1e-6)
    for name, weight in weights.items():
        assert (weight - found[name]).abs().max() < 1e-5, name
    step = tmp_path / "run/step-00000002"
    keys = keys_of(step / "model")
    assert len(keys) == 2 * 7 * 2 and all(".lora_" in key for key in keys)
    assert not (step / "model/config.json").exists()
    assert json.loads((step / "model/model.safetensors.index.json").read_text())["weight_map"].keys() == set(keys)


@pytest.mark.long
def test_the_folder_of_a_model_is_whole_though_its_checkpoints_are_not(tmp_path: Path) -> None:
    model: Any = models.llama()
    model.model.embed_tokens.requires_grad_(False)
    batch, frozen = models.batches_for("llama", 2, 1)[0], "model.embed_tokens.weight"
    config = {
        "train_batch_size": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "checkpoint": {"folder": str(tmp_path / "run"), "frozen": False},
    }
    with engine.initialize(model, config, example_batch=batch) as eng:
        eng.train_batch(batch)
        step = eng.save_checkpoint().wait()
        eng.save_pretrained(tmp_path / "folder")
        state = eng.full_state_dict()
    kind: Any = type(model)
    assert same(kind.from_pretrained(tmp_path / "folder").state_dict(), state)
    assert sorted([*keys_of(step / "model"), frozen]) == sorted(state)
