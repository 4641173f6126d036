"""Block codec: numbers in 8 or 4 bits, with one fp32 scale per block (as in ZeRO++, Wang et al. 2023).

    scale = max |block| / 127 (8 bits) or / 7 (4 bits), at least 2^-126 unless the block is zero
    code  = x / scale, rounded to the nearest integer
    value = code * scale            |x - value| <= scale / 2, up to 1e-5 of the scale by fp32 rounding

A block of zeros stays zero, denormal numbers below 2^-127 become zero, and a number that is not finite becomes NaN at
its position, by a reserved code (-128, -8): the scale depends on the finite numbers of the block only. All arithmetic
is in fp32 for every dtype of values; no value passes through fp16.

A message contains the codes and then the scales of a run of whole blocks:

    | code 0 | code 1 | .. | code s-1 | scale 0 | .. | scale s/B-1 |        8 bits: one byte each
    | 0, 1   | 2, 3   | .. |          | scale 0 | ..                        4 bits: two per byte, the first low

Signs are a format of one bit per number, with the mean absolute value as the scale of a block (signSGD, Bernstein et
al. 2018):

    scale = mean |block|,  value = + scale or - scale

A sign is a coarse approximation, so signs need sums with error feedback (Karimireddy et al. 2019): the error of a
message is added to the next message. A block with a number that is not finite becomes NaN as a whole, with a residual
of 0. A message contains a bit for each number, eight per byte, the first in the lowest bit, and then the scales in
fp32. Torch runs this format on any device; there is no kernel.

Shape suffixes: R messages, s elements of a message, m bytes of a message, B elements of a block, K blocks.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.dispatch import Kernels

SMALLEST_MEAN = 2.0**-126
"""Smallest mean of a block: the smallest normal fp32 number, which no device flushes to zero."""
_BITS = 8


@torch.no_grad()
def encode_signs(values_Rs: Tensor, block: int, residual_Rs: Tensor | None = None) -> Tensor:
    """Encodes each row of ``values_Rs`` [R, s] to one sign bit per number and one fp32 scale per ``block`` numbers.

    Returns one message per row, uint8 [R, m]: sign bits, then scales. ``block`` divides s.

    ``residual_Rs`` [R, s] is added to the values, and then overwritten with the rounding errors.
    """
    rows, elements = values_Rs.shape
    given = values_Rs.float()
    if residual_Rs is not None:
        given = given.add(residual_Rs)
    x_RKB = given.reshape(rows, -1, block)
    finite_RK1 = x_RKB.isfinite().all(dim=2, keepdim=True)
    mean_RK1 = torch.where(finite_RK1, x_RKB, 0.0).abs().mean(dim=2, keepdim=True)
    scale_RK1 = torch.where(mean_RK1 > 0, mean_RK1.clamp_min(SMALLEST_MEAN), 0.0)
    negative_RKB = x_RKB < 0
    if residual_Rs is not None:
        left = torch.where(finite_RK1, x_RKB - torch.where(negative_RKB, -scale_RK1, scale_RK1), 0.0)
        residual_Rs.copy_(left.view(rows, elements))
    weights = 2 ** torch.arange(_BITS, dtype=torch.uint8, device=values_Rs.device)
    codes = (negative_RKB.view(rows, -1, _BITS).to(torch.uint8) * weights).sum(dim=2, dtype=torch.uint8)
    scales = torch.where(finite_RK1, scale_RK1, torch.nan).reshape(rows, -1)
    return torch.cat([codes, scales.view(torch.uint8)], dim=1)


def decoded_signs(messages_Rm: Tensor, block: int, elements: int) -> Tensor:
    """Decodes R messages of :func:`encode_signs`, uint8 [R, m]; returns the values, fp32 [R, elements].

    ``block``: numbers per scale, as in the encoding.
    """
    rows, end = messages_Rm.shape[0], elements // _BITS
    places = torch.arange(_BITS, dtype=torch.uint8, device=messages_Rm.device)
    bits = messages_Rm[:, :end].unsqueeze(2).bitwise_right_shift(places).bitwise_and(1)
    scale_RK1 = messages_Rm[:, end:].contiguous().view(torch.float32).view(rows, -1, 1)
    negative_RKB = bits.view(rows, -1, block).bool()
    return torch.where(negative_RKB, -scale_RK1, scale_RK1).view(rows, -1)


SMALLEST_SCALE = 2.0**-126
"""Smallest scale of a block: the smallest normal number of fp32 and bf16, which no device flushes to zero."""
_SCALE_BYTES = 4
OPERATOR = "block_codec"
ENCODED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """Format of numbers with ``bits`` bits per number, and one fp32 scale per ``block`` numbers."""

    bits: int
    """Bits per code: 8 or 4; 1: signs alone (:func:`encode_signs`)."""
    block: int
    """Elements per scale; an even number."""

    @property
    def largest(self) -> int:
        """Largest integer code: 127 with 8 bits, 7 with 4 bits."""
        return (1 << (self.bits - 1)) - 1

    @property
    def word(self) -> str:
        """Name of the codes' integer type, such as "int8", or "signs" with 1 bit; for log lines."""
        return f"int{self.bits}" if self.bits > 1 else "signs"

    def code_bytes(self, elements: int) -> int:
        """Returns the size in bytes of the codes of ``elements`` numbers, without their scales."""
        return elements * self.bits // 8

    def padded(self, elements: int) -> int:
        """Returns ``elements`` rounded up to a multiple of ``block``, the number of elements per scale."""
        return -(-elements // self.block) * self.block

    def message_bytes(self, elements: int) -> int:
        """Returns the size in bytes of the codes and scales of ``elements`` numbers.

        ``elements`` is a multiple of ``block``.
        """
        return self.code_bytes(elements) + elements // self.block * _SCALE_BYTES

    def elements(self, message_bytes: int) -> int:
        """Returns the number of encoded numbers in ``message_bytes`` bytes of codes and scales."""
        return message_bytes * 8 * self.block // (self.bits * self.block + 8 * _SCALE_BYTES)


@dataclass(frozen=True, slots=True)
class CastFormat:
    """Format of numbers in 16 bits: each is rounded to the nearest number of ``dtype``, bf16 or fp16."""

    dtype: torch.dtype

    @property
    def word(self) -> str:
        """Name of the dtype for log lines: "bf16" or "fp16"."""
        return {torch.bfloat16: "bf16", torch.float16: "fp16"}[self.dtype]

    def padded(self, elements: int) -> int:
        """Returns ``elements`` unchanged, because this format has no blocks to fill."""
        return elements

    def message_bytes(self, elements: int) -> int:
        """Returns the size in bytes of ``elements`` numbers in the format's dtype, bf16 or fp16."""
        return elements * self.dtype.itemsize


NumberFormat = BlockFormat | CastFormat


@dataclass(frozen=True, slots=True)
class BlockCodec:
    """Codec that stores values with fewer bits, and one fp32 scale for each block of values, as ``wire`` says."""

    wire: BlockFormat
    kernels: Kernels

    def encode(self, values_Rs: Tensor, residual_Rs: Tensor | None = None) -> Tensor:
        """Encodes each row of ``values_Rs`` [R, s] to a message of codes and scales; returns uint8 [R, m].

        ``residual_Rs`` is added to the values, and then overwritten with the rounding errors.
        """
        return encode_blocks(values_Rs, self.wire, self.kernels, residual_Rs)

    def add(self, messages_Rm: Tensor, out_s: Tensor) -> None:
        """Decodes R messages [R, m], and overwrites ``out_s`` [s] with their sum, computed in fp32."""
        sum_blocks(messages_Rm, out_s, self.wire, self.kernels)

    def message(self, values_s: Tensor) -> Tensor:
        """Encodes the vector ``values_s`` [s] to one message of m bytes, uint8 [m]."""
        return encode_blocks(values_s.view(1, -1), self.wire, self.kernels).view(-1)

    def decode(self, messages_Rm: Tensor, out_Rs: Tensor) -> None:
        """Decodes each of R messages [R, m] into a row of ``out_Rs`` [R, s]."""
        decode_blocks(messages_Rm, out_Rs, self.wire, self.kernels)

    def rounded(self, values_s: Tensor, dtype: torch.dtype) -> Tensor:
        """Encodes ``values_s`` [s], and returns the decoded values in ``dtype``."""
        out = torch.empty(values_s.shape, dtype=dtype, device=values_s.device)
        self.decode(self.message(values_s).view(1, -1), out.view(1, -1))
        return out


@dataclass(frozen=True, slots=True)
class CastCodec:
    """Codec that casts each number to bf16 or fp16."""

    wire: CastFormat

    @torch.no_grad()
    def encode(self, values_Rs: Tensor, residual_Rs: Tensor | None = None) -> Tensor:
        """Casts each row of ``values_Rs`` [R, s] to bf16 or fp16; returns the bytes, uint8 [R, 2 s].

        ``residual_Rs`` [R, s] is added to the values, and then overwritten with the rounding errors.
        """
        given = values_Rs if residual_Rs is None else values_Rs.float().add(residual_Rs)
        cast = given.to(self.wire.dtype).contiguous()
        if residual_Rs is not None:
            residual_Rs.copy_((given - cast.float()).nan_to_num_(0.0, 0.0, 0.0))
        return cast.view(torch.uint8)

    @torch.no_grad()
    def decode(self, messages_Rm: Tensor, out_Rs: Tensor) -> None:
        """Copies the bf16 or fp16 numbers of R messages to the rows of ``out_Rs`` [R, s]."""
        out_Rs.copy_(messages_Rm.view(self.wire.dtype))

    @torch.no_grad()
    def add(self, messages_Rm: Tensor, out_s: Tensor) -> None:
        """Overwrites ``out_s`` [s] with the sum of the bf16 or fp16 numbers of R messages, computed in fp32."""
        first, *others = messages_Rm.view(self.wire.dtype)
        total = first.float()
        for other in others:
            total += other
        out_s.copy_(total)


Codec = BlockCodec | CastCodec
"""Codec that encodes R rows of s numbers, [R, s], as R messages of m bytes, uint8 [R, m]."""


def make_codec(wire: NumberFormat, kernels: Kernels) -> Codec:
    """Returns the codec for the format ``wire``: a :class:`BlockCodec` or a :class:`CastCodec`.

    ``kernels`` selects Triton or PyTorch for a :class:`BlockCodec`.
    """
    return BlockCodec(wire, kernels) if isinstance(wire, BlockFormat) else CastCodec(wire)


@torch.no_grad()
def encode_blocks(values_Rs: Tensor, wire: BlockFormat, kernels: Kernels, residual_Rs: Tensor | None = None) -> Tensor:
    """Encodes each row of ``values_Rs`` [R, s] to a message of codes and scales; returns uint8 [R, m].

    ``s`` is a multiple of the block size. ``residual_Rs`` (fp32, contiguous) is added to the values, and then
    overwritten with the rounding errors.
    """
    if wire.bits == 1:
        return encode_signs(values_Rs, wire.block, residual_Rs)
    if not _fits(values_Rs, kernels):
        return encode_blocks_reference(values_Rs, wire, residual_Rs)
    from engine.kernels.gpu.codecs import launch_encode

    return launch_encode(values_Rs, wire.bits, wire.block, wire.message_bytes(values_Rs.shape[1]), residual_Rs)


@torch.no_grad()
def decode_blocks(messages_Rm: Tensor, out_Rs: Tensor, wire: BlockFormat, kernels: Kernels) -> None:
    """Decodes each of R messages of :func:`encode_blocks` [R, m] into a row of the contiguous ``out_Rs`` [R, s]."""
    if wire.bits == 1 or not _fits(out_Rs, kernels):
        out_Rs.copy_(_decoded(messages_Rm, wire))
        return
    from engine.kernels.gpu.codecs import launch_decode

    launch_decode(messages_Rm, out_Rs, wire.bits, wire.block)


@torch.no_grad()
def sum_blocks(messages_Rm: Tensor, out_s: Tensor, wire: BlockFormat, kernels: Kernels) -> None:
    """Decodes R messages of :func:`encode_blocks` [R, m], and overwrites ``out_s`` [s] with their sum.

    The sum is computed in fp32, in the order of the messages.
    """
    if wire.bits == 1 or not _fits(out_s, kernels):
        sum_blocks_reference(messages_Rm, out_s, wire)
        return
    from engine.kernels.gpu.codecs import launch_sum

    launch_sum(messages_Rm, out_s, wire.bits, wire.block)


def encode_blocks_reference(values_Rs: Tensor, wire: BlockFormat, residual_Rs: Tensor | None = None) -> Tensor:
    """Computes :func:`encode_blocks` with 8 or 4 bits in PyTorch; returns the messages, uint8 [R, m].

    The Triton kernel must give the same messages.
    """
    rows, elements = values_Rs.shape
    given = values_Rs.float() if residual_Rs is None else values_Rs.float() + residual_Rs
    x_RKB = given.reshape(rows, -1, wire.block)
    finite = x_RKB.isfinite()
    known = torch.where(finite, x_RKB, 0.0)
    peak_RK1 = known.abs().amax(dim=2, keepdim=True)
    scale_RK1 = torch.where(
        peak_RK1 > 0, (peak_RK1 / torch.full_like(peak_RK1, wire.largest)).clamp_min(SMALLEST_SCALE), 0.0
    )
    codes = (known / torch.where(scale_RK1 > 0, scale_RK1, 1.0)).round_()
    if residual_Rs is not None:
        left = torch.where(finite, known - codes * scale_RK1, 0.0)
        residual_Rs.copy_(left.view(rows, elements))
    codes = torch.where(finite, codes, float(-wire.largest - 1)).to(torch.int8).view(rows, elements)
    if wire.bits == 4:
        pairs = codes.view(rows, -1, 2)
        codes = pairs[..., 0].bitwise_and(15) | pairs[..., 1].bitwise_left_shift(4)
    return torch.cat([codes.view(torch.uint8), scale_RK1.reshape(rows, -1).view(torch.uint8)], dim=1)


def sum_blocks_reference(messages_Rm: Tensor, out_s: Tensor, wire: BlockFormat) -> None:
    """Decodes R messages [R, m] in PyTorch, and overwrites ``out_s`` [s] with their sum, computed in fp32.

    The Triton kernel of :func:`sum_blocks` must give the same sums.
    """
    first, *others = _decoded(messages_Rm, wire)
    for other in others:
        first += other
    out_s.copy_(first)


def _decoded(messages_Rm: Tensor, wire: BlockFormat) -> Tensor:
    """Returns the values of all messages, fp32 [R, s]."""
    rows, size = messages_Rm.shape
    if wire.bits == 1:
        return decoded_signs(messages_Rm, wire.block, wire.elements(size))
    end = wire.code_bytes(wire.elements(size))
    codes = messages_Rm[:, :end].view(torch.int8)
    if wire.bits == 4:
        # a shift to the left and back to the right copies the sign of the low half
        halves = codes.bitwise_left_shift(4).bitwise_right_shift(4), codes.bitwise_right_shift(4)
        codes = torch.stack(halves, dim=2).view(rows, -1)
    scale_RK1 = messages_Rm[:, end:].contiguous().view(torch.float32).view(rows, -1, 1)
    codes_RKB = codes.view(rows, -1, wire.block)
    values = codes_RKB.float() * scale_RK1
    return torch.where(codes_RKB == -wire.largest - 1, torch.nan, values).view(rows, -1)


def _fits(values: Tensor, kernels: Kernels) -> bool:
    if values.dtype not in ENCODED_DTYPES or not values.is_contiguous() or not values.numel():
        return False
    width = 1 << (values.numel().bit_length() - 1)  # runs of nearly equal size share one choice
    return kernels.replaces(values.device) and kernels.triton(OPERATOR, values, width)
