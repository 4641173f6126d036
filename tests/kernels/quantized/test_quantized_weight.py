"""Every operation sees the matrix; autograd saves codes and never values."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from engine.errors import EngineError
from engine.kernels.codecs.weight_format import QuantizedShape, QuantizedWeight, WeightFormat, dequantize, quantize
from engine.kernels.dispatch import REFERENCE
from engine.kernels.ops.linear import LinearForm, linear

SHAPE = (24, 16)
FORM = QuantizedShape(format=WeightFormat("nf4", 8), shape=SHAPE)


def pair(dtype: torch.dtype = torch.float32) -> tuple[QuantizedWeight, Tensor]:
    packed = quantize(torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)), FORM)
    return QuantizedWeight.of(packed, FORM, dtype), dequantize(packed, FORM, dtype)


BIAS = torch.linspace(-1, 1, SHAPE[0])
PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": lambda x, w: functional.linear(x, w),
    "with a bias": lambda x, w: functional.linear(x, w, BIAS.to(x.dtype)),
    "transposed": lambda x, w: x @ w.t(),
    "Conv1D": lambda x, w: torch.addmm(BIAS.to(x.dtype), x.reshape(-1, SHAPE[1]), w.T),
    "einsum": lambda x, w: torch.einsum("...i,oi->...o", x, w),
    "the engine's": lambda x, w: linear(x, w, BIAS.to(x.dtype), LinearForm(), REFERENCE),
    "recomputed": lambda x, w: checkpoint(functional.linear, x, w, use_reentrant=False),
    "a norm of it": lambda x, w: functional.linear(x, w / torch.linalg.norm(w, dim=1, keepdim=True)),
}
INPUTS = {
    "rows": torch.randn(5, 16),
    "a batch": torch.randn(2, 5, 16),
    "strides of a batch": torch.randn(5, 2, 16).transpose(0, 1),
}


@pytest.mark.parametrize("given", INPUTS)
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_is_that_of_the_matrix(name: str, given: str) -> None:
    held, values = pair()
    results = []
    for weight in (held, values):
        x = INPUTS[given].clone().requires_grad_()
        y = PRODUCTS[name](x, weight)
        y.square().sum().backward()  # type: ignore[no-untyped-call]
        results.append((y.detach(), x.grad))
    assert type(results[0][0]) is Tensor
    for ours, plain in zip(*results, strict=True):
        assert ours is not None and plain is not None and torch.equal(ours, plain)


@pytest.mark.parametrize("given", INPUTS)
@pytest.mark.parametrize("name", [name for name in PRODUCTS if name not in ("a norm of it", "recomputed")])
def test_autograd_saves_codes(name: str, given: str) -> None:
    saved: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    x = INPUTS[given].clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        PRODUCTS[name](x, pair()[0])
    assert any(isinstance(tensor, QuantizedWeight) for tensor in saved)
    for tensor in saved:
        assert isinstance(tensor, QuantizedWeight) or tensor.numel() <= x.numel() + BIAS.numel(), tensor.shape


def test_autocast_casts_the_values() -> None:
    held, values = pair()
    x = torch.randn(3, 16)
    with torch.autocast("cpu", torch.bfloat16):
        ours, plain = functional.linear(x, held), functional.linear(x, values)
    assert ours.dtype == torch.bfloat16 and torch.equal(ours, plain)


def test_it_answers_as_the_matrix_does_and_has_no_memory() -> None:
    held, values = pair(torch.bfloat16)
    assert (held.shape, held.dtype, held.device) == (values.shape, torch.bfloat16, values.device)
    assert held.t().shape == (16, 24) and held.t().stride() == values.t().stride()
    assert held.untyped_storage().nbytes() == 0 and not held.requires_grad
    assert isinstance(held.detach(), QuantizedWeight) and held.to("meta").shape == SHAPE
    assert torch.equal(held + 0, values) and torch.equal(held.float(), values.float())


def test_writes_are_refused() -> None:
    held, _ = pair()
    writes: list[Callable[[], Tensor]] = [
        lambda: held.add_(1.0), lambda: held.copy_(torch.zeros(SHAPE)), lambda: held.t().zero_(),
    ]  # fmt: skip
    for write in writes:
        with pytest.raises(EngineError, match=r"held in nf4 \(quantize_frozen\) and was written by aten::"):
            write()


def test_one_matrix_of_a_stack_is_made_alone() -> None:
    form = QuantizedShape(format=WeightFormat("int8", 8), shape=(3, *SHAPE))
    packed = quantize(torch.randn(form.shape, generator=torch.Generator().manual_seed(1)), form)
    values = dequantize(packed, form, torch.float32)
    held, x = QuantizedWeight.of(packed, form, torch.float32), torch.randn(4, 16, requires_grad=True)
    assert torch.equal(functional.linear(x, held[torch.tensor(2)]), functional.linear(x, values[2]))
    assert torch.equal(held[-1].t() + 0, values[2].t()) and torch.equal(held.clone(), values)
    assert torch.equal(held.transpose(1, 2)[1], values[1].t())
