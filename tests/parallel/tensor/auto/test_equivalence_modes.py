"""A plan must be right in both modes of a block."""

import torch
from torch import Tensor, nn

from engine.parallel.tensor.auto.equivalence import BlockReference
from engine.parallel.tensor.plan.sharding_rules import cut_model
from engine.parallel.tensor.plan.styles import parse_style

STYLES = {"up": "column", "down": "row"}


class Perceptron(nn.Module):
    """``evaluated_whole``: in eval mode it asks how wide the hidden layer is, of which a rank sees a part."""

    def __init__(self, evaluated_whole: bool) -> None:
        super().__init__()
        self.evaluated_whole = evaluated_whole
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(x))
        if self.evaluated_whole and not self.training:
            hidden = hidden / hidden.shape[-1]
        out: Tensor = self.down(hidden)
        return out


def problem(evaluated_whole: bool) -> str:
    block = Perceptron(evaluated_whole).double()
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    plan = cut_model(block, {name: parse_style(text) for name, text in STYLES.items()}, 2, "test")
    return BlockReference(block, [((x,), {})]).prove(plan, 2).problem


def test_eval_mode_that_computes_with_a_width() -> None:
    assert problem(evaluated_whole=True).startswith("output in eval mode 0 on rank 0 is off by")


def test_both_modes_right() -> None:
    assert problem(evaluated_whole=False) == ""
