"""A gradient penalty in a loop of one's own: a backward through the operations of an earlier one (double backward)."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import engine

RunRanks = Callable[..., list[Any]]


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.tanh(self.up(x)))
        return out


def _critic() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(_Block(8), _Block(8), nn.Linear(8, 1))


def _rows(step: int, part: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(100 + 2 * step + part)
    return torch.randn(8, 8), torch.randn(8, 1)


def _penalised(model: Callable[[Tensor], Any], x: Tensor, wanted: Tensor, every: bool) -> Tensor:
    """The loss of rows; without ``every`` the penalty is left out (lazy regularisation)."""
    x = x.clone().requires_grad_()
    y = model(x)
    loss: Tensor = (y - wanted).square().mean()
    if every:
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        loss = loss + (slope.norm(dim=1) - 1).square().mean()
    return loss


def _plain() -> tuple[list[float], list[Tensor]]:
    model = _critic()
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5, weight_decay=0.01), []
    for step in range(3):
        optimizer.zero_grad()
        losses.append(0.0)
        for part in range(2):
            loss = _penalised(model, *_rows(step, part), step != 1) / 2
            loss.backward()  # type: ignore[no-untyped-call]
            losses[-1] += float(loss.detach())
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return losses, [parameter.detach() for parameter in model.parameters()]


def _ours(changes: dict[str, Any]) -> tuple[list[float], list[Tensor]]:
    config = {
        "train_batch_size": 16, "gradient_accumulation_steps": 2, "gradient_clipping": 0.1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-5, "weight_decay": 0.01}},
    }  # fmt: skip
    losses: list[float] = []
    with engine.initialize(_critic(), config | changes) as eng:
        for step in range(3):
            for part in range(2):
                x, wanted = (rows.chunk(2)[dist.get_rank()] for rows in _rows(step, part))
                eng.backward(_penalised(eng, x, wanted, step != 1))
                report = eng.step()
            assert report is not None
            losses.append(report.loss)
        return losses, [full.clone() for full in eng.full_state_dict().values()]


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"zero_optimization": {"stage": 2}}, id="zero2", marks=pytest.mark.long),
        pytest.param({"zero_optimization": {"stage": 3}}, id="zero3"),
        pytest.param({"zero_optimization": {"stage": 3, "gather": "step"}}, id="zero3-step", marks=pytest.mark.long),
    ],
)
def test_a_penalty_on_the_gradient_trains_like_plain_torch(run_ranks: RunRanks, changes: dict[str, Any]) -> None:
    losses, weights = _plain()
    told = run_ranks(_ours, 2, changes)
    for found, _ in told:
        assert found == pytest.approx(losses, rel=1e-6)
    for weight, expected in zip(told[0][1], weights, strict=True):
        torch.testing.assert_close(weight, expected, atol=1e-5, rtol=0)
