"""A chain of layers on the ranks of a pipeline."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import engine
from engine.deepspeed.pipe import LayerSpec, PipelineModule

GRID: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2, "parallel": {"pipeline": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}, "checkpoint": {"async": False},
}  # fmt: skip


def chain() -> PipelineModule:
    torch.manual_seed(0)
    return PipelineModule([LayerSpec(nn.Linear, 4, 8), nn.Tanh(), LayerSpec(nn.Linear, 8, 2)], 1, loss_fn=nn.MSELoss())


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 4, generator=generator), torch.randn(2, 2, generator=generator)


def loss(output: Tensor, given: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.mse_loss(output, given[1])


def train_and_load(folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    with engine.initialize(chain(), GRID, loss, batch(0)) as eng:
        eng.train_batch(batch(0))
        eng.save_checkpoint(folder, {}).wait()
        saved = eng.full_state_dict()
    with engine.initialize(chain(), GRID, loss) as eng:
        eng.load_checkpoint(folder)
        return saved, {name: value.clone() for name, value in eng.module.state_dict().items()}
