"""Activations with bias and residual: reference and interpreted kernels against eager torch's error."""

from collections.abc import Callable
from typing import Literal

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from engine.kernels.dispatch import Kernels
from engine.kernels.ops.activations import Activation, activate
from tests.kernels.error import check_error
from tests.kernels.registered import check_operator
from tests.selection import wide

DTYPES = (torch.float32, wide(torch.float16), torch.bfloat16)
KINDS: tuple[Activation, ...] = ("none", "relu", "relu2", "silu", "gelu", "gelu_tanh")
SHAPES = ((2, 3, 40), (1, 1), (0, 24), (5, 1030))
Mode = Literal["reference", "triton"]


def eager(x: Tensor, kind: Activation) -> Tensor:
    """As models write it."""
    if kind == "relu2":
        return functional.relu(x) ** 2
    if kind.startswith("gelu"):
        return functional.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")
    return x if kind == "none" else getattr(functional, kind)(x)


def made(shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """x, bias, residual."""
    generator = torch.Generator().manual_seed(sum(shape))
    return [(2 * torch.randn(size, generator=generator)).to(dtype) for size in (shape, shape[-1:], shape)]


@pytest.mark.parametrize("mode", ["reference", "triton"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_error_is_at_most_twice_eager_torchs(
    dtype: torch.dtype, kind: Activation, shape: tuple[int, ...], mode: Mode
) -> None:
    kernels = Kernels(mode)
    check_error(
        lambda x, b, r: activate(x, b, kind, kernels, r), lambda x, b, r: eager(x + b, kind) + r, made(shape, dtype)
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bias_and_residual_may_be_absent(dtype: torch.dtype, kind: Activation) -> None:
    kernels = Kernels("triton")
    x, bias, residual = made((3, 21), dtype)
    check_error(lambda x: activate(x, None, kind, kernels) * 1, lambda x: eager(x, kind) * 1, [x])
    check_error(lambda x, b: activate(x, b, kind, kernels), lambda x, b: eager(x + b, kind), [x, bias])
    check_error(lambda x, r: activate(x, None, kind, kernels, r), lambda x, r: eager(x, kind) + r, [x, residual])


CUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "columns of a wider tensor": lambda x: x[..., 3:10],
    "crossed dims": lambda x: x.transpose(0, 2),
    "every other element": lambda x: x[..., ::2],
}


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_tensors_that_are_not_contiguous(cut: Callable[[Tensor], Tensor]) -> None:
    x, _, residual = made((4, 3, 14), torch.bfloat16)
    bias = torch.arange(2 * cut(x).shape[-1]).bfloat16()[::2]
    kernels = Kernels("triton")

    def ours(x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
        return activate(cut(x), bias, "gelu", kernels, cut(residual))

    check_error(ours, lambda x, b, r: eager(cut(x) + b, "gelu") + cut(r), [x, bias, residual])
    strided = activate(cut(x), bias, "gelu", kernels, cut(residual))
    assert torch.equal(strided, activate(cut(x).clone(), bias.clone(), "gelu", kernels, cut(residual).clone()))


def test_reference_has_the_gradients_of_finite_differences() -> None:
    given = [t.requires_grad_() for t in made((3, 5), torch.float64)]
    reference = Kernels("reference")
    for kind in KINDS:
        assert torch.autograd.gradcheck(lambda x, b, r, kind=kind: activate(x, b, kind, reference, r), given)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite_stays_in_its_place_and_the_large_stays_finite(kind: Activation) -> None:
    x = torch.zeros(2, 12)
    x[0, :6] = torch.tensor([float("nan"), 3e4, -3e4, 1e10, -1e10, 88.0])
    x.requires_grad_()
    expected, found = eager(x, kind), activate(x, None, kind, Kernels("triton"))
    torch.testing.assert_close(found, expected, equal_nan=True)
    for y in (found, expected):
        (slope,) = torch.autograd.grad(y.sum(), x)
        assert slope[0, 1:].isfinite().all() and slope[1].isfinite().all()
    infinite = activate(torch.full((1, 4), float("inf")), None, kind, Kernels("triton"))
    assert infinite.isinf().all()


def test_same_bits_twice() -> None:
    x, bias, residual = (t.requires_grad_() for t in made((37, 65), torch.bfloat16))

    def gradients() -> tuple[Tensor, ...]:
        y = activate(x, bias, "gelu_tanh", Kernels("triton"), residual)
        return torch.autograd.grad((y * y).sum(), (x, bias))

    assert all(torch.equal(one, other) for one, other in zip(gradients(), gradients(), strict=True))


def test_operator_is_registered_as_torch_wants_it() -> None:
    x, bias, residual = (t.requires_grad_() for t in made((5, 32), torch.float32))
    check_operator(torch.ops.trine.activate.default, (x, bias, residual, "gelu"))
    check_operator(torch.ops.trine.activate.default, (x, None, None, "relu2"))
    check_operator(torch.ops.trine.activate.default, (x, bias, residual, "none"))
