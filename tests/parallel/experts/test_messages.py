"""Messages of an exchange of rows: all are on their way together, and integers have no gradient."""

from typing import Any

import torch
from torch import Tensor

from engine.parallel.experts.dispatch import exchange


class Mirror:
    """Communication of a rank with itself that logs its messages and waits."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def exchange(self, received: Tensor, given: Tensor, *_: object) -> "Mirror":
        received.copy_(given)
        self.log.append(str(given.dtype).removeprefix("torch."))
        return self

    def filled(self, pending: "Mirror") -> "Mirror":
        """Fills no wait."""
        return pending

    def wait(self) -> None:
        """Log that a message is awaited."""
        self.log.append("wait")


def test_rows_weights_and_numbers_are_on_their_way_together_and_numbers_have_no_gradient() -> None:
    comm: Any = Mirror()
    x = torch.randn(5, 7, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(5, 2, requires_grad=True)
    numbers = torch.randint(-1, 300, (5, 2), dtype=torch.int32)
    got = exchange((x, weight, numbers), (5,), (5,), comm, "rows", ())
    assert comm.log == ["bfloat16", "float32", "int32", "wait", "wait", "wait"]
    assert all(torch.equal(each, given) for each, given in zip(got, (x, weight, numbers), strict=True))
    comm.log.clear()
    torch.autograd.backward(got[0].double().sum() + 2 * got[1].double().sum())
    assert comm.log == ["bfloat16", "float32", "wait", "wait"]
    assert x.grad is not None and weight.grad is not None
    assert torch.unique(x.grad).tolist() == [1.0] and torch.unique(weight.grad).tolist() == [2.0]
