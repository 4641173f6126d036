"""Norms of every width up to the widest that fits, with everything they can have."""

from collections.abc import Iterator
from functools import partial

import torch

from engine.kernels.gpu.norm import norm_backward, norm_forward
from engine.kernels.ops.norm import WIDEST_LAYER_FP32
from tests.kernels.launches.shapes import BF16, FP32, Launch, meta


def launches() -> Iterator[tuple[str, Launch]]:
    for width in (1024, 4096, 8192, 16384):
        for centered in (False, True):
            for dtype in (BF16, FP32):
                if dtype == BF16 or not centered or width <= WIDEST_LAYER_FP32:
                    yield f"{'layer' if centered else 'rms'} {dtype} {width}", partial(_norm, width, centered, dtype)


def _norm(width: int, centered: bool, dtype: torch.dtype) -> None:
    x, affine = meta(64, width, dtype=dtype), meta(width, dtype=dtype)
    y, stream, mean, rstd = norm_forward(x, x, (affine, affine if centered else None), 1e-6, 0.0, centered)
    assert stream is not None
    norm_backward(y, y, stream, affine, (mean, rstd), (0.0, centered, centered))
