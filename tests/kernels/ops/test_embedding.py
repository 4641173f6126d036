"""An embedding adds its gradient to the main gradient: right rows, none of its own, equal bits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from engine.kernels.dispatch import Kernels, OpenSum
from engine.kernels.ops.embedding import add_rows_, look_up_rows

ROWS, WIDTH = 50, 8


class Main:
    """A main gradient of one parameter."""

    def __init__(self, weight: Tensor, dtype: torch.dtype, holds: bool) -> None:
        self.into = torch.randn(weight.shape, generator=torch.Generator().manual_seed(5)).to(dtype)
        self.holds, self.ended = holds, 0

    def begin(self, node: Any) -> OpenSum:
        return OpenSum(self.into, self.holds)

    def end(self, node: Any) -> None:
        self.ended, self.holds = self.ended + 1, True


class Made(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not type it
    """Notes how many elements new tensors have."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and not any(result is given for given in args):
            self.largest = max(self.largest, result.numel())
        return result


def weight_of(dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype))


def ids_of(count: int, most: int = ROWS) -> Tensor:
    return torch.randint(most, (2, count // 2), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("padding", [None, 3])
@pytest.mark.parametrize("holds", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_main_gradient_gets_what_a_gradient_made_apart_has(
    dtype: torch.dtype, holds: bool, padding: int | None
) -> None:
    weight, kernels, ids = weight_of(dtype), Kernels("reference"), ids_of(20, 7)
    main = Main(weight, torch.float32, holds)
    before = main.into.clone() if holds else torch.zeros_like(main.into)
    kernels.main.register(weight, main)
    slope = torch.randn(*ids.shape, WIDTH, generator=torch.Generator().manual_seed(3)).to(dtype)

    y = look_up_rows(weight, ids, padding, kernels)
    with Made() as made:
        y.backward(slope)  # type: ignore[no-untyped-call]

    wide = weight.detach().float().requires_grad_()
    functional.embedding(ids, wide, padding).backward(slope.float())  # type: ignore[no-untyped-call]
    assert wide.grad is not None and weight.grad is None and main.ended == 1
    assert torch.equal(y, functional.embedding(ids, weight, padding))
    torch.testing.assert_close(main.into, before + wide.grad, rtol=0, atol=1e-6)
    assert made.largest <= ids.numel() * WIDTH < weight.numel()


def test_more_ids_than_rows_make_a_gradient_apart() -> None:
    weight, kernels = weight_of(torch.float32), Kernels("reference")
    main = Main(weight, torch.float32, False)
    kernels.main.register(weight, main)
    look_up_rows(weight, ids_of(ROWS + 2), None, kernels).sum().backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None and main.ended == 0


@pytest.mark.parametrize("make", [lambda: ids_of(40), lambda: ids_of(40, 1), lambda: torch.arange(ROWS - 1, -1, -1)])
def test_equal_ids_are_summed_before_their_row_is_written_once(make: Callable[[], Tensor]) -> None:
    ids = make().flatten()
    rows = torch.randn(len(ids), WIDTH, generator=torch.Generator().manual_seed(4))
    targets: list[Tensor] = []

    class Seen(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.overloadpacket.__name__ == "index_add_":
                targets.append(args[2][args[3].abs().sum(1) > 0])
            return func(*args, **(kwargs or {}))

    found = torch.zeros(ROWS, WIDTH)
    with Seen():  # type: ignore[no-untyped-call]
        add_rows_(found, ids, rows)
    torch.testing.assert_close(found, torch.zeros(ROWS, WIDTH).index_add_(0, ids, rows))
    (written,) = targets
    assert sorted(written.tolist()) == sorted(set(ids.tolist()))
