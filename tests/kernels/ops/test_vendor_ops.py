"""Operators of the library: against float64, and where it has none."""

from typing import Any

import pytest
import torch
from torch import Tensor

from engine.kernels.ops.vendor_ops import AttentionOptions, attention, scaled_matmul, scaled_matmul_reference

FP8 = torch.float8_e4m3fn
Operands = tuple[Tensor, Tensor, Tensor, Tensor]


def given(rows: tuple[int, ...], inputs: int, outputs: int, by_rows: bool) -> Operands:
    generator = torch.Generator().manual_seed(inputs)
    x, weight = (torch.randn(*lead, inputs, generator=generator).to(FP8) for lead in (rows, (outputs,)))
    if by_rows:
        return x, weight, torch.rand(*rows, 1, generator=generator), torch.rand(outputs, 1, generator=generator)
    return x, weight, torch.tensor(0.5), torch.tensor(3.0)


@pytest.mark.parametrize("by_rows", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sizes", [((2, 5), 32, 48), ((3,), 20, 7), ((0,), 16, 16)], ids=str)
def test_scaled_products(sizes: tuple[tuple[int, ...], int, int], dtype: torch.dtype, by_rows: bool) -> None:
    x, weight, scale_x, scale_weight = inputs = given(*sizes, by_rows)
    exact = (x.double() * scale_x) @ (weight.double() * scale_weight).t()
    for found in (scaled_matmul(*inputs, dtype), scaled_matmul_reference(*inputs, dtype)):
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), exact, rtol=2**-8 if dtype == torch.bfloat16 else 1e-5, atol=1e-4)


def test_one_operand_may_have_a_scale_a_row_and_the_other_one_number() -> None:
    x, weight, scale_x, _ = given((2, 5), 32, 48, by_rows=True)
    found = scaled_matmul(x, weight, scale_x, torch.tensor(2.0), torch.float32)
    exact = (x.double() * scale_x) @ (weight.double() * 2).t()
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-4)


def test_shapes_alone_are_enough() -> None:
    x, weight, *scales = (t.to("meta") for t in given((2, 5), 32, 48, by_rows=False))
    assert scaled_matmul(x, weight, scales[0], scales[1], torch.bfloat16).shape == (2, 5, 48)


@pytest.mark.parametrize("heads", [4, 2])
@pytest.mark.parametrize(
    "form", [AttentionOptions(), AttentionOptions(causal=True), AttentionOptions(scale=0.3)], ids=str
)
def test_attention(form: AttentionOptions, heads: int) -> None:
    generator = torch.Generator().manual_seed(heads)
    query = torch.randn(2, 4, 6, 8, generator=generator)
    key, value = (torch.randn(2, heads, 6, 8, generator=generator) for _ in range(2))
    scores = query @ key.repeat_interleave(4 // heads, 1).transpose(-1, -2) * (form.scale or 8**-0.5)
    if form.causal:
        scores = scores.masked_fill(~torch.ones(6, 6, dtype=torch.bool).tril(), float("-inf"))
    expected = scores.softmax(-1) @ value.repeat_interleave(4 // heads, 1)
    torch.testing.assert_close(attention(query, key, value, form), expected)


def test_attention_with_a_mask() -> None:
    query, key, value = torch.randn(3, 2, 4, 5, 8, generator=torch.Generator().manual_seed(1)).unbind(0)
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    found = attention(query, key, value, AttentionOptions(), mask)
    torch.testing.assert_close(found, attention(query, key, value, AttentionOptions(causal=True)))


def test_who_looks_at_functions_sees_one() -> None:
    seen: list[object] = []

    class Seen(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    query = torch.randn(1, 2, 3, 4)
    with Seen():
        attention(query, query, query, AttentionOptions())
        scaled_matmul(*given((2,), 16, 16, by_rows=False), torch.float32)
    assert attention in seen and scaled_matmul in seen
