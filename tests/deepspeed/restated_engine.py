"""A small engine for the programs of ``restated``, of the real DeepSpeed or of the door."""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

ADAM: dict[str, Any] = {"type": "Adam", "params": {"lr": 1e-2, "betas": [0.9, 0.99], "eps": 1e-6, "torch_adam": True}}
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "gradient_clipping": 0.05,
    "optimizer": ADAM, "zero_allow_untested_optimizer": True,
}  # fmt: skip


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def rows(number: int) -> Tensor:
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(number))


def started(ds: Any, model: nn.Module | None = None, stage: int = 0, **changes: Any) -> Any:
    """An engine; ``given`` among the changes: other arguments of ``initialize``."""
    given = changes.pop("given", {})
    config = CONFIG | {"zero_optimization": {"stage": stage}} | changes
    return ds.initialize(model=model or net(), config=config, **given)[0]


def run(eng: Any, micros: int, first: int = 0) -> None:
    for micro in range(first, first + micros):
        eng.backward(eng(rows(micro)).square().mean())
        eng.step()


@torch.no_grad()
def seen(eng: Any) -> float:
    """A number that depends on every weight."""
    return float(eng(rows(99)).square().sum())


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.Adam([nn.Parameter(torch.zeros(1))], lr=0.05)


def part(ds: Any, path: str) -> Any:
    return import_module(f"{ds.__name__}.{path}")
