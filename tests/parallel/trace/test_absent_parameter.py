"""Guards of parameters: reads of values are told, whatever the class of the parameter was."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from engine.parallel.trace.absent_parameter import conceal, reveal


def of_shape() -> nn.Parameter:
    """A parameter without content, as a dry run has it."""
    with FakeTensorMode():
        return nn.Parameter(torch.empty(3, 2))


@pytest.mark.parametrize("make", [lambda: nn.Parameter(torch.ones(3, 2)), of_shape], ids=["content", "shape alone"])
def test_operators_of_a_guarded_parameter_run_once_its_read_is_told(make: Callable[[], nn.Parameter]) -> None:
    parameter, reads = make(), list[int]()
    before: type = type(parameter)
    conceal(parameter, lambda: reads.append(1), "elsewhere")
    assert parameter.shape == (3, 2) and not reads
    with FakeTensorMode(allow_non_fake_inputs=True) if before is FakeTensor else torch.no_grad():
        made = parameter.detach() * 2
    assert made.shape == (3, 2) and reads
    assert "elsewhere" in repr(parameter)
    reveal(parameter)
    assert type(parameter) is before
