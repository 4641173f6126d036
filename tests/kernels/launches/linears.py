"""Products in every tile that ships for an architecture, in the three layouts of a layer's forward and backward.

What differs in the end of a kernel only (activations, bias, residual) is spread over the tiles: the largest one has
everything at once with the activations that take the most registers.
"""

from collections.abc import Iterator
from functools import partial

import torch

from engine.kernels.gpu.launch_shapes import EXACT, TF32, Tile, tiles_for
from engine.kernels.gpu.matmul import Follows, launch_matmul
from tests.kernels.launches.shapes import BF16, FP32, Launch, meta

FP16 = torch.float16
SIZE = 4096


def launches(arch: int) -> Iterator[tuple[str, Launch]]:
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
