"""Launches of the matrix product kernels.

Shape suffixes: M rows, N columns, K the dim that is summed over.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from engine.kernels.gpu.launch_shapes import GROUP, Tile, capability, ceil_div, choose_tile, processors, tiles_for
from engine.kernels.gpu.matmul import product_kernel

_ALIGNED = 16
"""Alignment in bytes of a matrix and of its rows, which tensor descriptors require."""


@dataclass(frozen=True, slots=True)
class Follows:
    """Operations that are fused into the store of a product."""

    bias: Tensor | None = None
    """Bias [N] that is added first."""
    activation: str = "none"
    residual: Tensor | None = None
    """Residual [M, N] that is added last; it may be the output itself."""
    keeps: bool = False
    """True also stores the product itself, before the bias."""


def launch_matmul(
    a_MK: Tensor, b_KN: Tensor, follows: Follows, out_MN: Tensor | None = None, tile: Tile | None = None,
    tf32: bool | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute the product and return (out, the product before ``follows`` or an empty tensor).

    The results have the dtype of the operands, or that of ``out_MN``. Each operand is contiguous or the transpose of a
    contiguous matrix, whose rows have a multiple of 16 bytes. All sizes are positive.
    """
    a, a_transposed = as_it_lies(a_MK)
    b, b_transposed = as_it_lies(b_KN)
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
    count = ceil_div(rows, tile.rows) * ceil_div(columns, tile.columns)
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


def as_it_lies(matrix: Tensor) -> tuple[Tensor, bool]:
    """Return (the contiguous matrix, whether the operand is its transpose)."""
    plain = matrix.is_contiguous() and matrix.shape[1] * matrix.element_size() % _ALIGNED == 0
    lying = matrix if plain else matrix.t()
    return _aligned(lying), not plain


def _aligned(matrix: Tensor) -> Tensor:
    return matrix.clone() if matrix.data_ptr() % _ALIGNED else matrix


def _turned(block: tuple[int, int], transposed: bool) -> tuple[int, int]:
    return block[::-1] if transposed else block


def _matrix(matrix: Tensor, block: tuple[int, int], tile: Tile) -> Any:
    """Wrap the matrix as the kernel expects it: a tensor descriptor for TMA tiles, else the tensor itself."""
    if not tile.described:
        return matrix
    rows, columns = matrix.shape
    return TensorDescriptor(matrix, [rows, columns], [columns, 1], list(block))
