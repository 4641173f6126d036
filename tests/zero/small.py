"""A model with everything that is awkward to lay out, and engines over it. For bodies of ranks."""

import gc
from typing import Any

import torch
from torch import Tensor, nn

import engine
from engine.engine import Engine
from engine.zero.optim.inner_optimizer import OptimizerFactory

ROWS = 4


class Small(nn.Module):
    """A tied, a frozen, an fp64, a 0-dim, an empty and an unused parameter, all of odd sizes; gives its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, 11)
        self.up, self.down = nn.Linear(11, 53), nn.Linear(53, 11, bias=False)
        self.head = nn.Linear(11, 37)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(()))
        self.wide = nn.Parameter(torch.ones(7, dtype=torch.float64))
        self.frozen = nn.Parameter(torch.ones(11), requires_grad=False)
        self.empty = nn.Parameter(torch.ones(0, 3))
        self.unused = nn.Parameter(torch.ones(5))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) * self.frozen
        x = x + self.down(torch.tanh(self.up(x)) * self.scale)
        logits = self.head(x).float()
        return nn.functional.cross_entropy(logits, (ids * 7 + 1) % 37) + 1e-2 * self.wide.square().mean().float()


def start(changes: dict[str, Any], optimizer: OptimizerFactory | None = None) -> Engine:
    """An engine over a fresh ``Small``; two microbatches a step."""
    torch.manual_seed(5)
    config = {"train_micro_batch_size_per_gpu": ROWS, "gradient_accumulation_steps": 2} | changes
    return engine.initialize(Small(), config, optimizer=optimizer)


def batch(eng: Engine, step: int) -> Tensor:
    """This data rank's share of a step, different on every rank."""
    generator = torch.Generator().manual_seed(1000 * step + eng.grid.rank)
    return torch.randint(0, 37, (2 * ROWS,), generator=generator)


def forget_the_living() -> None:
    """Hide all objects that exist now from :func:`live_bytes`, and spare it walking over them."""
    gc.collect()
    gc.freeze()


def live_bytes() -> int:
    """Bytes of all storages of the tensors made since :func:`forget_the_living`, each storage once."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]
    grads = [tensor.grad for tensor in tensors if tensor.is_leaf and tensor.grad is not None]
    storages = [tensor.untyped_storage() for tensor in (*tensors, *grads)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}.values())
