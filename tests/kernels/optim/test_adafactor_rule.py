"""Adafactor from pieces of tensors, beside torch's over whole ones."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from engine.config.optim_sections import AdafactorParams
from engine.config.reader import stored
from engine.kernels.optim.update_rules import (
    AdafactorRule,
    MatrixPiece,
    mean_elements,
    mean_shapes,
    scales_of,
    step_size,
    take_in,
)


@pytest.mark.parametrize("shape", [(12, 7), (3, 5, 4), (2, 2, 3, 5), (9,), (), (1, 6), (6, 1)])
@pytest.mark.parametrize("options", [{}, {"lr": 0.3, "weight_decay": 0.1, "d": 1.2, "beta2_decay": -0.5}])
def test_pieces_train_as_the_whole_does_in_torch(shape: tuple[int, ...], options: dict[str, Any]) -> None:
    params: Any = dict(stored(AdafactorParams())) | options
    rule = AdafactorRule.of(params)
    torch.manual_seed(0)
    theirs = nn.Parameter(torch.randn(shape))
    weights, means = theirs.detach().clone(), {name: torch.zeros(of) for name, of in mean_shapes(shape).items()}
    flat, count = weights.view(-1), theirs.numel()
    cuts = sorted({0, count, *(count * part // 7 for part in range(7))})
    pieces = [MatrixPiece(shape, start, stop) for start, stop in pairwise(cuts)]
    reference: Any = torch.optim.Adafactor([theirs], **params)
    for step in range(1, 5):
        theirs.grad = torch.randn(shape) * 10.0**-step
        grads = theirs.grad.clone().view(-1)
        sums = {name: torch.zeros(of) for name, of in mean_shapes(shape).items()}
        for piece in pieces:
            piece.add_squares(grads[piece.start : piece.stop].square(), sums)
        take_in(means, sums, rule.newest(step))
        scales = scales_of(means, rule.least(torch.float32))
        update = torch.cat([p.update(grads[p.start : p.stop], scales, rule.least(torch.float32)) for p in pieces])
        size = step_size(flat.square().sum(), update.square().sum(), count, rule, step)
        flat.mul_(1 - rule.lr * rule.weight_decay).sub_(update * size)
        reference.step()
        torch.testing.assert_close(weights, theirs.detach(), rtol=2e-6, atol=2e-7)
    state = reference.state[theirs]
    for name, mean in means.items():
        torch.testing.assert_close(mean, state[name], rtol=2e-6, atol=1e-12)
    assert mean_elements(shape) == sum(state[name].numel() for name in means)
