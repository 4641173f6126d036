"""Codes err by what the format says, have themselves as codes, and are those of the whole matrix in each part of it."""

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from engine.errors import EngineError
from engine.kernels.codecs.weight_format import (
    QuantizedShape,
    QuantizedWeight,
    WeightFormat,
    WeightKind,
    block_scales,
    dequantize,
    normal_book,
    quantize,
)
from engine.kernels.dispatch import REFERENCE, Kernels
from engine.kernels.ops.linear import LinearForm, linear

PUBLISHED = (
    -1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0,
    0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0,
)  # fmt: skip
"""The values of NF4 as QLoRA's appendix E has them, rounded."""
KINDS: tuple[WeightKind, ...] = ("int8", "nf4")
SHAPES = [(6, 256), (5, 200), (3, 30), (4, 65), (2, 3, 96)]
"""Whole blocks, a last block that is shorter, one block, an odd number of columns, a stack."""


def matrix(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    spread = torch.rand(shape, generator=generator) * 6 - 5
    return (torch.randn(shape, generator=generator) * 10.0**spread).to(dtype)


def whole(kind: WeightKind, shape: tuple[int, ...], block: int = 64) -> QuantizedShape:
    return QuantizedShape(format=WeightFormat(kind, block), shape=shape)


def test_the_book_is_that_of_the_paper() -> None:
    assert normal_book() == pytest.approx(PUBLISHED, abs=1e-6)


@pytest.mark.parametrize(("kind", "shape"), [*product(KINDS, SHAPES)])
def test_an_error_is_at_most_half_a_step_of_its_block(kind: WeightKind, shape: tuple[int, ...]) -> None:
    form, values = whole(kind, shape), matrix(shape)
    packed = quantize(values, form)
    assert packed.dtype == torch.uint8 and packed.numel() == form.bytes
    book = torch.tensor(normal_book())
    step = 1 / 127 if kind == "int8" else float((book[1:] - book[:-1]).max())
    blocks = torch.tensor([number for number, width in form.blocks for _ in range(width)])
    scales = block_scales(values, form)[:, blocks].view(shape)
    errors = (dequantize(packed, form, torch.float32) - values).abs()
    assert bool((errors <= scales * (step / 2 + 1e-6)).all())


@pytest.mark.parametrize(("kind", "shape"), [*product(KINDS, SHAPES)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_of_codes_have_the_same_codes(kind: WeightKind, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    form = whole(kind, shape)
    packed = quantize(matrix(shape, dtype), form)
    assert torch.equal(quantize(dequantize(packed, form, dtype), form), packed)


def test_the_bytes_are_those_of_codes_and_scales() -> None:
    assert whole("nf4", (8, 4096)).bytes == 8 * 4096 // 2 + 8 * 4096 // 64 * 4
    assert whole("int8", (8, 4096), 128).bytes == 8 * 4096 + 8 * 4096 // 128 * 4
    assert whole("nf4", (3, 65)).bytes == 100 + 3 * 2 * 4  # 33 bytes a row, and scales begin at a multiple of 4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("runs", [((0, 64), (128, 192)), ((0, 40),), ((40, 100),), ((10, 20), (60, 70), (190, 200))])
def test_a_part_of_the_columns_has_the_values_of_the_whole(kind: WeightKind, runs: tuple[tuple[int, int], ...]) -> None:
    values, held = matrix((7, 200)), WeightFormat(kind, 64)
    full = QuantizedShape(format=held, shape=(7, 200))
    columns = torch.cat([torch.arange(start, stop) for start, stop in runs])
    part = QuantizedShape(format=held, shape=(7, len(columns)), runs=runs)
    scales = block_scales(values, full)[:, [number for number, _ in part.blocks]]
    packed = quantize(values[:, columns], part, scales)
    assert packed.numel() == part.bytes
    expected = dequantize(quantize(values, full), full, torch.float32)[:, columns]
    assert torch.equal(dequantize(packed, part, torch.float32), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_large_matrices_are_the_same_in_slabs(kind: WeightKind, monkeypatch: pytest.MonkeyPatch) -> None:
    form, values = whole(kind, (9, 128)), matrix((9, 128))
    packed = quantize(values, form)
    decoded = dequantize(packed, form, torch.float32)
    monkeypatch.setattr("engine.kernels.codecs.weight_format.AT_ONCE", 256)
    assert torch.equal(quantize(values, form), packed)
    assert torch.equal(dequantize(packed, form, torch.float32), decoded)


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_stay_zero_and_what_is_not_finite_shows(kind: WeightKind) -> None:
    values = torch.zeros(2, 128)
    values[1, 3], values[1, 70] = float("nan"), 5.0
    form = whole(kind, (2, 128))
    decoded = dequantize(quantize(values, form), form, torch.float32)
    assert bool((decoded[0] == 0).all()) and bool(decoded[1, :64].isnan().all())
    assert decoded[1, 70] == 5.0


@pytest.mark.parametrize(("kind", "block"), [*product(KINDS, (64, 256))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_triton_makes_the_same_bits(kind: WeightKind, block: int, dtype: torch.dtype) -> None:
    form = whole(kind, (3, 5, 256), block)
    packed = quantize(matrix((3, 5, 256)), form)
    for index in (None, 1):
        ours = dequantize(packed, form, dtype, Kernels("triton"), index)
        assert torch.equal(ours, dequantize(packed, form, dtype, index=index)), index


def test_one_matrix_of_a_stack() -> None:
    form = whole("nf4", (3, 5, 100))
    packed = quantize(matrix((3, 5, 100)), form)
    assert torch.equal(dequantize(packed, form, torch.float32, index=2), dequantize(packed, form, torch.float32)[2])


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
        with pytest.raises(EngineError, match=r"aten::.*quantize_frozen has stored it in nf4"):
            write()


def test_one_matrix_of_a_stack_is_made_alone() -> None:
    form = QuantizedShape(format=WeightFormat("int8", 8), shape=(3, *SHAPE))
    packed = quantize(torch.randn(form.shape, generator=torch.Generator().manual_seed(1)), form)
    values = dequantize(packed, form, torch.float32)
    held, x = QuantizedWeight.of(packed, form, torch.float32), torch.randn(4, 16, requires_grad=True)
    assert torch.equal(functional.linear(x, held[torch.tensor(2)]), functional.linear(x, values[2]))
    assert torch.equal(held[-1].t() + 0, values[2].t()) and torch.equal(held.clone(), values)
    assert torch.equal(held.transpose(1, 2)[1], values[1].t())
