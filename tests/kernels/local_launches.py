"""Launches of every kernel that communicates with nobody, with everything that they can have."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from engine.kernels.codecs.block_codec import BlockFormat
from engine.kernels.gpu.activations import activation_backward, activation_forward, gated_backward, gated_forward
from engine.kernels.gpu.adamw import adamw, adamw_8bit
from engine.kernels.gpu.codecs import launch_decode, launch_dequantize, launch_encode, launch_sum
from engine.kernels.gpu.cross_entropy import Asked, SlopeBuffers, softmax_gradient, softmax_statistics
from engine.kernels.gpu.launch_shapes import EXACT, TF32, Tile, tiles_for
from engine.kernels.gpu.matmul import Follows, launch_matmul
from engine.kernels.gpu.norm import norm_backward, norm_forward, squared_norm
from engine.kernels.gpu.rotary import turn
from engine.kernels.ops.norm import WIDEST_LAYER_FP32
from engine.kernels.optim.eight_bit_codes import BlockCodes
from engine.kernels.optim.stochastic_rounding import Lines, StochasticRounding
from engine.kernels.optim.update_rules import AdamRule

Launch = Callable[[], Any]
BF16, FP32 = torch.bfloat16, torch.float32


def meta(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    """A tensor without content."""
    return torch.empty(shape, dtype=dtype, device="meta")


def activation_launches() -> Iterator[tuple[str, Launch]]:
    """Activations with a bias and a residual sum, and without."""
    for kind in ("none", "relu", "relu2", "silu", "gelu", "gelu_tanh"):
        yield f"{kind} {BF16}", partial(_activation, kind, BF16, True)
    for dtype in (BF16, FP32):
        yield f"bare {dtype}", partial(_activation, "gelu_tanh", dtype, False)


def _activation(kind: str, dtype: torch.dtype, full: bool) -> None:
    x, bias = meta(64, 16384, dtype=dtype), meta(16384, dtype=dtype) if full else None
    y = activation_forward(x, bias, x if full else None, kind)
    activation_backward(y, x, bias, kind)


def gated_launches() -> Iterator[tuple[str, Launch]]:
    """Gated linear units of two halves of one tensor."""
    for kind in ("silu", "gelu", "gelu_tanh", "relu"):
        for dtype in (BF16, FP32):
            yield f"{kind} {dtype}", partial(_gated, kind, dtype)


def _gated(kind: str, dtype: torch.dtype) -> None:
    gate, up = meta(64, 2 * 11008, dtype=dtype).chunk(2, dim=1)
    gated_backward(gated_forward(gate, up, kind), gate, up, kind)


def norm_launches() -> Iterator[tuple[str, Launch]]:
    """Norms of every width up to the widest that fits."""
    for width in (1024, 4096, 8192, 16384):
        for centered in (False, True):
            for dtype in (BF16, FP32):
                if dtype == BF16 or not centered or width <= WIDEST_LAYER_FP32:
                    yield f"{'layer' if centered else 'rms'} {dtype} {width}", partial(_norm, width, centered, dtype)


def _norm(width: int, centered: bool, dtype: torch.dtype) -> None:
    x, affine = meta(64, width, dtype=dtype), meta(width, dtype=dtype)
    y, stream, mean, rstd = norm_forward(x, x, (affine, affine if centered else None), 1e-6, 0.0, centered)
    assert stream is not None
    norm_backward(y, y, stream, affine, (mean, rstd), (0.0, centered, centered))


def rotary_launches() -> Iterator[tuple[str, Launch]]:
    """Rotary embedding of heads as projections write them."""
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


def loss_launches() -> Iterator[tuple[str, Launch]]:
    """Softmax statistics and gradients of narrow and wide vocabularies."""
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


FP16 = torch.float16
SIZE = 4096


def product_launches(arch: int) -> Iterator[tuple[str, Launch]]:
    """Products in every tile that ships for an architecture, in the three layouts of a layer's forward and backward.

    What differs in the end of a kernel only (activations, bias, residual) is spread over the tiles: the largest one has
    everything at once with the activations that take the most registers.
    """
    shipped = tiles_for(2, False, divmod(arch, 10))
    for number, tile in enumerate(shipped):
        yield _name(tile, "forward"), partial(_forward, tile, ("gelu", "gelu_tanh", "silu")[number], BF16)
        yield _name(tile, "input gradient"), partial(_product, tile, "input", BF16)
        yield _name(tile, "weight gradient"), partial(_product, tile, "weight", BF16)
        yield _name(tile, "sum of weight gradients"), partial(_product, tile, "weights", BF16)
    for activation in ("none", "relu2", "silu", "gelu_tanh"):
        yield _name(shipped[0], f"forward {activation} fp16"), partial(_forward, shipped[0], activation, FP16)
    for tile, tf32 in ((EXACT, False), (TF32, True)):
        yield _name(tile, "forward fp32"), partial(_forward, tile, "gelu", FP32, tf32)
        yield _name(tile, "weight gradient fp32"), partial(_product, tile, "weights", FP32, tf32)


def _name(tile: Tile, what: str) -> str:
    return f"{tile.rows}x{tile.columns}x{tile.depth} {what}"


def _forward(tile: Tile, activation: str, dtype: torch.dtype, tf32: bool = False) -> None:
    x, weight, bias, out = (meta(*shape, dtype=dtype) for shape in ((SIZE, SIZE), (SIZE, SIZE), (SIZE,), (SIZE, SIZE)))
    launch_matmul(x, weight.t(), Follows(bias, activation, out, keeps=True), out, tile, tf32)


def _product(tile: Tile, which: str, dtype: torch.dtype, tf32: bool = False) -> None:
    left, right = meta(SIZE, SIZE, dtype=dtype), meta(SIZE, SIZE, dtype=dtype)
    if which == "input":
        launch_matmul(left, right, Follows(), None, tile, tf32)
    elif which == "weight":
        launch_matmul(left.t(), right, Follows(), None, tile, tf32)
    else:
        main = meta(SIZE, SIZE, dtype=FP32)
        launch_matmul(left.t(), right, Follows(residual=main), main, tile, tf32)


ROWS, BLOCKS = 8, 4096


def wire_launches() -> Iterator[tuple[str, Launch]]:
    """The block codec in both widths, with and without a residual; codes of frozen weights."""
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


COUNT = 1 << 20
KEYS = 2**62 + 5, 2**61 + 7, 2**60 + 9
LINES = Lines(meta(4099, dtype=torch.int32), 8198, 515)
ROUNDED = {
    "whole": StochasticRounding(KEYS, 67),
    "cut": StochasticRounding(KEYS, 67, LINES),
    "cut, large": StochasticRounding(KEYS, 2**33 + 1, LINES),
}


def optimizer_launches() -> Iterator[tuple[str, Launch]]:
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


LOCAL = (
    activation_launches, gated_launches, loss_launches, norm_launches, optimizer_launches, rotary_launches,
    wire_launches,
)  # fmt: skip
"""Launches that are the same for every architecture."""
