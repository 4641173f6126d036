"""Training with shared experts, stacked and listed, in uneven shares: equal to one process, on thread ranks."""

from collections.abc import Callable, Mapping
from functools import cache
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.parallel.comm.threads import run_thread_ranks
from engine.parallel.comm.world import World
from tests.parallel.experts.moe import WIDTH, Always, Stacked

ROWS, STEPS, EXPERTS = 8, 3, 5
CONFIG: Mapping[str, Any] = {
    "train_batch_size": ROWS, "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.5,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-5, "weight_decay": 0.3}},
}  # fmt: skip
PLAN = {"wide": "column", "narrow": "row"}


class Routed(nn.Module):
    """Block with a gate and stacked experts; the last expert gets no row."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.moe = nn.Linear(WIDTH, EXPERTS - 1, bias=False), Stacked(EXPERTS)

    def forward(self, hidden: Tensor) -> Tensor:
        x = hidden.view(-1, WIDTH)
        weights, index = self.gate(x).softmax(-1).topk(2)
        found: Tensor = self.moe(x, index, weights)
        return hidden + found.view_as(hidden)


class Mixture(nn.Module):
    """Two blocks of experts after a pair of layers that tensor ranks share."""

    def __init__(self, kind: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)
        self.blocks = nn.ModuleList(kind() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.narrow(torch.relu(self.wide(x)))
        for block in self.blocks:
            x = block(x)
        return x


def loss(out: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return (out - batch["y"]).square().mean()


Result = tuple[list[float], list[float], dict[str, Tensor]]


def run(kind: Callable[[], nn.Module], parallel: Mapping[str, Any], stage: int) -> Result:
    """Returns losses, norms and final weights of a few steps on thread ranks."""

    def rank(world: World) -> Result:
        torch.manual_seed(0)
        model, given = Mixture(kind), torch.Generator().manual_seed(1)
        config = {**CONFIG, "parallel": parallel, "zero_optimization": {"stage": stage}}
        losses, norms = list[float](), list[float]()
        example = {"x": torch.zeros(1, 3, WIDTH), "y": torch.zeros(1, 3, WIDTH)}
        with engine.initialize(model, config, loss, example, world=world) as eng:
            for _ in range(STEPS):
                x, y = torch.randn(2, ROWS, 3, WIDTH, generator=given)
                mine = slice(eng.grid.row_rank, None, eng.grid.row_ranks)
                report = eng.train_batch({"x": x[mine], "y": y[mine]})
                losses.append(report.loss)
                norms.append(report.grad_norm)
            return losses, norms, eng.full_state_dict()

    sizes = (int(parallel.get(axis, 1)) for axis in ("data", "tensor"))
    return run_thread_ranks(prod(sizes), rank)[0]


@cache
def alone(kind: Callable[[], nn.Module]) -> Result:
    return run(kind, {"data": 1}, 0)


@pytest.mark.parametrize(
    ("kind", "parallel", "stage"),
    [
        (Routed, {"data": 2, "expert": 2}, 0),
        (Routed, {"data": 4, "expert": 2}, 1),
        (Routed, {"data": 2, "expert": 2, "tensor": 2, "tensor_plan": PLAN}, 3),
        (Always, {"data": 2, "expert": 2, "tensor": 2, "tensor_plan": PLAN}, 0),
        pytest.param(Always, {"data": 4, "expert": 4}, 3, marks=pytest.mark.long),
        pytest.param(Routed, {"data": 4, "expert": 4}, 2, marks=pytest.mark.long),
    ],
)
def test_shared_experts_train_as_one_process(
    kind: Callable[[], nn.Module], parallel: dict[str, Any], stage: int
) -> None:
    losses, norms, weights = run(kind, parallel, stage)
    right_losses, right_norms, right_weights = alone(kind)
    assert losses == pytest.approx(right_losses, rel=1e-6, abs=0)
    assert norms == pytest.approx(right_norms, rel=1e-5, abs=0)
    assert weights.keys() == right_weights.keys()
    for name, right in right_weights.items():
        if name.endswith(".seen"):  # counts the microbatches of a data rank
            assert float(right) == STEPS * ROWS == float(weights[name]) * parallel["data"]
            continue
        torch.testing.assert_close(weights[name], right, rtol=0, atol=1e-5, msg=f"{name} differs")
