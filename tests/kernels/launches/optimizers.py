"""Adam over every kind of run, and sums of squares."""

from collections.abc import Iterator
from functools import partial

import torch

from engine.kernels.gpu.adamw import adamw, adamw_8bit
from engine.kernels.gpu.norm import squared_norm
from engine.kernels.optim.eight_bit_codes import BlockCodes
from engine.kernels.optim.stochastic_rounding import Lines, StochasticRounding
from engine.kernels.optim.update_rules import AdamRule
from tests.kernels.launches.shapes import BF16, FP32, Launch, meta

COUNT = 1 << 20
KEYS = 2**62 + 5, 2**61 + 7, 2**60 + 9
LINES = Lines(meta(4099, dtype=torch.int32), 8198, 515)
ROUNDED = {
    "whole": StochasticRounding(KEYS, 67),
    "cut": StochasticRounding(KEYS, 67, LINES),
    "cut, large": StochasticRounding(KEYS, 2**33 + 1, LINES),
}


def launches() -> Iterator[tuple[str, Launch]]:
    for narrow in (None, BF16, torch.float16):
        for gradient in (FP32, BF16):
            for decoupled in (True, False):
                name = f"{'AdamW' if decoupled else 'Adam'}, gradient {gradient}, narrow {narrow}"
                yield name, partial(_adam, gradient, narrow, decoupled)
    for name, rounding in ROUNDED.items():
        for moments in (FP32, BF16):
            yield f"AdamW, rounded {name}, moments {moments}", partial(_rounded, rounding, moments)
    for block in (64, 256, 2048):
        yield f"AdamW, 8 bits, blocks of {block}", partial(_eight_bits, block)
    for dtype in (FP32, BF16):
        yield str(dtype), partial(squared_norm, [(meta(COUNT, dtype=dtype), True)])


def _rule(decoupled: bool) -> AdamRule:
    return AdamRule(1e-3, (0.9, 0.95), 1e-8, 0.1, decoupled)


def _decision() -> tuple[torch.Tensor, torch.Tensor]:
    return meta(dtype=torch.float64), meta(dtype=torch.float64)


def _adam(gradient: torch.dtype, narrow: torch.dtype | None, decoupled: bool) -> None:
    wide = meta(COUNT, dtype=FP32)
    kept = None if narrow is None else meta(COUNT, dtype=narrow)
    adamw((wide, wide, wide, kept), meta(COUNT, dtype=gradient), _decision(), _rule(decoupled), 3, None)


def _eight_bits(block: int) -> None:
    wide, codes, scales = meta(COUNT, dtype=FP32), meta(COUNT, dtype=torch.uint8), meta(COUNT // block, dtype=FP32)
    adamw_8bit(wide, wide, (BlockCodes(codes, scales), BlockCodes(codes, scales)), _rule(True), 3, block)


def _rounded(rounding: StochasticRounding, moments: torch.dtype) -> None:
    weights, moment = meta(COUNT, dtype=BF16), meta(COUNT, dtype=moments)
    adamw((weights, moment, moment, None), weights, _decision(), _rule(True), 3, rounding)
