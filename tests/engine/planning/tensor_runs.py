"""Three clipped steps of small models of blocks, for tests of how tensor ranks share them."""

from typing import Any

import torch
from torch import Tensor

from engine.engine import Engine
from engine.verify import TrainingRecord

WIDTH, ROWS = 16, 4
CONFIG: dict[str, Any] = {
    "train_batch_size": ROWS, "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.01,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "eps": 1e-5}},
}  # fmt: skip


def drawn_batches() -> list[Tensor]:
    """A global batch [ROWS, WIDTH] for each step."""
    drawn = torch.Generator().manual_seed(2)
    return [torch.randn(ROWS, WIDTH, generator=drawn) for _ in range(3)]


def recorded(eng: Engine, batches: list[Tensor]) -> TrainingRecord:
    """Losses, norms and final weights of steps over ``batches``."""
    reports = [eng.train_batch(batch) for batch in batches]
    losses, norms = tuple(r.loss for r in reports), tuple(r.grad_norm for r in reports)
    return TrainingRecord(losses, norms, eng.full_state_dict())
