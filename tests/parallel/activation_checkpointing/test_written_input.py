"""Recomputed blocks that write in place: into what they make, as in plain torch; into their input, refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine

Write = Callable[["Writing", Tensor], Tensor]


def relu(block: "Writing", x: Tensor) -> Tensor:
    out: Tensor = x + block.second(torch.relu_(block.first(x)))
    return out


def residual(block: "Writing", x: Tensor) -> Tensor:
    out: Tensor = block.second(torch.tanh(block.first(x)))
    out += x
    return out


def mask(block: "Writing", x: Tensor) -> Tensor:
    out: Tensor = x + block.second(block.first(x).masked_fill_(torch.arange(8) > 5, 0.0))
    return out


def into_input(block: "Writing", x: Tensor) -> Tensor:
    x *= 1.1
    out: Tensor = x + block.second(torch.tanh(block.first(x)))
    return out


class Writing(nn.Module):
    """A block of two layers."""

    def __init__(self, write: Write) -> None:
        super().__init__()
        self.first, self.second, self.write = nn.Linear(8, 8), nn.Linear(8, 8), write

    def forward(self, x: Tensor) -> Tensor:
        return self.write(self, x)


def square(out: Tensor, batch: Tensor) -> Tensor:
    return out.square().mean()


def settings(mode: str) -> dict[str, Any]:
    return {
        "train_batch_size": 4, "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.05,
        "activation_checkpointing": {"mode": mode}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-5}},
    }  # fmt: skip


class Stack(nn.Module):
    """Three blocks behind a layer."""

    def __init__(self, write: Write) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Writing(write) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("write", [relu, residual, mask])
def test_blocks_that_write_into_what_they_make_train_as_in_torch(write: Write, mode: str) -> None:
    batch, alone = torch.randn(4, 8, generator=torch.Generator().manual_seed(3)), Stack(write)
    optimizer = torch.optim.AdamW(alone.parameters(), lr=1e-2, eps=1e-5)
    with engine.initialize(Stack(write), settings(mode), square) as eng:
        for _ in range(3):
            square(alone(batch), batch).backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(alone.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()
            eng.train_batch(batch)
        weights = eng.full_state_dict()
    assert max(float((weights[key] - value).abs().max()) for key, value in alone.state_dict().items()) <= 1e-5


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_a_block_that_writes_into_its_input_is_refused(mode: str) -> None:
    refused = pytest.raises(engine.EngineError, match="a recomputed Writing changes its input in place")
    with engine.initialize(Stack(into_input), settings(mode), square) as eng, refused:
        eng.train_batch(torch.ones(4, 8))
