"""Softmax statistics and gradients of narrow and wide vocabularies, with everything they can have."""

from collections.abc import Iterator
from functools import partial

import torch

from engine.kernels.gpu.cross_entropy import Asked, SlopeBuffers, softmax_gradient, softmax_statistics
from tests.kernels.launches.shapes import BF16, FP32, Launch, meta


def launches() -> Iterator[tuple[str, Launch]]:
    for width in (1000, 50_257, 262_144):
        for dtype in (BF16, FP32):
            yield f"plain {dtype} {width}", partial(_loss, width, dtype)
            yield f"smooth {dtype} {width}", partial(_loss, width, dtype, even=True)
            yield f"weighted {dtype} {width}", partial(_loss, width, dtype, weighted=True)


def _loss(width: int, dtype: torch.dtype, even: bool = False, weighted: bool = False) -> None:
    logits, target = meta(64, width, dtype=dtype), meta(64, dtype=torch.int64)
    asked = Asked(target, meta(width, dtype=FP32) if weighted else None, even, 0)
    largest, total, picked, _ = softmax_statistics(logits, asked)
    slopes = SlopeBuffers(total, picked, total if asked.weighted else None)
    softmax_gradient(logits, asked, (largest, total), slopes, logits)
