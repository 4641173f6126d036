"""Whether a forward draws random numbers is seen in the probe."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engine.parallel.trace.tracer import trace_model


class Shake(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return grad


class Block(nn.Module):
    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(4, 4), act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.linear(x))


def attend(p: float) -> Callable[[Tensor], Tensor]:
    return lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=p)[0]


@pytest.mark.parametrize(
    ("act", "draws"),
    [
        (torch.tanh, False),
        (attend(0.0), False),
        (attend(0.1), True),
        (nn.Dropout(0.1), True),
        (lambda x: F.dropout(x, 0.1, training=False), False),
        (lambda x: x + torch.randn(4), True),
        (lambda x: x.bernoulli(0.5), True),
        (lambda x: F.gumbel_softmax(x), True),
        (Shake.apply, True),
    ],
    ids=["tanh", "attention", "attention with dropout", "dropout", "no dropout", "randn", "bernoulli", "gumbel", "own"],
)
@pytest.mark.parametrize("in_unit", [True, False])
def test_every_operation_that_draws(act: Callable[[Tensor], Tensor], draws: bool, in_unit: bool) -> None:
    model = nn.Sequential(*(Block(act if in_unit else torch.tanh) for _ in range(2)))
    x = torch.randn(3, 4)

    def program() -> Tensor:
        y: Tensor = model(x)
        return (y if in_unit else act(y)).sum()

    model.train()
    assert trace_model(model, program).random is draws
