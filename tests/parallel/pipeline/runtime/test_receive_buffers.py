"""Memory of messages is used again, unless somebody still has a name for it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from engine.parallel.pipeline.runtime.transport import ReceiveBuffers

CPU = torch.device("cpu")


def address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def test_memory_that_nobody_holds_is_used_again_for_the_same_shape_and_dtype() -> None:
    buffers = ReceiveBuffers(CPU)
    first = buffers.take((2, 3), torch.float32)
    given, where = first.detach(), address(first)
    del first
    buffers.give(given)
    other = [buffers.take((3, 2), torch.float32), buffers.take((2, 3), torch.float64)]
    assert all(address(tensor) != where for tensor in other)
    assert address(buffers.take((2, 3), torch.float32)) == where


@pytest.mark.parametrize(
    "keep", [Tensor.detach, lambda x: x[0], lambda x: x.detach().requires_grad_() ** 2], ids=["alias", "view", "graph"]
)
def test_what_a_model_autograd_or_a_message_keeps_is_left_to_them(keep: Callable[[Tensor], Tensor]) -> None:
    buffers = ReceiveBuffers(CPU)
    given = buffers.take((2, 3), torch.float32).detach()
    kept, where = keep(given), address(given)
    buffers.give(given)
    del given
    assert address(buffers.take((2, 3), torch.float32)) != where
    assert kept.numel()


def test_memory_of_others_and_of_a_step_that_is_over_is_not_taken() -> None:
    buffers = ReceiveBuffers(CPU)
    buffers.give(torch.empty(2, 3))
    lent = buffers.take((2, 3), torch.float32).detach()
    buffers.forget()
    buffers.give(lent)
    assert address(buffers.take((2, 3), torch.float32)) != address(lent)
    buffers.give(buffers.take((0,), torch.float32))
