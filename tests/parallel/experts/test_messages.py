"""Messages of an exchange of rows: matrices with elements of equal size share one, forward and backward."""

from typing import Any

import pytest
import torch
from torch import Tensor

from engine.parallel.experts.dispatch import exchange, integers_of_size


class Mirror:
    """Communication of a rank with itself that counts its messages."""

    def __init__(self) -> None:
        self.messages = 0

    def exchange(self, received: Tensor, given: Tensor, *_: object) -> "Mirror":
        received.copy_(given)
        self.messages += 1
        return self

    def wait(self) -> None:
        """Return: a copy is complete."""


@pytest.mark.parametrize(
    ("rows", "weights", "messages"),
    [("float32", "float32", 1), ("bfloat16", "bfloat16", 1), ("bfloat16", "float32", 2), ("float64", "float64", 1)],
)
def test_rows_weights_and_numbers_share_messages(rows: str, weights: str, messages: int) -> None:
    comm: Any = Mirror()
    x = torch.randn(5, 7, dtype=getattr(torch, rows), requires_grad=True)
    weight = torch.randn(5, 2, dtype=getattr(torch, weights), requires_grad=True)
    numbers = torch.randint(-1, 300, (5, 2)).to(integers_of_size(weight))
    got = exchange((x, weight, numbers), (5,), (5,), comm, "rows", ())
    assert comm.messages == messages
    for each, given in zip(got, (x, weight, numbers), strict=True):
        assert torch.equal(each, given) and each.dtype == given.dtype
    torch.autograd.backward(got[0].double().sum() + 2 * got[1].double().sum())
    assert comm.messages == 2 * messages, "no gradient of numbers is sent"
    assert x.grad is not None and weight.grad is not None
    assert torch.unique(x.grad).tolist() == [1.0] and torch.unique(weight.grad).tolist() == [2.0]


def test_rows_of_any_shape_have_their_own_message() -> None:
    comm: Any = Mirror()
    given = torch.randn(4, 3, 2), torch.arange(4)
    for each, same in zip(exchange(given, (4,), (4,), comm, "rows", ()), given, strict=True):
        assert torch.equal(each, same)
    assert comm.messages == 2
