"""Dropout inside chains of a block: a stage that skips the block draws what one process draws after it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engine.verify import verify

WIDTH = 16


def perceptron() -> nn.Sequential:
    """Two layers of one class, which form a chain."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.3), nn.Linear(WIDTH, WIDTH))


class Block(nn.Module):
    """A block with parts that are chains, or hold some."""

    def __init__(self, parts: Callable[[], list[nn.Module]]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts())
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = x + self.dropout(part(x))
        return x


class Network(nn.Module):
    def __init__(self, parts: Callable[[], list[nn.Module]]) -> None:
        super().__init__()
        self.enter = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(Block(parts) for _ in range(4))
        self.leave = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = F.dropout(block(x), 0.1, self.training)
        y: Tensor = self.leave(x)
        return y


PARTS: dict[str, Callable[[], list[nn.Module]]] = {
    "a chain": lambda: [perceptron()],
    "two chains and a norm": lambda: [perceptron(), nn.LayerNorm(WIDTH), perceptron()],
    "chains in a chain": lambda: [nn.Sequential(perceptron(), perceptron()), perceptron()],
}


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", pytest.param("zb-v", marks=pytest.mark.long)])
@pytest.mark.parametrize("name", PARTS)
def test_stages_draw_what_one_process_draws(name: str, schedule: str) -> None:
    rows = torch.Generator().manual_seed(1)
    config = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "parallel": {"pipeline": 2, "schedule": schedule, "virtual_stages": 2 if schedule == "interleaved" else 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-5}},
        "gradient_clipping": 0.1,
    }
    batches = [(torch.randn(8, 4, generator=rows), torch.randn(8, 2, generator=rows)) for _ in range(2)]
    found = verify(lambda: Network(PARTS[name]), config, batches, loss_fn=F.mse_loss, threads=2)
    assert found is not None and found.holds(), found
