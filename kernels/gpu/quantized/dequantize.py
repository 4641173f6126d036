"""Codes of frozen weights into values, in Triton: one pass, in which a code is read and a value written.

A program takes a few whole blocks, so that it holds about ``_ELEMENTS`` numbers. Blocks of all rows lie one after the
other, and so do their scales. Two codes of 4 bits that share a byte are neighbours, so even and odd elements are held
apart; the 16 values that they stand for stay in the cache.

Results are those of ``kernels/quantized/weight_format.py`` to the bit.
"""

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.gpu.launch_shapes import ceil_div
from engine.kernels.gpu.wire.block_codec import signed

_ELEMENTS = 1024
_WARPS = 4


@triton.jit
def dequantize_kernel(
    codes, scales, book, out, blocks, BITS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Decode ROWS blocks."""
    BYTES: tl.constexpr = BLOCK * BITS // 8
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = block < blocks
    inside = there[:, None] & (tl.arange(0, BYTES)[None, :] < BYTES)
    scale = tl.load(scales + block, mask=there, other=0.0)[:, None]
    code = tl.load(codes + block[:, None] * BYTES + tl.arange(0, BYTES)[None, :], mask=inside, other=0).to(tl.int32)
    kind = out.dtype.element_ty
    if BITS == 8:
        ratio = tl.div_rn(signed(code, 8).to(tl.float32), tl.full(code.shape, 127.0, tl.float32))
        place = block[:, None] * BLOCK + tl.arange(0, BYTES)[None, :]
        tl.store(out + place, (ratio * scale).to(kind), mask=inside)
    else:
        place = block[:, None] * BLOCK + 2 * tl.arange(0, BYTES)[None, :]
        even, odd = tl.load(book + (code & 15)), tl.load(book + (code >> 4))
        tl.store(out + place, (even * scale).to(kind), mask=inside)
        tl.store(out + place + 1, (odd * scale).to(kind), mask=inside)


def launch_dequantize(codes: Tensor, scales: Tensor, book: Tensor, out: Tensor, bits: int) -> None:
    """Decode codes, uint8, with a scale for each block, fp32 [K], into ``out``, contiguous, of K whole blocks.

    ``book``: the values of 4-bit codes, fp32 [16].
    """
    blocks, block = scales.numel(), out.numel() // scales.numel()
    at_once = max(1, _ELEMENTS // block)
    dequantize_kernel[(ceil_div(blocks, at_once),)](
        codes, scales, book, out, blocks, BITS=bits, ROWS=at_once, BLOCK=block, num_warps=_WARPS
    )
