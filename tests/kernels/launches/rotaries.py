"""Rotary embedding of heads as projections write them."""

from collections.abc import Iterator
from functools import partial

import torch

from engine.kernels.gpu.rotary import turn
from tests.kernels.launches.shapes import BF16, FP32, Launch, meta


def launches() -> Iterator[tuple[str, Launch]]:
    for dtype in (BF16, FP32):
        for features, turned in ((128, 128), (96, 24), (256, 256)):
            for interleaved in (False, True):
                name = f"{'neighbours' if interleaved else 'halves'} {dtype} {turned} of {features}"
                yield name, partial(_rotary, dtype, features, turned, interleaved)
    yield f"back {BF16}", partial(_rotary, BF16, 128, 128, False, True)


def _rotary(dtype: torch.dtype, features: int, turned: int, interleaved: bool, transposed: bool = False) -> None:
    q, k = (meta(2, 64, heads, features, dtype=dtype).transpose(1, 2) for heads in (32, 8))
    angles = meta(1, 64, turned, dtype=dtype)
    turn((q, k), (angles, angles), (q, k), interleaved, transposed)
