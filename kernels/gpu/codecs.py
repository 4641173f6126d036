"""Codecs in Triton. For messages: one pass to encode, with the residual; one to decode; one to decode and add.

A program processes a few blocks, about ``_ELEMENTS`` numbers. In a message the codes come first, then the scales:
``codes`` and ``scales`` point to the same memory, as bytes and as fp32. Two codes of 4 bits in one byte are neighbours,
so a program has separate tensors of even and odd elements.

Results equal ``kernels/codecs/block_codec.py`` to the bit, except that a GPU rounds a product and sum once.

For frozen weights: one pass that reads codes and writes values.

Blocks of all rows are consecutive in memory, and so are the scales; the 16 values of 4-bit codes stay in the cache.

Results equal ``kernels/codecs/weight_format.py`` to the bit.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.gpu.launch_shapes import ceil_div

_ELEMENTS = 1024
_WARPS = 4


@triton.jit
def round_half_even(x):
    """Rounds each number in ``x`` to the nearest integer, ties to the even one; |x| must be at most 2^22."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def is_number(x):
    """Returns True where ``x`` is finite."""
    return (x.to(tl.int32, bitcast=True) & 0x7FFFFFFF) < 0x7F800000


@triton.jit
def with_residual(values, residual, place, inside, FEEDBACK: tl.constexpr):
    """Returns the values at ``values + place`` as fp32; FEEDBACK: plus the rounding errors at ``residual + place``.

    Where ``inside`` is False, nothing is read, and the result is 0.
    """
    x = tl.load(values + place, mask=inside, other=0.0).to(tl.float32)
    if FEEDBACK:
        x += tl.load(residual + place, mask=inside, other=0.0)
    return x


@triton.jit
def scale_of(peak, LARGEST: tl.constexpr):
    """Returns the scale of a block: its largest finite absolute value ``peak`` divided by the largest code LARGEST.

    The scale is at least the smallest normal fp32 number, or 0 for a block of zeros.
    """
    least = tl.maximum(tl.div_rn(peak, tl.full(peak.shape, LARGEST, tl.float32)), 1.1754943508222875e-38)
    return tl.where(peak > 0.0, least, 0.0)


@triton.jit
def encoded_number(x, scale, residual, place, inside, LARGEST: tl.constexpr, FEEDBACK: tl.constexpr):
    """Returns the int32 codes of the numbers ``x``: ``x`` divided by ``scale`` and rounded.

    The code of a number that is not finite is -LARGEST - 1. FEEDBACK: writes the rounding errors to ``residual`` at
    ``place``, where ``inside`` is True.
    """
    finite = is_number(x)
    known = tl.where(finite, x, 0.0)
    code = round_half_even(tl.div_rn(known, tl.where(scale > 0.0, scale, 1.0) + tl.zeros(x.shape, tl.float32)))
    if FEEDBACK:
        tl.store(residual + place, tl.where(finite, known - code * scale, 0.0), mask=inside)
    return tl.where(finite, code, -LARGEST - 1.0).to(tl.int32)


@triton.jit
def value_of(code, scale, LARGEST: tl.constexpr):
    """Decodes int32 codes to fp32 numbers: ``code`` times ``scale``.

    The reserved code -LARGEST - 1 is decoded to NaN.
    """
    return tl.where(code == -LARGEST - 1, float("nan"), code.to(tl.float32) * scale)


@triton.jit
def encode_kernel(
    values, residual, codes, scales, blocks, blocks_each, message_bytes, scales_at,
    BITS: tl.constexpr, FEEDBACK: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Encodes ROWS blocks of BLOCK values to codes of BITS bits and one fp32 scale per block.

    A message has all its codes first, then its scales.

    Args:
        residual: with FEEDBACK, numbers that are added to the values and then overwritten with the rounding errors.
        blocks: number of blocks in all messages.
        blocks_each: number of blocks in one message.
        scales_at: index of the first scale in a message, in fp32 elements.
    """
    LARGEST: tl.constexpr = (1 << (BITS - 1)) - 1
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there, message, number = block < blocks, block // blocks_each, block % blocks_each
    if BITS == 8:
        inside = there[:, None] & (tl.arange(0, BLOCK)[None, :] < BLOCK)
        place = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        x = with_residual(values, residual, place, inside, FEEDBACK)
        peak = tl.max(tl.where(is_number(x), tl.abs(x), 0.0), axis=1)
        scale = scale_of(peak, LARGEST)
        code = encoded_number(x, scale[:, None], residual, place, inside, LARGEST, FEEDBACK)
        target = message[:, None] * message_bytes + number[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        tl.store(codes + target, (code & 255).to(tl.uint8), mask=inside)
    else:
        HALF: tl.constexpr = BLOCK // 2
        inside = there[:, None] & (tl.arange(0, HALF)[None, :] < HALF)
        place = block[:, None] * BLOCK + 2 * tl.arange(0, HALF)[None, :]
        even = with_residual(values, residual, place, inside, FEEDBACK)
        odd = with_residual(values, residual, place + 1, inside, FEEDBACK)
        high = tl.maximum(tl.where(is_number(even), tl.abs(even), 0.0), tl.where(is_number(odd), tl.abs(odd), 0.0))
        scale = scale_of(tl.max(high, axis=1), LARGEST)
        low = encoded_number(even, scale[:, None], residual, place, inside, LARGEST, FEEDBACK) & 15
        up = encoded_number(odd, scale[:, None], residual, place + 1, inside, LARGEST, FEEDBACK) & 15
        target = message[:, None] * message_bytes + number[:, None] * HALF + tl.arange(0, HALF)[None, :]
        tl.store(codes + target, (low | (up << 4)).to(tl.uint8), mask=inside)
    tl.store(scales + message * (message_bytes // 4) + scales_at + number, scale, mask=there)


@triton.jit
def signed(code, BITS: tl.constexpr):
    """Returns the lowest BITS bits of the int32 ``code`` as a signed number, in two's complement."""
    return ((code & ((1 << BITS) - 1)) ^ (1 << (BITS - 1))) - (1 << (BITS - 1))


@triton.jit
def decode_kernel(
    codes, scales, out, blocks, blocks_each, message_bytes, scales_at,
    BITS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Decodes ROWS blocks of BLOCK codes of BITS bits to values in ``out``: code times fp32 scale.

    Args:
        blocks: number of blocks in all messages.
        blocks_each: number of blocks in one message.
        scales_at: index of the first scale in a message, in fp32 elements.
    """
    LARGEST: tl.constexpr = (1 << (BITS - 1)) - 1
    BYTES: tl.constexpr = BLOCK * BITS // 8
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there, message, number = block < blocks, block // blocks_each, block % blocks_each
    inside = there[:, None] & (tl.arange(0, BYTES)[None, :] < BYTES)
    scale = tl.load(scales + message * (message_bytes // 4) + scales_at + number, mask=there, other=0.0)[:, None]
    source = message[:, None] * message_bytes + number[:, None] * BYTES + tl.arange(0, BYTES)[None, :]
    code = tl.load(codes + source, mask=inside, other=0).to(tl.int32)
    kind = out.dtype.element_ty
    if BITS == 8:
        place = block[:, None] * BLOCK + tl.arange(0, BYTES)[None, :]
        tl.store(out + place, value_of(signed(code, 8), scale, LARGEST).to(kind), mask=inside)
    else:
        place = block[:, None] * BLOCK + 2 * tl.arange(0, BYTES)[None, :]
        tl.store(out + place, value_of(signed(code, 4), scale, LARGEST).to(kind), mask=inside)
        tl.store(out + place + 1, value_of(signed(code >> 4, 4), scale, LARGEST).to(kind), mask=inside)


@triton.jit
def sum_kernel(
    codes, scales, out, messages, blocks, message_bytes, scales_at,
    BITS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Decodes the same ROWS blocks of all ``messages`` messages, and writes their sums, computed in fp32, to ``out``.

    ``blocks``: number of blocks in one message. ``scales_at``: index of the message's first scale, in fp32 elements.
    """
    LARGEST: tl.constexpr = (1 << (BITS - 1)) - 1
    BYTES: tl.constexpr = BLOCK * BITS // 8
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = block < blocks
    inside = there[:, None] & (tl.arange(0, BYTES)[None, :] < BYTES)
    source = block[:, None] * BYTES + tl.arange(0, BYTES)[None, :]
    even = tl.zeros((ROWS, BYTES), tl.float32)
    odd = tl.zeros((ROWS, BYTES), tl.float32)
    first = tl.zeros((), tl.int64)
    for _ in range(0, messages):
        scale = tl.load(scales + first // 4 + scales_at + block, mask=there, other=0.0)[:, None]
        code = tl.load(codes + first + source, mask=inside, other=0).to(tl.int32)
        even += value_of(signed(code, BITS), scale, LARGEST)
        if BITS == 4:
            odd += value_of(signed(code >> 4, 4), scale, LARGEST)
        first += message_bytes
    kind = out.dtype.element_ty
    if BITS == 8:
        tl.store(out + block[:, None] * BLOCK + tl.arange(0, BYTES)[None, :], even.to(kind), mask=inside)
    else:
        place = block[:, None] * BLOCK + 2 * tl.arange(0, BYTES)[None, :]
        tl.store(out + place, even.to(kind), mask=inside)
        tl.store(out + place + 1, odd.to(kind), mask=inside)


def launch_encode(values: Tensor, bits: int, block: int, message_bytes: int, residual: Tensor | None) -> Tensor:
    """Encodes each row of ``values`` [R, s] to a message; returns uint8 [R, message_bytes].

    A message has codes of ``bits`` bits, then one fp32 scale per ``block`` numbers. ``residual`` (fp32) is added to the
    values, and then overwritten with the rounding errors.
    """
    rows, elements = values.shape
    messages = torch.empty(rows, message_bytes, dtype=torch.uint8, device=values.device)
    each, at_once = elements // block, _blocks_at_once(block)
    encode_kernel[(ceil_div(rows * each, at_once),)](
        values, residual, messages, messages.view(torch.float32), rows * each, each, message_bytes,
        elements * bits // 32, BITS=bits, FEEDBACK=residual is not None, ROWS=at_once, BLOCK=block, num_warps=_WARPS,
    )  # fmt: skip
    return messages


def launch_decode(messages: Tensor, out: Tensor, bits: int, block: int) -> None:
    """Decodes each of R messages [R, m] to a row of ``out`` [R, s].

    A message has codes of ``bits`` bits, then one fp32 scale per ``block`` numbers.
    """
    rows, elements = out.shape
    each, at_once = elements // block, _blocks_at_once(block)
    decode_kernel[(ceil_div(rows * each, at_once),)](
        messages, messages.view(torch.float32), out, rows * each, each, messages.shape[1], elements * bits // 32,
        BITS=bits, ROWS=at_once, BLOCK=block, num_warps=_WARPS,
    )  # fmt: skip


def launch_sum(messages: Tensor, out: Tensor, bits: int, block: int) -> None:
    """Decodes R messages [R, m], and overwrites ``out`` [s] with their sum, computed in fp32.

    A message has codes of ``bits`` bits, then one fp32 scale per ``block`` numbers.
    """
    (elements,), at_once = out.shape, _blocks_at_once(block)
    sum_kernel[(ceil_div(elements // block, at_once),)](
        messages, messages.view(torch.float32), out, messages.shape[0], elements // block, messages.shape[1],
        elements * bits // 32, BITS=bits, ROWS=at_once, BLOCK=block, num_warps=_WARPS,
    )  # fmt: skip


def _blocks_at_once(block: int) -> int:
    return max(1, _ELEMENTS // block)


@triton.jit
def dequantize_kernel(
    codes, scales, book, out, blocks, BITS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Decodes ROWS blocks of BLOCK quantized weights to ``out``: a ratio times the fp32 scale of the block.

    The ratio is code / 127 with BITS of 8, and ``book[code]`` with 4.
    """
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
    """Decodes quantized weights to the contiguous ``out``: a ratio times the fp32 scale of the block.

    The ratio is code / 127 for 8 bits, and ``book[code]`` (fp32 [16]) for 4 bits. ``codes`` is uint8; the blocks have
    equal size.
    """
    blocks, block = scales.numel(), out.numel() // scales.numel()
    at_once = _blocks_at_once(block)
    dequantize_kernel[(ceil_div(blocks, at_once),)](
        codes, scales, book, out, blocks, BITS=bits, ROWS=at_once, BLOCK=block, num_warps=_WARPS
    )
