"""A forward that gives a parameter new memory is refused in the first step, on every rank and before any update."""

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.parallel.comm.threads import run_thread_ranks
from engine.parallel.comm.world import World

GRIDS: Mapping[str, dict[str, Any]] = {
    "dp2": {"parallel": {"data": 2}},
    "ZeRO 3": {"parallel": {"data": 2}, "zero_optimization": {"stage": 3}},
    "tp2": {"parallel": {"data": 1, "tensor": 2}},
    "pp2": {"parallel": {"data": 1, "pipeline": 2}},
}
ROWS = 4


class Projected(nn.Module):
    """A layer that projects its weight in each forward, as CPT of PEFT does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = self.weight.data / self.weight.data.norm().clamp(min=1.0)
        return torch.tanh(x @ self.weight)


def chain() -> nn.Module:
    """Projected layers of a small model."""
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), Projected()) for _ in range(4)))


def refused(config: Mapping[str, Any], world: World) -> tuple[str, int]:
    """Body of a rank: the sentence, and the updates that were made."""
    x = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(4))
    with engine.initialize(
        chain, dict(config), loss_fn=lambda out, batch: out.square().mean(), example_batch=x[:2], world=world
    ) as eng:
        rows = eng.config.micro * eng.config.accumulation
        first = eng.grid.coord().dp * rows
        with pytest.raises(engine.EngineError) as error:
            eng.train_batch(x[first : first + rows])
        return str(error.value), eng.step_count


@pytest.mark.parametrize("grid", GRIDS)
def test_a_forward_that_moves_a_parameter_is_refused_before_the_first_update(grid: str) -> None:
    config = {"train_batch_size": ROWS, "train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}}
    found = run_thread_ranks(2, partial(refused, config | GRIDS[grid]))
    for said, updates in found:  # each stage names its own
        assert re.match(r"parameter '[02]\.1\.weight' is no longer in the engine's memory \(a new \.data, in", said)
        assert updates == 0
