"""Recomputation changes nothing where blocks keep state: losses, norms, weights and buffers are those without it."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engine.parallel.comm.threads import run_thread_ranks
from engine.verify import TrainingRecord, VerifyOptions, train_on_grid
from tests.engine.parity.test_parity import config_for

WIDTH, ROWS, STEPS = 16, 16, 3


class Block(nn.Module):
    """Batch norm, a schedule in an attribute, an average in a buffer, and a list."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.register_buffer("average", torch.zeros(WIDTH))
        self.calls, self.sizes = 0, list[float]()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = self.down(F.gelu(self.up(self.norm(x) - self.average)))
        with torch.no_grad():
            self.average.lerp_(y.mean(0), 0.1)
        self.sizes.append(float(len(self.sizes)))
        out: Tensor = x + y * (1 + 0.125 * (self.calls % 3)) / len(self.sizes)
        return out


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(4)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        loss: Tensor = self.head(x).square().mean()
        return loss


GRIDS: dict[str, tuple[dict[str, int], int, int]] = {
    "dp2": ({"data": 2}, 0, 2),
    "zero 3": ({"data": 2}, 3, 2),
    "tp2": ({"data": 1, "tensor": 2}, 0, 2),
    "pp2": ({"data": 1, "pipeline": 2}, 0, 2),
    "tp2 x pp2": ({"data": 1, "tensor": 2, "pipeline": 2}, 1, 4),
}
OFTEN = (("zero 3", "full"), ("pp2", "selective"))
MODES: dict[str, dict[str, Any]] = {"full": {"mode": "full"}, "selective": {"mode": "selective"}}


def run(grid: str, recomputed: dict[str, Any]) -> TrainingRecord:
    parallel, stage, ranks = GRIDS[grid]
    config = config_for(1, stage, parallel=parallel, activation_checkpointing=recomputed)
    batches = [torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step)) for step in range(STEPS)]
    wishes = VerifyOptions()
    return run_thread_ranks(ranks, lambda world: train_on_grid(Model, config, batches, wishes, world))[0]


@pytest.mark.parametrize(
    ("grid", "mode"),
    [
        pytest.param(grid, mode, marks=[pytest.mark.long] * ((grid, mode) not in OFTEN))
        for grid in GRIDS
        for mode in MODES
    ],
)
def test_every_grid_gives_with_recomputation_what_it_gives_without(grid: str, mode: str) -> None:
    once, twice = run(grid, {"mode": "none"}), run(grid, MODES[mode])
    assert (twice.losses, twice.norms) == (once.losses, once.norms)
    assert all(torch.equal(twice.weights[name], value) for name, value in once.weights.items())
    assert int(once.weights["blocks.0.norm.num_batches_tracked"]) == STEPS * ROWS // 2 // GRIDS[grid][0]["data"]
