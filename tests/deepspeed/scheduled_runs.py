"""A model that reads the keyword arguments of the step, on ranks and in plain torch."""

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import engine.deepspeed as deepspeed

LINEAR: dict[str, Any] = {
    "enabled": True, "min_difficulty": 2, "max_difficulty": 10, "schedule_type": "fixed_linear",
    "schedule_config": {"total_curriculum_step": 8, "difficulty_step": 2},
}  # fmt: skip
DROP = {"enabled": True, "theta": 0.5, "gamma": 0.1}
CONFIG: dict[str, Any] = {
    "train_batch_size": 8, "gradient_accumulation_steps": 2, "gradient_clipping": 0.1,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "eps": 1e-5, "weight_decay": 0.1}},
    "progressive_layer_drop": DROP, "curriculum_learning": LINEAR,
}  # fmt: skip
LENGTHS = (2, 4, 4, 6, 6, 8)
KEPT = tuple(0.5 * math.exp(-0.1 * steps) + 0.5 for steps in (0, 0, 1, 2, 3, 4))


class Layers(nn.Module):
    """Cuts its rows to a length and weighs a residual branch, as a model of such scripts does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(10, 16), nn.Linear(16, 10)
        self.seen: list[tuple[float, int | None]] = []

    def forward(
        self, x: Tensor, y: Tensor, curriculum_seqlen: int | None = None, progressive_layer_drop: bool = False,
        pld_theta: float = 1.0,
    ) -> Tensor:  # fmt: skip
        assert progressive_layer_drop == self.training
        self.seen.append((pld_theta, curriculum_seqlen))
        kept = torch.arange(10) < (curriculum_seqlen or 10)
        x = x * kept
        return nn.functional.mse_loss(x + pld_theta * self.down(self.up(x).tanh()), y)


def microbatch(index: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(index)
    return torch.randn(4, 10, generator=generator), torch.randn(4, 10, generator=generator)


def trained(folder: Path, changes: dict[str, Any]) -> tuple[list[float], dict[str, Tensor], list[Any]]:
    """Six steps, after three of them by another engine from a checkpoint; losses as means over data ranks."""
    losses, seen = [], []
    for half in range(2):
        model = Layers()
        eng, *_ = deepspeed.initialize(model=model, config=CONFIG | changes)
        assert half == 0 or eng.load_checkpoint(folder)[0] is not None
        rows = eng.train_micro_batch_size_per_gpu()
        first = eng.engine.grid.coord().dp * rows
        model.seen.clear()  # a plan's own forwards
        for index in range(6 * half, 6 * half + 6):
            x, y = microbatch(index)
            loss = eng(x[first : first + rows], y[first : first + rows])
            eng.backward(loss)
            eng.step()
            losses.append(float(loss.detach()))
        seen += model.seen[::2]
        eng.save_checkpoint(folder)
        eng.eval()
        with torch.no_grad():
            eng(*(part[:rows] for part in microbatch(0)))
        assert model.seen[-1] == (1.0, None)
    return losses, eng.module_state_dict(), seen


def in_plain_torch() -> tuple[list[float], dict[str, Tensor]]:
    model, losses = Layers(), []
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, eps=1e-5, weight_decay=0.1)
    for step in range(6):
        for index in (2 * step, 2 * step + 1):
            loss = model(*microbatch(index), LENGTHS[step], True, KEPT[step])
            (loss / 2).backward()
            losses.append(float(loss.detach()))
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return losses, model.state_dict()
