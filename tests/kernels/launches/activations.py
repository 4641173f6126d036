"""Activations with a bias and a residual sum, and without."""

from collections.abc import Iterator
from functools import partial

import torch

from engine.kernels.gpu.activations import activation_backward, activation_forward
from tests.kernels.launches.shapes import BF16, FP32, Launch, meta


def launches() -> Iterator[tuple[str, Launch]]:
    for kind in ("none", "relu", "relu2", "silu", "gelu", "gelu_tanh"):
        yield f"{kind} {BF16}", partial(_activation, kind, BF16, True)
    for dtype in (BF16, FP32):
        yield f"bare {dtype}", partial(_activation, "gelu_tanh", dtype, False)


def _activation(kind: str, dtype: torch.dtype, full: bool) -> None:
    x, bias = meta(64, 16384, dtype=dtype), meta(16384, dtype=dtype) if full else None
    y = activation_forward(x, bias, x if full else None, kind)
    activation_backward(y, x, bias, kind)
