"""Functions that also take a number first ask a tensor without a gradient how many dims it has."""

import torch

from engine.parallel.tensor.global_tensor.global_tensor import GlobalTensor
from engine.parallel.tensor.global_tensor.redistribute import enter_stream
from engine.parallel.tensor.global_tensor.rules.table import global_context
from engine.parallel.tensor.tp_axis import DryAxis


def test_pow_without_gradients() -> None:
    views = global_context(DryAxis(2, lambda *_: None), True)
    x = enter_stream(views, torch.arange(64.0).view(2, 4, 8))
    assert isinstance(x, GlobalTensor)
    cubed = torch.pow(x, 3.0)
    assert isinstance(cubed, GlobalTensor)
    assert torch.equal(cubed.local, x.local * x.local * x.local)
