"""Products of experts in Triton: rows sorted by expert, one matrix per expert (a grouped GEMM), and gradients.

    grouped_product            out[rows of e] = x[rows of e] B_e
    grouped_weight_gradient    out_e = x[rows of e]' d[rows of e]

The device reads the ends of the experts' rows, so the host never waits. Tiles never cross experts, and these kernels
call the products of ``kernels/gpu/matmul``.

Shape suffixes: R rows, X experts, K the dim that is summed over, N columns.
"""

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.gpu.launch_shapes import Tile, processors, tile_of, tile_shape
from engine.kernels.gpu.matmul import as_it_lies, tile_finish, tile_place, tile_product


@triton.jit
def grouped_product_kernel(
    x, matrices, out, ends, experts, N, K,
    MATRIX_TRANSPOSED: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Multiplies the rows of each expert in ``x`` [R, K] by its matrix in ``matrices`` [X, K, N]; writes ``out`` [R,
    N].

    The rows are sorted by expert; ``ends`` [X] has the end index of each expert's rows. MATRIX_TRANSPOSED:
    ``matrices`` is [X, N, K].
    """
    columns = tl.cdiv(N, BN)
    index = tl.program_id(0)
    first = 0
    start = tl.cast(0, tl.int64)
    for expert in range(experts):
        end = tl.cast(tl.load(ends + expert), tl.int64)
        rows = tl.cast(end - start, tl.int32)
        tiles = tl.cdiv(rows, BM)
        while index < first + tiles * columns:
            tile_row, tile_column = tile_place(index - first, tiles, columns, GROUP)
            row = tile_row * BM
            column = tile_column * BN
            matrix = matrices + tl.cast(expert, tl.int64) * K * N
            sums = tile_product(
                x + start * K, matrix, row, column, rows, N, K, False, MATRIX_TRANSPOSED, PRECISION, BM, BN, BK, False
            )
            target = out + start * N
            tile_finish(
                sums, None, None, None, target, row, column, rows, N, "none", False, False, False, BM, BN, False
            )
            index += tl.num_programs(0)
        first += tiles * columns
        start = end


@triton.jit
def grouped_weight_gradient_kernel(
    x, d, out, ends, experts, N, K, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Multiplies each expert's rows in ``x`` [R, K], transposed, by its rows in ``d`` [R, N]; writes ``out`` [X, K, N].

    The rows are sorted by expert; ``ends`` [X] has the end index of each expert's rows.
    """
    height = tl.cdiv(K, BM)
    columns = tl.cdiv(N, BN)
    each = height * columns
    for index in range(tl.program_id(0), experts * each, tl.num_programs(0)):
        expert = index // each
        tile_row, tile_column = tile_place(index % each, height, columns, GROUP)
        start = tl.cast(tl.load(ends + expert - 1, mask=expert > 0, other=0), tl.int64)
        rows = tl.cast(tl.load(ends + expert) - start, tl.int32)
        row = tile_row * BM
        column = tile_column * BN
        sums = tile_product(
            x + start * K, d + start * N, row, column, K, N, rows, True, False, PRECISION, BM, BN, BK, False
        )
        target = out + tl.cast(expert, tl.int64) * K * N
        tile_finish(sums, None, None, None, target, row, column, K, N, "none", False, False, False, BM, BN, False)


def launch_grouped_product(x_RK: Tensor, matrices_XKN: Tensor, ends_X: Tensor, tile: Tile | None = None) -> Tensor:
    """Returns the rows of each expert in ``x_RK`` times its matrix in ``matrices_XKN``, [R, N].

    ``x_RK`` is contiguous and sorted by expert. ``ends_X`` (integers on the device): end index of each expert's rows.
    ``tile``: launch shape; None: the default.
    """
    matrices, transposed = as_it_lies(matrices_XKN)
    experts, depth, columns = matrices_XKN.shape
    out = x_RK.new_empty((x_RK.shape[0], columns))
    grouped_product_kernel[(processors(x_RK.device),)](
        x_RK, matrices, out, ends_X, experts, columns, depth,
        MATRIX_TRANSPOSED=transposed, **tile_shape(tile or tile_of(x_RK.dtype)),
    )  # fmt: skip
    return out


def launch_grouped_weight_gradient(x_RK: Tensor, d_RN: Tensor, ends_X: Tensor, tile: Tile | None = None) -> Tensor:
    """Returns each expert's rows in ``x_RK``, transposed, times its rows in ``d_RN``, [X, K, N].

    Both operands are contiguous and sorted by expert. ``ends_X`` (integers on the device): end index of each expert's
    rows. ``tile``: launch shape; None: the default.
    """
    depth, columns, experts = x_RK.shape[1], d_RN.shape[1], len(ends_X)
    out = x_RK.new_empty((experts, depth, columns))
    grouped_weight_gradient_kernel[(processors(x_RK.device),)](
        x_RK, d_RN, out, ends_X, experts, columns, depth, **tile_shape(tile or tile_of(x_RK.dtype)),
    )  # fmt: skip
    return out
