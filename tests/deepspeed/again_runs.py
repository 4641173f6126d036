"""A model that is trained by one engine after another: what they compute on ranks, and plain torch."""

from typing import Any

import torch
from torch import Tensor, nn

import engine
import engine.deepspeed as deepspeed

ADAM: dict[str, Any] = {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-5, "weight_decay": 0.01}}
CONFIG: dict[str, Any] = {"train_batch_size": 8, "gradient_clipping": 0.1, "optimizer": ADAM}
STEPS = 2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.up, self.down = nn.Embedding(16, 32), nn.Linear(32, 64), nn.Linear(64, 32)
        self.head = nn.Linear(32, 16, bias=False)
        self.scale = nn.Parameter(torch.linspace(0.5, 1, 32), requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.embed(ids) * self.scale
        out: Tensor = self.head(x + self.down(torch.relu(self.up(x))))
        return out


def batch(step: int) -> Tensor:
    return torch.randint(16, (8, 5), generator=torch.Generator().manual_seed(step))


def loss_of(logits: Tensor, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def one_after_another(*changes: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of each engine, as means over data ranks, and the weights at the end."""
    model, losses = Net(), []
    weights: dict[str, Tensor] = {}
    for index, change in enumerate(changes):
        eng: Any = deepspeed.initialize(model=model, config=CONFIG | change)[0]
        for step in range(STEPS):
            ids = batch(STEPS * index + step)
            grid = eng.engine.grid
            mine = ids.chunk(grid.dp)[grid.coord().dp]
            for micro in mine.split(eng.train_micro_batch_size_per_gpu()):
                eng.backward(loss_of(eng(micro), micro))
                eng.step()
            losses.append(eng._last._report.loss)
        weights = eng.module_state_dict()
        eng.destroy()
    return losses, weights


def parts_again(axis: str) -> str:
    """The sentence about a model whose engine had ranks along ``axis`` and has ended."""
    config: dict[str, Any] = CONFIG | {"parallel": {axis: 2}, "gradient_accumulation_steps": 2}
    model: nn.Module = nn.Sequential(nn.Embedding(16, 32), nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 16))
    engine.initialize(model, config, loss_of, example_batch=batch(0)[:4]).close()
    try:
        engine.initialize(model, config, loss_of, example_batch=batch(0)[:4])
    except engine.PlanError as error:
        return str(error)
    return ""


def in_plain_torch(engines: int) -> tuple[list[float], dict[str, Tensor]]:
    model, losses = Net(), []
    for index in range(engines):
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2, eps=1e-5)
        for step in range(STEPS):
            ids = batch(STEPS * index + step)
            loss = loss_of(model(ids), ids)
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
    return losses, model.state_dict()
