"""A norm that the loop says at each step: it is that of torch over all parameters, and the step clips to it."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import engine
from tests import models
from tests.selection import wide

RunRanks = Callable[..., list[Any]]
ROWS, MICROBATCHES = 4, 2
NORMS = (0.3, math.inf, 0.1)
"""Norm to which each step clips."""


def loss_of(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def data(dp: int) -> list[Tensor]:
    return [ids[:, : models.LENGTH] for ids in models.token_batches(ROWS * dp, len(NORMS))]


def in_one_process(dp: int) -> tuple[list[float], dict[str, Tensor]]:
    model, norms = models.decoder(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for batch, max_norm in zip(data(dp), NORMS, strict=True):
        for ids in batch.chunk(dp * MICROBATCHES):
            (loss_of(model(ids), ids) / dp / MICROBATCHES).backward()  # type: ignore[no-untyped-call]
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
        optimizer.step()
        optimizer.zero_grad()
    return norms, {name: value.detach() for name, value in model.named_parameters()}


def on_ranks(grid: dict[str, int], stage: int) -> tuple[float, float] | None:
    """Body of a rank: deviations of norms and weights from one process, on rank 0."""
    dp = grid.get("data", 1)
    config = {
        "train_micro_batch_size_per_gpu": ROWS // MICROBATCHES, "gradient_accumulation_steps": MICROBATCHES,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}}, "zero_optimization": {"stage": stage}, "parallel": grid,
    }  # fmt: skip
    norms, reported = [], []
    with engine.initialize(models.decoder(), config, loss_of, example_batch=data(1)[0]) as eng:
        mine = eng.grid.coord().dp
        for batch, max_norm in zip(data(dp), NORMS, strict=True):
            for index, ids in enumerate(batch.chunk(dp)[mine].chunk(MICROBATCHES)):
                eng.backward(loss_of(eng(ids), ids))
                if index == MICROBATCHES - 1:
                    norms.append(eng.clip_gradients(max_norm))
                if (report := eng.step()) is not None:
                    reported.append(report.grad_norm)
        weights = eng.full_state_dict()
    assert norms == pytest.approx(reported, rel=1e-12), "the step has the norm before clipping too"
    if not weights:
        return None
    expected, whole = in_one_process(dp)
    assert min(expected) > NORMS[0] > NORMS[2], "clipping must be active"
    return (
        max(abs(a - b) / b for a, b in zip(norms, expected, strict=True)),
        max(float((weights[name] - value).abs().max()) for name, value in whole.items()),
    )


@pytest.mark.parametrize(
    ("grid", "stage"), [({"data": 2}, 3), wide({"data": 2}, 0), wide({"data": 2}, 2), wide({"data": 1, "tensor": 2}, 0)]
)
def test_the_norm_is_that_of_one_process(grid: dict[str, int], stage: int, run_ranks: RunRanks) -> None:
    norm, weight = run_ranks(on_ranks, 2, grid, stage, seconds=120.0)[0]
    assert norm <= 1e-5 and weight <= 1e-5


def test_mistakes_are_sentences() -> None:
    config = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
    with engine.initialize(models.decoder(), config, loss_of) as eng:
        (ids, *_) = data(1)
        with pytest.raises(engine.EngineError, match=r"inside an unfinished accumulation \(0 of 2 microbatches\)"):
            eng.clip_gradients(1.0)
        eng.backward(loss_of(eng(ids), ids))
        eng.step()
        with pytest.raises(engine.EngineError, match=r"inside an unfinished accumulation \(1 of 2 microbatches\)"):
            eng.clip_gradients(1.0)
        eng.backward(loss_of(eng(ids), ids))
        with pytest.raises(engine.EngineError, match=r"^clip_gradients was given max_norm 0, but max_norm must be"):
            eng.clip_gradients(0.0)
        assert eng.clip_gradients(1.0) > 0
        assert eng.step() is not None
