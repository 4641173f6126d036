"""The user's model under a pipeline: what reads parameters of other stages gets one sentence instead of NaNs."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import engine
from engine.models.decoder import loss_sum
from tests import models

RunRanks = Callable[..., list[Any]]
CONFIG = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
}


def forward(model: nn.Module) -> None:
    model(**models.batches_for("decoder", 2, 1)[0])


def generate(model: nn.Module) -> None:
    model.generate(models.token_batches(1, 1)[0][:, :4], max_new_tokens=2, do_sample=False)  # type: ignore[operator]


def save_pretrained(model: nn.Module, folder: str) -> None:
    model.save_pretrained(folder)  # type: ignore[operator]


def average(model: nn.Module) -> None:
    """A moving average of the weights, as people write it."""
    for parameter in model.parameters():
        torch.zeros_like(parameter).lerp_(parameter.data, 0.1)


def norm(model: nn.Module) -> None:
    sum(parameter.norm() for parameter in model.parameters())


def save(model: nn.Module) -> None:
    torch.save(model.state_dict(), io.BytesIO())


READS: tuple[Callable[[nn.Module], Any], ...] = (
    forward, average, norm, save, copy.deepcopy, nn.Module.state_dict,
)  # fmt: skip


def words(model: nn.Module, read: Callable[..., Any], *args: Any) -> str:
    try:
        with torch.no_grad():
            read(model, *args)
    except engine.EngineError as error:
        return str(error)
    return "nothing was said"


def told(grid: dict[str, int], stage: int) -> tuple[list[str], list[str], bool]:
    """Body of a rank: what each way to read says, open and closed, and whether training goes on as if nobody had."""
    config = CONFIG | {"parallel": grid, "zero_optimization": {"stage": stage}}
    batches = models.batches_for("decoder", 8 // grid.get("data", 1), 3)
    losses: list[list[float]] = []
    for reads in ((), READS):
        with engine.initialize(models.decoder(), config, loss_sum) as eng:
            losses.append([eng.train_batch(batches[0]).loss])
            said = [words(eng.module, read) for read in reads]
            losses[-1] += [eng.train_batch(batch).loss for batch in batches[1:]]
            losses[-1].append(eng.eval_batch(batches[0]).loss)
            full = eng.full_state_dict()
            with eng.full_parameters() as mine:
                assert not any(parameter.isnan().any() for parameter in mine.values())
            assert sum(p.numel() for p in eng.module.parameters()) == sum(
                p.numel() for p in models.decoder().parameters()
            )
    assert not any(value.isnan().any() for value in full.values())
    return said, [words(eng.module, read) for read in READS], losses[0] == losses[1]


@pytest.mark.parametrize(
    ("grid", "stage"),
    [({"pipeline": 2}, 0), pytest.param({"pipeline": 2, "data": 2}, 3, marks=pytest.mark.long)],
)
def test_reading_the_parameters_of_another_stage(run_ranks: RunRanks, grid: dict[str, int], stage: int) -> None:
    for said, after, same in run_ranks(told, 2 * grid.get("data", 1), grid, stage):
        for text in said:
            assert ("on pipeline rank" in text and "eng.full_state_dict()" in text) or "eng.full_parameters" in text, (
                said
            )
        assert all("engine is closed" in text for text in after), after
        assert same


def hugging_face(folder: str) -> list[str]:
    """Body of a rank."""
    config = CONFIG | {"parallel": {"pipeline": 2}}
    with engine.initialize(models.llama(), config, example_batch=models.batches_for("llama", 2, 1)[0]) as eng:
        said = [words(eng.module, generate), words(eng.module, save_pretrained, f"{folder}/theirs")]
        eng.save_pretrained(f"{folder}/ours")
        assert "on pipeline rank" in repr(list(eng.module.parameters()))
    return said


def test_methods_of_a_hugging_face_model(run_ranks: RunRanks, tmp_path: Any) -> None:
    for said in run_ranks(hugging_face, 2, str(tmp_path)):
        assert all("eng.save_pretrained(folder)" in text for text in said), said
        assert "on pipeline rank" in said[0] and "the part of its parameters that this rank has" in said[1], said
    assert (tmp_path / "ours" / "config.json").exists()
