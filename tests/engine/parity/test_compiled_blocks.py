"""Blocks that the user has compiled in place (``block.compile()``) before the engine takes the model."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from tests import models

RunRanks = Callable[..., list[Any]]
LAYERS, STEPS = 2, 3


def _loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), batch["labels"].flatten())


def _compiled() -> nn.Module:
    """A decoder whose first chain of blocks is compiled."""
    model = models.decoder(layers=LAYERS)
    chain = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
    for block in chain:
        block.compile(backend="eager")
    return model


def _ours(parallel: dict[str, int], stage: int) -> list[float]:
    config = {
        "train_batch_size": 8, "gradient_accumulation_steps": 2, "gradient_clipping": 0.05,
        "parallel": parallel, "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "eps": 1e-5, "weight_decay": 0.1}},
    }  # fmt: skip
    batches = models.batches_for("decoder", 8, STEPS)
    with engine.initialize(_compiled(), config, _loss) as eng:
        rows = 8 // eng.grid.dp
        first = rows * eng.grid.coord().dp
        mine = [{name: part[first : first + rows] for name, part in batch.items()} for batch in batches]
        reports = [eng.train_batch(batch) for batch in mine]
        return [value for report in reports for value in (report.loss, report.grad_norm)]


def _plain() -> list[float]:
    model, seen = models.decoder(layers=LAYERS), list[float]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-5, weight_decay=0.1)
    for batch in models.batches_for("decoder", 8, STEPS):
        optimizer.zero_grad()
        loss = _loss(model(batch["input_ids"]) if "input_ids" in batch else model(**batch), batch)
        loss.backward()  # type: ignore[no-untyped-call]
        seen += [loss.item(), float(nn.utils.clip_grad_norm_(model.parameters(), 0.05))]
        optimizer.step()
    return seen


@pytest.mark.parametrize(
    ("parallel", "stage"),
    [
        pytest.param({"data": 1, "tensor": 2}, 0, id="tp2"),
        pytest.param({"data": 2}, 3, id="dp2-zero3", marks=pytest.mark.long),
        pytest.param({"data": 1, "pipeline": 2}, 0, id="pp2", marks=pytest.mark.long),
        pytest.param({"data": 1, "tensor": 2, "pipeline": 2}, 0, id="tp2-pp2", marks=pytest.mark.long),
    ],
)
def test_blocks_compiled_in_place_train_like_plain_torch(
    run_ranks: RunRanks, parallel: dict[str, int], stage: int
) -> None:
    expected = _plain()
    ranks = parallel.get("data", 1) * parallel.get("tensor", 1) * parallel.get("pipeline", 1)
    for found in run_ranks(_ours, ranks, parallel, stage):
        assert found[::2] == pytest.approx(expected[::2], rel=1e-6)
        assert found[1::2] == pytest.approx(expected[1::2], rel=1e-5)
