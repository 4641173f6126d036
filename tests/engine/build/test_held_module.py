"""Copies and pickles of a model that an engine trains, and of the engine: they work, or one sentence says why not."""

import copy
import io
import pickle
from collections.abc import Callable
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from tests.engine.every_grid import every_grid

BATCH = torch.arange(32.0).reshape(4, 8).sin()


def saved(thing: object) -> None:
    torch.save(thing, io.BytesIO())


CALLS: dict[str, Callable[[engine.Engine], object]] = {
    "torch.save(eng.module)": lambda eng: saved(eng.module),
    "pickle.dumps(eng.module)": lambda eng: pickle.dumps(eng.module),
    "torch.save(eng)": lambda eng: saved(eng),
    "copy.copy(eng)": lambda eng: copy.copy(eng),
    "copy.deepcopy(eng)": lambda eng: copy.deepcopy(eng),
    "copy.deepcopy(eng.module)": lambda eng: copy.deepcopy(eng.module),
}


def answers(parallel: dict[str, int], stage: int) -> tuple[dict[str, str], bool]:
    """What each call says, empty where it works; whether a copy has the outputs of the model, where there is one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    config = {
        "parallel": parallel,
        "zero_optimization": {"stage": stage},
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "adamw"},
    }
    told, same = dict[str, str](), True
    with engine.initialize(model, config, lambda output, batch: output.square().mean(), BATCH) as eng:
        eng.train_batch(BATCH)
        for name, call in CALLS.items():
            try:
                found = call(eng)
                told[name] = ""
                if isinstance(found, nn.Module):
                    same = torch.equal(found(BATCH), eng.module(BATCH)) and not {"__reduce_ex__"} & vars(found).keys()
                    saved(copy.deepcopy(found).state_dict())
            except engine.EngineError as error:
                told[name] = str(error)
        eng.train_batch(BATCH)
    if stage < 3 and parallel.get("pipeline", 1) == 1:
        saved(model)
    return told, same


@pytest.mark.parametrize(("parallel", "stage"), every_grid("dp2-zero1"))
def test_each_works_or_says_what_to_do(run_ranks: Callable[..., Any], parallel: dict[str, int], stage: int) -> None:
    for told, same in run_ranks(answers, prod(parallel.values()), parallel, stage):
        assert same
        for name, text in told.items():
            assert "eng.full_state_dict()" in text or "full_parameters" in text or "deepcopy(eng.module)" in name, text
        assert told["copy.deepcopy(eng)"].startswith("an engine owns process groups")
        if stage < 3 and "pipeline" not in parallel:
            assert told["torch.save(eng.module)"].startswith("the Sequential is trained by an engine, whose hooks and")
            assert not told["copy.deepcopy(eng.module)"]


@pytest.mark.parametrize("mode", ["full", "selective", "offload"])
def test_a_copy_computes_with_its_own_parameters(mode: str) -> None:
    """Casts to fp32 and recomputation go around forwards of the copy, also of a part of the model."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(2)))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "keep_fp32": ["*.1"],
        "activation_checkpointing": {"mode": mode},
    }
    x = BATCH.bfloat16()
    with engine.initialize(model, config | {"optimizer": {"type": "adamw"}}, lambda output, _: output.sum()) as eng:
        eng.train_batch(BATCH)
        for copied in (copy.deepcopy(model), copy.deepcopy(copy.deepcopy(model)), copy.deepcopy(model[1])):
            for parameter in copied.parameters():
                nn.init.zeros_(parameter)
            copied(x).sum().backward()
            assert not copied(x).any() and all(parameter.grad is not None for parameter in copied.parameters())
        assert model(x).any()


class Scaled(nn.Module):
    """A layer that keeps a tensor as a plain attribute."""

    def __init__(self, kept: Callable[[], object]) -> None:
        super().__init__()
        self.layer, self.kept = nn.Linear(8, 8), kept()

    def forward(self, x: Tensor) -> Tensor:
        kept: Any = self.kept
        scale: Tensor = kept if isinstance(kept, Tensor) else kept[0]
        return torch.mul(self.layer(x), scale)


@pytest.mark.parametrize("kept", [lambda: torch.ones(8), lambda: [torch.ones(8)]])
def test_a_meta_tensor_that_is_no_buffer_is_named(kept: Callable[[], object]) -> None:
    with torch.device("meta"):
        model = nn.Sequential(Scaled(kept))
    config = {"train_batch_size": 4, "optimizer": {"type": "adamw"}}
    with (
        engine.initialize(model, config, lambda output, batch: output.square().mean()) as eng,
        pytest.raises(engine.EngineError, match=r"^0.kept of the model is a tensor on the meta device that is neither"),
    ):
        eng.train_batch(BATCH)
