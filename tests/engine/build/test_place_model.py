"""A model that was used before it is placed on the grid."""

from collections.abc import Callable
from typing import Any

import torch

import engine
from tests import models
from tests.models import take_rows

CONFIG = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 2,
    "parallel": {"data": 1, "tensor": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
}


def losses(used: bool) -> list[float]:
    """Body of a rank: two steps; ``used``: after a forward whose graph stays alive, and a backward."""
    model, batches = models.gpt2(dropout=0.0), models.batches_for("gpt2", 8, 2)
    kept = model(**batches[0]).loss if used else torch.zeros(())
    if used:
        kept.backward(retain_graph=True)
    eng = engine.initialize(model, CONFIG, example_batch=take_rows(batches[0], 0, 2))
    found = [eng.train_batch(batch).loss for batch in batches]
    assert bool(kept.isfinite())
    return found


def both() -> list[list[float]]:
    """Body of a rank."""
    return [losses(used=True), losses(used=False)]


def test_a_model_that_was_used_before_trains_as_a_new_one(run_ranks: Callable[..., list[Any]]) -> None:
    for used, new in run_ranks(both, 2):
        assert used == new
