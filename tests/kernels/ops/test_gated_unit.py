"""Gated linear units: reference and interpreted kernels against eager torch's error."""

from collections.abc import Callable
from typing import Literal

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from engine.kernels.dispatch import Kernels
from engine.kernels.ops.activations import Activation, gated
from tests.kernels.error import check_error
from tests.kernels.registered import check_operator
from tests.selection import wide

DTYPES = (torch.float32, wide(torch.float16), torch.bfloat16)
KINDS: tuple[Activation, ...] = ("silu", "gelu", "gelu_tanh", "relu")
SHAPES = ((2, 3, 40), (1, 1), (0, 24), (3, 1050), (7,))


def eager(gate: Tensor, up: Tensor, kind: Activation) -> Tensor:
    """As models write it."""
    if kind == "silu":
        return functional.silu(gate) * up
    if kind == "relu":
        return functional.relu(gate) * up
    return functional.gelu(gate, approximate="tanh" if kind == "gelu_tanh" else "none") * up


def made(shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(sum(shape))
    return [(3 * torch.randn(shape, generator=generator)).to(dtype) for _ in range(2)]


@pytest.mark.parametrize("mode", ["reference", "triton"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_error_is_at_most_twice_eager_torchs(
    dtype: torch.dtype, kind: Activation, shape: tuple[int, ...], mode: Literal["reference", "triton"]
) -> None:
    kernels = Kernels(mode)
    check_error(lambda g, u: gated(g, u, kind, kernels), lambda g, u: eager(g, u, kind), made(shape, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_halves_of_one_tensor_are_read_where_they_lie(dtype: torch.dtype) -> None:
    kernels = Kernels("triton")

    def halved(operator: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda x: operator(x[..., :33], x[..., 33:])

    ours, eagerly = halved(lambda g, u: gated(g, u, "silu", kernels)), halved(lambda g, u: eager(g, u, "silu"))
    check_error(ours, eagerly, [torch.cat(made((2, 3, 33), dtype), dim=-1)])


def test_columns_and_crossed_dims_are_copied_first() -> None:
    gate, up = made((4, 6, 5), torch.float32)
    gate, up = gate.transpose(0, 2), up.permute(2, 1, 0)
    kernels = Kernels("triton")
    check_error(lambda g, u: gated(g, u, "gelu", kernels), lambda g, u: eager(g, u, "gelu"), [gate, up])
    torch.testing.assert_close(gated(gate, up, "gelu", kernels), eager(gate, up, "gelu"))


def test_what_broadcasts_goes_to_torch() -> None:
    gate, up = made((4, 6), torch.float32)
    torch.testing.assert_close(gated(gate, up[:1], "silu", Kernels("triton")), eager(gate, up[:1], "silu"))


def test_reference_has_the_gradients_of_finite_differences() -> None:
    gate, up = (t.requires_grad_() for t in made((3, 5), torch.float64))
    for kind in KINDS:
        assert torch.autograd.gradcheck(lambda g, u, kind=kind: gated(g, u, kind, Kernels("reference")), (gate, up))


def test_what_is_not_finite_stays_in_its_place() -> None:
    gate, up = made((2, 6), torch.float32)
    gate[0, 0], gate[0, 1], gate[0, 2], gate[1, 0] = float("inf"), float("-inf"), float("nan"), -1e30
    up[1, 5] = float("inf")
    found = gated(gate, up, "silu", Kernels("triton"))
    torch.testing.assert_close(found, eager(gate, up, "silu"), equal_nan=True)


def test_same_bits_twice() -> None:
    gate, up = (t.requires_grad_() for t in made((5, 70), torch.bfloat16))

    def gradients() -> tuple[Tensor, ...]:
        return torch.autograd.grad(gated(gate, up, "silu", Kernels("triton")).sum(), (gate, up))

    assert all(torch.equal(one, other) for one, other in zip(gradients(), gradients(), strict=True))


def test_operator_is_registered_as_torch_wants_it() -> None:
    gate, up = (t.requires_grad_() for t in made((5, 32), torch.float32))
    check_operator(torch.ops.trine.gated.default, (gate, up, "silu"))
    halves = [half.detach().requires_grad_() for half in torch.cat([gate, up], -1).chunk(2, -1)]
    check_operator(torch.ops.trine.gated.default, (*halves, "gelu"))
