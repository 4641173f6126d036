"""AdamW with moments in 8 bits in Triton: one pass that decodes the moments of whole blocks, updates and encodes them.

    read      gradient, weights, codes of both moments
    written   weights, codes of both moments: 16 bytes an element with fp32 weights and gradients

Codes and scales are those of ``kernels/optim/eight_bit_codes.py``, to the bit for equal moments. A program takes a few
blocks, so that it holds about ``_ELEMENTS`` numbers. Roots and quotients are rounded to nearest.
"""

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.gpu.launch_shapes import ceil_div
from engine.kernels.optim.eight_bit_codes import BlockCodes
from engine.kernels.optim.update_rules import AdamRule

_ELEMENTS = 1024


@triton.jit
def decoded(codes, scale, place, inside, SIGNED: tl.constexpr):
    """The moments of the blocks of a program; ``scale`` [blocks]."""
    LEAST: tl.constexpr = 1016 - 127 if SIGNED else 1016 - 255
    code = tl.load(codes + place, mask=inside, other=0).to(tl.int32)
    size = code & 127 if SIGNED else code
    y = tl.where(size > 0, ((size + LEAST) << 20).to(tl.float32, bitcast=True), 0.0)
    if SIGNED:
        y = tl.where(code > 127, -y, y)
    return y * scale[:, None]


@triton.jit
def encoded(x, SIGNED: tl.constexpr):
    """(codes, scales [blocks]) of moments."""
    LARGEST: tl.constexpr = 127 if SIGNED else 255
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    finite = bits < 0x7F800000
    peak = tl.max(tl.where(finite, tl.abs(x), 0.0), axis=1)
    scale = tl.where(peak < 1.1754943508222875e-38, 0.0, peak)
    scale = tl.where(tl.max(bits, axis=1) < 0x7F800000, scale, float("nan"))
    known = tl.where(scale > 0.0, scale, 1.0)
    y = tl.div_rn(tl.where(finite, tl.abs(x), 0.0), known[:, None] + tl.zeros(x.shape, tl.float32))
    y = tl.where(scale[:, None] > 0.0, y, 0.0)
    code = ((y.to(tl.int32, bitcast=True) + (1 << 19)) >> 20) - (1016 - LARGEST)
    code = tl.minimum(tl.maximum(code, 0), LARGEST)
    if SIGNED:
        code = tl.where(y >= 0.625 / 65536, tl.maximum(code, 1), code)
        return (code | tl.where((x < 0.0) & (code > 0), 128, 0)).to(tl.uint8), scale
    return tl.where(y > 0.0, tl.maximum(code, 1), code).to(tl.uint8), scale


@triton.jit
def adamw_8bit_kernel(
    weights, gradient, first, first_scales, second, second_scales, count,
    decay, first_rest, second_rest, step_size, root_scale, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update ROWS blocks of BLOCK elements."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    place = row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside, there = place < count, row * BLOCK < count
    first_scale = tl.load(first_scales + row, mask=there, other=0.0)
    second_scale = tl.load(second_scales + row, mask=there, other=0.0)
    w = tl.load(weights + place, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gradient + place, mask=inside, other=0.0).to(tl.float32)
    m = decoded(first, first_scale, place, inside, True)
    v = decoded(second, second_scale, place, inside, False)
    w -= tl.where(decay != 0.0, decay * w, 0.0)  # 0 times infinity would be NaN
    m = tl.where(inside, m + first_rest * (g - m), 0.0)
    v = tl.where(inside, v + second_rest * (g * g - v), 0.0)
    w -= tl.div_rn(step_size * m, tl.sqrt_rn(v) * root_scale + eps)
    tl.store(weights + place, w, mask=inside)
    code, scale = encoded(m, True)
    tl.store(first + place, code, mask=inside)
    tl.store(first_scales + row, scale, mask=there)
    code, scale = encoded(v, False)
    tl.store(second + place, code, mask=inside)
    tl.store(second_scales + row, scale, mask=there)


def adamw_8bit(
    weights: Tensor, gradient: Tensor, moments: tuple[BlockCodes, BlockCodes], rule: AdamRule, step: int, block: int
) -> None:
    """Launch the update of a flat run, decoupled decay only; ``step`` is that of the bias correction."""
    count, (beta1, beta2) = weights.numel(), rule.betas
    if not count:
        return
    rows = max(1, _ELEMENTS // block)
    adamw_8bit_kernel[(ceil_div(ceil_div(count, block), rows),)](
        weights, gradient, *moments[0], *moments[1], count,
        rule.lr * rule.weight_decay, 1 - beta1, 1 - beta2,
        rule.lr / (1 - beta1**step), (1 - beta2**step) ** -0.5, rule.eps,
        ROWS=rows, BLOCK=block, num_warps=4,
    )  # fmt: skip
