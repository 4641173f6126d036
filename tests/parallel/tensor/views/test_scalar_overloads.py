"""Functions that also take a number first ask a tensor without a gradient how many dims it has."""

import torch

from engine.parallel.tensor.axis import DryAxis
from engine.parallel.tensor.views.context import Views
from engine.parallel.tensor.views.moves import enter_stream
from engine.parallel.tensor.views.view import View


def test_pow_without_gradients() -> None:
    views = Views(DryAxis(2, lambda _: None), True)
    x = enter_stream(views, torch.arange(64.0).view(2, 4, 8))
    assert isinstance(x, View)
    cubed = torch.pow(x, 3.0)
    assert isinstance(cubed, View)
    assert torch.equal(cubed.local, x.local * x.local * x.local)
