"""The block codec in both widths, with and without a residual; codes of frozen weights."""

from collections.abc import Iterator
from functools import partial

import torch

from engine.kernels.codecs.block_codec import BlockFormat
from engine.kernels.gpu.codecs import launch_decode, launch_dequantize, launch_encode, launch_sum
from tests.kernels.launches.shapes import BF16, FP32, Launch, meta

ROWS, BLOCKS = 8, 4096


def launches() -> Iterator[tuple[str, Launch]]:
    for bits in (8, 4):
        for block in (64, 256, 2048):
            wire, name = BlockFormat(bits, block), f"int{bits}, blocks of {block}"
            for dtype in (FP32, BF16):
                yield f"{name}, {dtype}", partial(_decode, wire, dtype)
                yield f"{name}, {dtype}, sum", partial(_sum, wire, dtype)
                for feedback in (False, True):
                    yield f"{name}, {dtype}{', feedback' * feedback}", partial(_encode, wire, dtype, feedback)

    for bits in (8, 4):
        for block in (64, 256):
            for dtype in (FP32, BF16):
                yield f"frozen weights, {bits} bits, blocks of {block}, {dtype}", partial(_weights, bits, block, dtype)


def _weights(bits: int, block: int, dtype: torch.dtype) -> None:
    codes, book = meta(ROWS, BLOCKS * block * bits // 8, dtype=torch.uint8), meta(16, dtype=FP32)
    launch_dequantize(codes, meta(ROWS, BLOCKS, dtype=FP32), book, meta(ROWS, BLOCKS * block, dtype=dtype), bits)


def _messages(wire: BlockFormat) -> torch.Tensor:
    return meta(ROWS, wire.message_bytes(BLOCKS * wire.block), dtype=torch.uint8)


def _encode(wire: BlockFormat, dtype: torch.dtype, feedback: bool) -> None:
    values, elements = meta(ROWS, BLOCKS * wire.block, dtype=dtype), BLOCKS * wire.block
    residual = meta(ROWS, elements, dtype=FP32) if feedback else None
    launch_encode(values, wire.bits, wire.block, wire.message_bytes(elements), residual)


def _decode(wire: BlockFormat, dtype: torch.dtype) -> None:
    launch_decode(_messages(wire), meta(ROWS, BLOCKS * wire.block, dtype=dtype), wire.bits, wire.block)


def _sum(wire: BlockFormat, dtype: torch.dtype) -> None:
    launch_sum(_messages(wire), meta(BLOCKS * wire.block, dtype=dtype), wire.bits, wire.block)
