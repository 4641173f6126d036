"""Matrix products in Triton with a fused epilogue: bias, activation and residual are applied before the only store.

    out = act(op(a) op(b) + bias) + residual          op: identity or transpose

The kernel is persistent: one program per processor loops over the tiles of ``out``, in groups of rows with common
columns of b in the cache. The sum over K is in fp32 and in a fixed order: equal inputs have equal bits.

    tile_place      position of the n-th tile             }
    tile_product    sum over K of one tile                } separate functions, for kernels that wait for rows of a, or
    tile_finish     bias, activation, residual, stores    } send tiles of out, between them

With ``DESCRIBED``, tiles are loaded and stored through tensor descriptors (TMA), otherwise through pointers. In both
cases elements outside a matrix are read as zero and never written.

Shape suffixes: M rows of out, N columns of out, K the dim that is summed over.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from engine.kernels.gpu.activations import activated
from engine.kernels.gpu.launch_shapes import (
    Tile,
    capability,
    ceil_div,
    choose_tile,
    multiplies_as_tf32,
    processors,
    tile_shape,
    tiles_for,
)


@triton.jit
def load_tile(
    source, row, column, rows, columns, BR: tl.constexpr, BC: tl.constexpr, TRANSPOSED: tl.constexpr,
    DESCRIBED: tl.constexpr,
):  # fmt: skip
    """Returns the tile [BR, BC] that starts at element (``row``, ``column``) of the matrix ``source`` [rows, columns].

    ``source`` is contiguous. Elements outside of it are 0. TRANSPOSED: returns the tile as [BC, BR]. DESCRIBED:
    ``source`` is a tensor descriptor.
    """
    if DESCRIBED:
        values = source.load([row, column])
        if TRANSPOSED:
            values = values.T
    else:
        r = row + tl.arange(0, BR)
        c = column + tl.arange(0, BC)
        start = source + tl.cast(row, tl.int64) * columns
        step = tl.arange(0, BR) * columns
        if TRANSPOSED:
            place = step[None, :] + c[:, None]
            inside = (r < rows)[None, :] & (c < columns)[:, None]
        else:
            place = step[:, None] + c[None, :]
            inside = (r < rows)[:, None] & (c < columns)[None, :]
        values = tl.load(start + place, mask=inside, other=0.0)
    return values


@triton.jit
def store_tile(
    target, values, row, column, rows, columns, BR: tl.constexpr, BC: tl.constexpr, DESCRIBED: tl.constexpr
):  # fmt: skip
    """Stores the fp32 tile ``values`` [BR, BC] in ``target`` [rows, columns], from element (``row``, ``column``) on.

    ``target`` is contiguous. DESCRIBED: it is a tensor descriptor, not a pointer.
    """
    if DESCRIBED:
        target.store([row, column], values.to(target.dtype))
    else:
        r = tl.arange(0, BR)
        c = tl.arange(0, BC)
        inside = (row + r < rows)[:, None] & (column + c < columns)[None, :]
        start = target + tl.cast(row, tl.int64) * columns + column
        tl.store(start + r[:, None] * columns + c[None, :], values.to(target.dtype.element_ty), mask=inside)


@triton.jit
def tile_place(tile, rows, columns, GROUP: tl.constexpr):
    """Returns the position (row, column) of tile number ``tile`` in a grid of ``rows`` x ``columns`` tiles.

    The tiles are numbered in groups of GROUP rows; in a group, column by column.
    """
    size = GROUP * columns
    first = tile // size * GROUP
    height = tl.minimum(rows - first, GROUP)
    inside = tile % size
    return first + inside % height, inside // height


@triton.jit
def tile_product(
    a, b, row, column, M, N, K,
    A_TRANSPOSED: tl.constexpr, B_TRANSPOSED: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, DESCRIBED: tl.constexpr,
):  # fmt: skip
    """Returns the tile [BM, BN] that starts at element (``row``, ``column``) of the product op(a) op(b) [M, N], in
    fp32.

    op transposes an operand with A_TRANSPOSED or B_TRANSPOSED. DESCRIBED: ``a`` and ``b`` are tensor descriptors.
    """
    sums = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        if A_TRANSPOSED:
            left = load_tile(a, k, row, K, M, BK, BM, True, DESCRIBED)
        else:
            left = load_tile(a, row, k, M, K, BM, BK, False, DESCRIBED)
        if B_TRANSPOSED:
            right = load_tile(b, column, k, N, K, BN, BK, True, DESCRIBED)
        else:
            right = load_tile(b, k, column, K, N, BK, BN, False, DESCRIBED)
        sums = tl.dot(left, right, sums, input_precision=PRECISION)
    return sums


@triton.jit
def tile_finish(
    sums, bias, residual, kept, out, row, column, M, N,
    ACTIVATION: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, KEEPS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, DESCRIBED: tl.constexpr,
):  # fmt: skip
    """Stores f(sums + bias) + residual in ``out`` [M, N], for a tile ``sums`` [BM, BN] of a matrix product.

    The tile starts at element (``row``, ``column``). ACTIVATION names the activation f. KEEPS: also stores ``sums``
    (plus the bias if f is relu) in ``kept``.
    """
    if KEEPS and ACTIVATION != "relu":
        store_tile(kept, sums, row, column, M, N, BM, BN, DESCRIBED)
    if BIAS:
        place = column + tl.arange(0, BN)
        sums += tl.load(bias + place, mask=place < N, other=0.0).to(tl.float32)[None, :]
    if KEEPS and ACTIVATION == "relu":
        store_tile(kept, sums, row, column, M, N, BM, BN, DESCRIBED)
    sums = activated(sums, ACTIVATION)
    if RESIDUAL:
        sums += load_tile(residual, row, column, M, N, BM, BN, False, DESCRIBED).to(tl.float32)
    store_tile(out, sums, row, column, M, N, BM, BN, DESCRIBED)


@triton.jit
def tile_halves(sums, BM: tl.constexpr, BN: tl.constexpr):
    """Splits a tile [BM, BN] into two tiles [BM, BN / 2]: the left and the right half of its columns."""
    return tl.split(tl.permute(tl.reshape(sums, (BM, 2, BN // 2)), (0, 2, 1)))


@triton.jit
def tile_finish_halves(
    sums, bias, residual, kept, out, row, column, M, N,
    ACTIVATION: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, KEEPS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, DESCRIBED: tl.constexpr,
):  # fmt: skip
    """Calls :func:`tile_finish` for the left half of the columns, then for the right half."""
    left, right = tile_halves(sums, BM, BN)
    tile_finish(
        left, bias, residual, kept, out, row, column, M, N,
        ACTIVATION, BIAS, RESIDUAL, KEEPS, BM, BN // 2, DESCRIBED,
    )  # fmt: skip
    tile_finish(
        right, bias, residual, kept, out, row, column + BN // 2, M, N,
        ACTIVATION, BIAS, RESIDUAL, KEEPS, BM, BN // 2, DESCRIBED,
    )  # fmt: skip


@triton.jit
def product_kernel(
    a, b, bias, residual, kept, out, M, N, K,
    A_TRANSPOSED: tl.constexpr, B_TRANSPOSED: tl.constexpr, PRECISION: tl.constexpr,
    ACTIVATION: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, KEEPS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr,
    DESCRIBED: tl.constexpr,
):  # fmt: skip
    """Computes out [M, N] = f(op(a) op(b) + bias) + residual; ACTIVATION names the activation f.

    op transposes an operand with A_TRANSPOSED or B_TRANSPOSED. A tile [BM, BN] is stored in PARTS (2 or 4)
    pieces. KEEPS and ``kept``: as in :func:`tile_finish`.
    """
    rows = tl.cdiv(M, BM)
    columns = tl.cdiv(N, BN)
    for tile in range(tl.program_id(0), rows * columns, tl.num_programs(0)):
        tile_row, tile_column = tile_place(tile, rows, columns, GROUP)
        row = tile_row * BM
        column = tile_column * BN
        sums = tile_product(a, b, row, column, M, N, K, A_TRANSPOSED, B_TRANSPOSED, PRECISION, BM, BN, BK, DESCRIBED)
        if PARTS == 2:
            tile_finish_halves(
                sums, bias, residual, kept, out, row, column, M, N,
                ACTIVATION, BIAS, RESIDUAL, KEEPS, BM, BN, DESCRIBED,
            )  # fmt: skip
        else:
            left, right = tile_halves(sums, BM, BN)
            tile_finish_halves(
                left, bias, residual, kept, out, row, column, M, N,
                ACTIVATION, BIAS, RESIDUAL, KEEPS, BM, BN // 2, DESCRIBED,
            )  # fmt: skip
            tile_finish_halves(
                right, bias, residual, kept, out, row, column + BN // 2, M, N,
                ACTIVATION, BIAS, RESIDUAL, KEEPS, BM, BN // 2, DESCRIBED,
            )  # fmt: skip


_ALIGNED = 16
"""Alignment in bytes of a matrix and of its rows, which tensor descriptors require."""


@dataclass(frozen=True, slots=True)
class Follows:
    """Operations on the result of a matrix product before it is stored: bias, activation, residual, in this order."""

    bias: Tensor | None = None
    """Bias [N], added before the activation."""
    activation: str = "none"
    residual: Tensor | None = None
    """Residual [M, N], added last; may be the output tensor."""
    keeps: bool = False
    """True: the input of the activation is stored as well, without the bias unless the activation is relu."""


def launch_matmul(
    a_MK: Tensor, b_KN: Tensor, follows: Follows, out_MN: Tensor | None = None, tile: Tile | None = None,
    tf32: bool | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns (f(a b + bias) + residual, input of the activation f); ``follows`` has bias, f and residual.

    The second result is empty unless ``follows.keeps``. Each operand, or its transpose, is contiguous, with rows of a
    multiple of 16 bytes.

    Args:
        out_MN: tensor for the first result; None: a new one.
        tile: launch shape; None: the default.
        tf32: fp32 operands are multiplied as TF32; None: as torch is set.
    """
    a, a_transposed = as_it_lies(a_MK)
    b, b_transposed = as_it_lies(b_KN)
    (rows, depth), columns = a_MK.shape, b_KN.shape[1]
    if tf32 is None:
        tf32 = multiplies_as_tf32()
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
        None if residual is None else _matrix(aligned_contiguous(residual), part, tile),
        _matrix(kept, part, tile) if follows.keeps else None,
        _matrix(out, part, tile),
        rows, columns, depth,
        A_TRANSPOSED=a_transposed, B_TRANSPOSED=b_transposed,
        ACTIVATION=follows.activation, BIAS=follows.bias is not None, RESIDUAL=residual is not None,
        KEEPS=follows.keeps, PARTS=tile.parts, DESCRIBED=tile.described, **tile_shape(tile, tf32),
    )  # fmt: skip
    return out, kept


def as_it_lies(matrix: Tensor) -> tuple[Tensor, bool]:
    """Returns ``matrix`` [A, B], or a stack [X, A, B], or its transposes for a kernel; copies them only if they are not
    contiguous or not 16-byte aligned.

    Returns:
        (``matrix``, False) if it is contiguous with rows of a multiple of 16 bytes; otherwise (its transposes, True).
    """
    plain = matrix.is_contiguous() and matrix.shape[-1] * matrix.element_size() % _ALIGNED == 0
    lying = matrix if plain else matrix.mT
    return aligned_contiguous(lying), not plain


def aligned_contiguous(tensor: Tensor) -> Tensor:
    """Returns ``tensor``, or a copy if it is not contiguous or not 16-byte aligned."""
    if tensor.is_contiguous() and not tensor.data_ptr() % _ALIGNED:
        return tensor
    # a plain clone keeps the order of dense dims, which a kernel would read in the order of the shape
    return tensor.clone(memory_format=torch.contiguous_format)


def _turned(block: tuple[int, int], transposed: bool) -> tuple[int, int]:
    return block[::-1] if transposed else block


def _matrix(matrix: Tensor, block: tuple[int, int], tile: Tile) -> Any:
    """Returns the kernel's argument for a matrix: a tensor descriptor for TMA tiles, else the tensor itself."""
    if not tile.described:
        return matrix
    rows, columns = matrix.shape
    return TensorDescriptor(matrix, [rows, columns], [columns, 1], list(block))
