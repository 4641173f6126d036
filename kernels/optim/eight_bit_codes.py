"""Optimizer state in 8 bits per element: small floating-point codes, with an fp32 scale for each block.

Blocks with a scale each, and codes that are finer near zero, follow Dettmers et al. (2022,
https://arxiv.org/abs/2110.02861, section 2). The leading bits of a number in fp32 replace the paper's table of codes,
so that no table is read and every device makes the same codes:

    scale = max |block|,  y = |x| / scale, from 0 to 1
    signed     sign | 7 bits    y from 1.25 / 2^16 to 1, 8 codes an octave    first moments
    unsigned   8 bits           y from 1.25 / 2^32 to 1, 8 codes an octave    second moments

The relative error of a value in this range is at most 1/16, and the largest value of a block is exact. A nonzero second
moment never becomes zero, because updates divide by its root. Decoded values (except denormal ones) encode to the same
codes and scales again, so that a checkpoint may contain plain numbers. A value that is not finite makes the whole block
NaN.

Shape suffixes: n elements, K blocks, B elements of a block.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from engine.kernels.optim.update_rules import AdamRule, adam_

CHUNK = 1 << 20
"""Number of elements decoded at a time, a multiple of every block size."""
_DROPPED = 20
"""Bits of fp32 that codes lack: all of the mantissa except three."""
_ONE = 0x3F800000 >> _DROPPED
"""The leading bits of 1.0."""
_SMALLEST = 2.0**-126
"""The largest number of a block of zeros is below this bound: some devices treat denormal numbers as zeros."""


class BlockCodes(NamedTuple):
    """Optimizer state encoded as one 8-bit code per element and one scale per block."""

    codes: Tensor
    """Codes of the elements, uint8 [n]."""
    scales: Tensor
    """Scales, fp32 [K]; the last block may have fewer elements."""

    @classmethod
    def zeros(cls, elements: int, block: int, device: torch.device) -> "BlockCodes":
        """Returns the codes and scales of ``elements`` zeros, with ``block`` elements per scale."""
        scales = torch.zeros(-(-elements // block), dtype=torch.float32, device=device)
        return cls(torch.zeros(elements, dtype=torch.uint8, device=device), scales)

    def part(self, start: int, stop: int, block: int) -> "BlockCodes":
        """Returns views of the codes ``start:stop`` and of their scales; ``block``: elements per scale.

        ``start`` and ``stop`` are multiples of ``block``; ``stop`` may also be the number of codes.
        """
        return BlockCodes(self.codes[start:stop], self.scales[start // block : -(-stop // block)])


@dataclass(frozen=True, slots=True)
class StateFormat:
    """Encoding of one of Adam's moments: codes with or without a sign bit, and elements per scale."""

    block: int
    """Number of elements per scale."""
    signed: bool

    @property
    def largest(self) -> int:
        """Largest code without the sign bit: 127 for signed codes, otherwise 255."""
        return 127 if self.signed else 255

    @property
    def least(self) -> float:
        """Smallest positive number with a code, as a fraction of the block's scale."""
        return 1.25 * 2.0**-16 if self.signed else 1.25 * 2.0**-32

    def bytes(self, elements: int) -> int:
        """Returns the size in bytes of the encoding of ``elements`` numbers."""
        return elements + 4 * -(-elements // self.block)


@torch.no_grad()
def encode(values_n: Tensor, into: BlockCodes, form: StateFormat) -> None:
    """Encodes the numbers ``values_n`` into ``into``, in place.

    Numbers in fp64 are first rounded to fp32.
    """
    elements, blocks = len(values_n), len(into.scales)
    x_KB = values_n.new_zeros(blocks * form.block, dtype=torch.float32)
    x_KB[:elements] = values_n
    x_KB = x_KB.view(blocks, form.block)
    scale_K1 = x_KB.abs().amax(dim=1, keepdim=True)
    scale_K1 = torch.where(scale_K1 < _SMALLEST, 0.0, scale_K1)
    # an infinity or NaN must stay visible: it makes the full block NaN
    scale_K1 = torch.where(scale_K1.isfinite(), scale_K1, torch.nan)
    y_KB = torch.where(scale_K1 > 0, x_KB.abs() / scale_K1, 0.0)
    # the bits of fp32 numbers above 0 have the order of the numbers; the added half unit rounds to nearest
    leading = (y_KB.view(torch.int32) + (1 << (_DROPPED - 1))) >> _DROPPED
    code = (leading - (_ONE - form.largest)).clamp_(0, form.largest)
    # a second moment above 0 never becomes 0: the division by its root would make a huge step
    code = torch.where(y_KB >= form.least / 2 if form.signed else y_KB > 0, code.clamp(min=1), code)
    if form.signed:
        code |= ((x_KB < 0) & (code > 0)).to(torch.int32) << 7
    into.codes.copy_(code.view(-1)[:elements])
    into.scales.copy_(scale_K1.view(-1))


@torch.no_grad()
def decode(given: BlockCodes, form: StateFormat, dtype: torch.dtype = torch.float32) -> Tensor:
    """Decodes ``given`` to numbers, [n] in ``dtype``."""
    elements, blocks = len(given.codes), len(given.scales)
    code = given.codes.to(torch.int32)
    size = code & 127 if form.signed else code
    y_n = torch.where(size > 0, ((size + (_ONE - form.largest)) << _DROPPED).view(torch.float32), 0.0)
    if form.signed:
        y_n = torch.where(code > 127, -y_n, y_n)
    if elements == blocks * form.block:
        return (y_n.view(blocks, form.block) * given.scales.view(-1, 1)).view(-1).to(dtype)
    return (y_n * given.scales.repeat_interleave(form.block)[:elements]).to(dtype)


def chunks(elements: int) -> Iterator[slice]:
    """Yields consecutive slices of ``CHUNK`` elements of a vector of ``elements`` elements.

    The last slice may have fewer.
    """
    return (slice(start, min(elements, start + CHUNK)) for start in range(0, elements, CHUNK))


def adam_8bit_(
    weights_n: Tensor, grads_n: Tensor, moments: Sequence[BlockCodes], step: int, rule: AdamRule, block: int
) -> None:
    """Performs update ``step`` (from 1) of Adam or AdamW on ``weights_n`` in place, with moments in 8-bit codes.

    ``moments``: first and second moment, with ``block`` elements per scale. They are decoded, updated by
    :func:`adam_`, and encoded again.
    """
    forms = [StateFormat(block, signed) for signed in (True, False)]
    for part in chunks(len(weights_n)):
        own = [moment.part(part.start, part.stop, block) for moment in moments]
        first, second = (decode(codes, form, weights_n.dtype) for codes, form in zip(own, forms, strict=True))
        adam_([weights_n[part]], [grads_n[part]], [first], [second], step, rule)
        for values, codes, form in zip((first, second), own, forms, strict=True):
            encode(values, codes, form)
