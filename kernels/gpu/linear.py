"""Launches of matrix products.

Shape suffixes: M rows, N columns, K what is summed over.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from engine.kernels.gpu.launch_shapes import GROUP, Tile, capability, choose_tile, processors, tiles_for
from engine.kernels.gpu.matmul import product_kernel

_ALIGNED = 16
"""Bytes: a tensor descriptor wants them of a matrix and of its rows."""


@dataclass(frozen=True, slots=True)
class Follows:
    """What is done to a product before it is stored."""

    bias: Tensor | None = None
    """[N]"""
    activation: str = "none"
    residual: Tensor | None = None
    """[M, N]; it may be where the product is written."""
    keeps: bool = False
    """Whether the product is stored too, before the bias."""


def launch_matmul(
    a_MK: Tensor, b_KN: Tensor, follows: Follows, out_MN: Tensor | None = None, tile: Tile | None = None,
    tf32: bool | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, the product alone or nothing), in the dtype of the operands or of ``out``.

    Each operand is contiguous or a transposed contiguous one, and rows of what is contiguous have a multiple of 16
    bytes. No size is 0.
    """
    a, a_transposed = _as_it_lies(a_MK)
    b, b_transposed = _as_it_lies(b_KN)
    (rows, depth), columns = a_MK.shape, b_KN.shape[1]
    if tf32 is None:
        tf32 = torch.get_float32_matmul_precision() != "highest"
    if tile is None:
        shipped = tiles_for(a.element_size(), tf32, capability(a.device))
        tile = choose_tile(rows, columns, shipped, processors(a.device))
    out = a.new_empty((rows, columns)) if out_MN is None else out_MN
    kept = torch.empty_like(out) if follows.keeps else out.new_empty(0)
    part = (tile.rows, tile.columns // tile.parts)
    residual = follows.residual
    count = triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns)
    product_kernel[(min(count, processors(a.device)),)](
        _matrix(a, _turned((tile.rows, tile.depth), a_transposed), tile),
        _matrix(b, _turned((tile.depth, tile.columns), b_transposed), tile),
        follows.bias,
        None if residual is None else _matrix(_aligned(residual), part, tile),
        _matrix(kept, part, tile) if follows.keeps else None,
        _matrix(out, part, tile),
        rows, columns, depth,
        A_TRANSPOSED=a_transposed, B_TRANSPOSED=b_transposed, PRECISION="tf32" if tf32 else "ieee",
        ACTIVATION=follows.activation, BIAS=follows.bias is not None, RESIDUAL=residual is not None,
        KEEPS=follows.keeps, BM=tile.rows, BN=tile.columns, BK=tile.depth, GROUP=GROUP, PARTS=tile.parts,
        DESCRIBED=tile.described, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out, kept


def _as_it_lies(matrix: Tensor) -> tuple[Tensor, bool]:
    """(the contiguous matrix, whether the one that is meant is its transposed)."""
    plain = matrix.is_contiguous() and matrix.shape[1] * matrix.element_size() % _ALIGNED == 0
    lying = matrix if plain else matrix.t()
    return _aligned(lying), not plain


def _aligned(matrix: Tensor) -> Tensor:
    return matrix.clone() if matrix.data_ptr() % _ALIGNED else matrix


def _turned(block: tuple[int, int], transposed: bool) -> tuple[int, int]:
    return block[::-1] if transposed else block


def _matrix(matrix: Tensor, block: tuple[int, int], tile: Tile) -> Any:
    """As a kernel takes it."""
    if not tile.described:
        return matrix
    rows, columns = matrix.shape
    return TensorDescriptor(matrix, [rows, columns], [columns, 1], list(block))
