"""Cases of gradient quantization for data ranks: a flat gradient to low-bit codes and back."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.kernels.cases.case import Case, Cost, Inputs, Slice, Target, random
from benchmarks.kernels.cases.errors import Operator
from engine.kernels.codecs.block_codec import BlockCodec, BlockFormat
from engine.kernels.dispatch import REFERENCE, Kernels

BLOCK = 256


def block_codecs(where: Slice, dtype: torch.dtype) -> Iterator[Case]:
    """Yields cases of encoding and decoding whole blocks in both widths."""
    elements = -(-where.parameters // BLOCK) * BLOCK
    for bits in (8, 4):
        moved = 2 * dtype.itemsize * elements + 2 * BlockFormat(bits, BLOCK).message_bytes(elements)
        yield Case(
            "block_codec", f"int{bits}", where, dtype, 1 << (elements.bit_length() - 1), partial(_flat, dtype),
            elements, ours=partial(_there_and_back, bits), eager=_there_and_back(bits, REFERENCE),
            forward=Cost(moved), shape=f"{elements:.0e}", targets=(Target("forward", "copy", 0.7),),
        )  # fmt: skip


def _flat(dtype: torch.dtype, device: torch.device, elements: int) -> Inputs:
    """Values of whole blocks, at least ``elements``."""
    return (random(device, dtype).normal(-(-elements // BLOCK) * BLOCK, scale=1e-2),)


def _there_and_back(bits: int, kernels: Kernels) -> Operator:
    codec = BlockCodec(BlockFormat(bits, BLOCK), kernels)

    def received(values: Tensor) -> Tensor:
        return codec.rounded(values.detach(), values.dtype)

    return received
