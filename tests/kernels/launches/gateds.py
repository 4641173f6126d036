"""Gated linear units of two halves of one tensor."""

from collections.abc import Iterator
from functools import partial

import torch

from engine.kernels.gpu.activations import gated_backward, gated_forward
from tests.kernels.launches.shapes import BF16, FP32, Launch, meta


def launches() -> Iterator[tuple[str, Launch]]:
    for kind in ("silu", "gelu", "gelu_tanh", "relu"):
        for dtype in (BF16, FP32):
            yield f"{kind} {dtype}", partial(_gated, kind, dtype)


def _gated(kind: str, dtype: torch.dtype) -> None:
    gate, up = meta(64, 2 * 11008, dtype=dtype).chunk(2, dim=1)
    gated_backward(gated_forward(gate, up, kind), gate, up, kind)
