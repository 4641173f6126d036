"""Attention under dropout, and with values of another width, keeps what a GPU's kernels keep: no scores."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from engine.dry_run.dry_run_rank import CPU, shape_mode
from engine.dry_run.gpu_attention import attention_of_gpu
from engine.planning.activation_memory import LiveStorages

ROWS, HEADS, LENGTH, WIDTH = 2, 4, 64, 16


def kept(values: int = WIDTH, mask: bool = False, on_gpu: bool = True, **options: float | bool) -> int:
    """Bytes that live after attention, and that its backward leaves of them but the three gradients."""
    shapes = [(ROWS, HEADS, LENGTH, width) for width in (WIDTH, WIDTH, values)]
    with shape_mode():
        given = [torch.empty(shape, dtype=torch.bfloat16, device=CPU, requires_grad=True) for shape in shapes]
    more: dict[str, Tensor] = {"attn_mask": torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool)} if mask else {}
    live = LiveStorages()
    with attention_of_gpu() if on_gpu else nullcontext(), live:
        attend: Any = functional.scaled_dot_product_attention
        out = attend(*given, **more, **options)
        assert out.shape == (ROWS, HEADS, LENGTH, values)
        after = live.bytes
        out.sum().backward()
    assert all(one.grad is not None and one.grad.shape == one.shape for one in given)
    return after


OUT = 2 * ROWS * HEADS * LENGTH * WIDTH
SUMS = 4 * ROWS * HEADS * LENGTH
SCORES = 2 * ROWS * HEADS * LENGTH * LENGTH


def test_dropout_costs_nothing() -> None:
    assert kept(dropout_p=0.1, is_causal=True) == kept(is_causal=True) == OUT + SUMS
    assert kept(dropout_p=0.1, is_causal=True, on_gpu=False) > SCORES


def test_a_mask_costs_itself() -> None:
    masked = kept(dropout_p=0.1, mask=True)
    assert OUT + SUMS < masked < SCORES


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_values_may_be_narrower(dropout: float) -> None:
    seed = 2 * 8
    found = kept(values=8, is_causal=True, dropout_p=dropout)
    assert found == OUT // 2 + SUMS + seed
    assert kept(values=8, is_causal=True, on_gpu=False) > SCORES


def test_what_no_kernel_takes_stays() -> None:
    assert kept(values=12, is_causal=True) == kept(values=12, is_causal=True, on_gpu=False) > SCORES
