"""Products of experts: reference and interpreted kernels against eager torch's error."""

from collections.abc import Sequence
from typing import Literal

import pytest
import torch
from torch import Tensor

from engine.errors import EngineError
from engine.kernels.dispatch import Kernels
from engine.kernels.ops.grouped_product import grouped_product, grouped_weight_gradient
from tests.kernels.error import check_error
from tests.kernels.registered import check_operator
from tests.selection import wide

K, N = 40, 72
SIZES = ((3, 0, 70, 1), wide((0, 0, 5)), wide((130,)), wide((0, 0)), wide((64, 64, 1, 0)))
Mode = Literal["reference", "triton"]


def ends_of(sizes: Sequence[int]) -> Tensor:
    return torch.tensor(sizes).cumsum(0).int()


def made(sizes: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(sum(sizes))
    shapes = ((sum(sizes), K), (len(sizes), K, N))
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def eager(x: Tensor, weight: Tensor, sizes: Sequence[int]) -> Tensor:
    """As models write it."""
    y = x.new_empty(x.shape[0], weight.shape[2])
    start = 0
    for expert, size in enumerate(sizes):
        y[start : start + size] = x[start : start + size] @ weight[expert]
        start += size
    return y


@pytest.mark.parametrize("mode", [wide("reference"), "triton"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize(
    ("dtype", "transposed"),
    [
        (torch.float32, False),
        (torch.bfloat16, True),
        wide(torch.float32, True),
        wide(torch.bfloat16, False),
        wide(torch.float16, False),
        wide(torch.float16, True),
    ],
    ids=str,
)
def test_error_is_at_most_twice_eager_torchs(
    dtype: torch.dtype, transposed: bool, sizes: tuple[int, ...], mode: Mode
) -> None:
    kernels, ends = Kernels(mode), ends_of(sizes)
    x, weight = made(sizes, dtype)
    if transposed:
        weight = weight.transpose(1, 2).contiguous()

    def laid(w: Tensor) -> Tensor:
        return w.transpose(1, 2) if transposed else w

    check_error(
        lambda x, w: grouped_product(x, laid(w), ends, kernels), lambda x, w: eager(x, laid(w), sizes), [x, weight]
    )


@pytest.mark.parametrize("mode", ["reference", "triton"])
def test_whole_numbers_are_exact_and_an_expert_without_rows_gets_zeros(mode: Mode) -> None:
    sizes, kernels = [3, 0, 70], Kernels(mode)
    generator = torch.Generator().manual_seed(1)
    x, weight, dy = (
        torch.randint(-4, 5, shape, generator=generator).float()
        for shape in ((sum(sizes), K), (len(sizes), K, N), (sum(sizes), N))
    )
    weight.requires_grad_()
    y = grouped_product(x, weight, ends_of(sizes), kernels)
    assert y.equal(eager(x, weight.detach(), sizes))
    gradient = torch.autograd.grad(y, weight, dy)[0]
    parts = zip(torch.split(x, sizes), torch.split(dy, sizes), strict=True)
    assert not gradient[1].any() and gradient.equal(torch.stack([left.t() @ right for left, right in parts]))
    turned = weight.detach().transpose(1, 2).contiguous().transpose(1, 2)
    for order in (weight.detach(), turned):
        found = grouped_weight_gradient(x, dy, order, ends_of(sizes), kernels)
        assert found.equal(gradient) and found.stride() == order.stride()


def test_a_kernel_reads_stacks_in_any_order_of_their_dims() -> None:
    from engine.kernels.gpu.grouped_matmul import launch_grouped_product

    x, weight = made(SIZES[0], torch.float32)
    stored = weight.transpose(0, 1).contiguous().transpose(0, 1)  # [X, K, N] in memory of [K, X, N]
    assert not stored.is_contiguous() and not stored.transpose(1, 2).is_contiguous()
    y = launch_grouped_product(x, stored, ends_of(SIZES[0]))
    assert torch.equal(y, launch_grouped_product(x, weight, ends_of(SIZES[0])))


def test_shapes_that_do_not_fit_are_refused() -> None:
    x, weight = made((3, 2), torch.float32)
    with pytest.raises(EngineError, match=r"rows \(5, 40\), matrices \(2, 40, 72\) and ends \(3,\) do not match"):
        grouped_product(x, weight, ends_of((3, 1, 1)), Kernels("reference"))


@pytest.mark.long
def test_operators_are_registered_as_torch_wants_it() -> None:
    ends = ends_of((3, 0, 5))
    x, weight = made((3, 0, 5), torch.float32)
    dy = torch.ones(8, N)
    check_operator(torch.ops.trine.grouped_weight_gradient.default, (x, dy, ends))
    check_operator(torch.ops.trine.grouped_product.default, (x.requires_grad_(), weight.requires_grad_(), ends))
