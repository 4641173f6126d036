"""Launches of the kernels in which the rows of experts travel; see ``launches`` for what holds for all of them.

Shape suffixes: T rows of a rank, R rows that its experts get, X experts of a rank, K the dim that is summed over, N
columns.
"""

import torch
from torch import Tensor

from engine.kernels.expert_rows import ExpertRows
from engine.kernels.gpu.grouped_matmul import stack_as_it_lies
from engine.kernels.gpu.launch_shapes import GROUP
from engine.kernels.gpu.overlap.expert_matmul import (
    collect_rows_kernel,
    dispatch_product_kernel,
    product_return_kernel,
)
from engine.kernels.gpu.overlap.launches import Half, KernelCall, precision, tile_shape


def launch_dispatch_product(
    tokens_TK: Tensor, matrices_XKN: Tensor, rows: ExpertRows, call: KernelCall, half: Half = "both"
) -> Tensor:
    """out [R, N]: the rows of all ranks for this rank's experts times their matrices.

    ``tokens_TK`` is contiguous, sorted by expert, of the dtype of the matrices. ``half``: "push" leaves the result
    empty, "multiply" pushes nothing.
    """
    matrices, transposed = stack_as_it_lies(matrices_XKN)
    depth, columns = matrices_XKN.shape[1:]
    shape, mailbox = call.shape(matrices.dtype), call.mailbox
    sent = rows.source_tiles(shape.rows, sends=True).to(tokens_TK.device, non_blocking=True)
    received = rows.owner_tiles(shape.rows, sends=False).to(tokens_TK.device, non_blocking=True)
    out = matrices.new_empty((rows.here, columns))
    dispatch_product_kernel[call.grid(tokens_TK.device)](
        tokens_TK, matrices, out, sent, received, len(sent), len(received),
        mailbox.slots, mailbox.arrivals, mailbox.status, *call.numbers, columns, depth,
        RANKS=mailbox.ranks, PUSHES=half != "multiply", MULTIPLIES=half != "push", MATRIX_TRANSPOSED=transposed,
        PRECISION=precision(), **tile_shape(shape), GROUP=GROUP,
    )  # fmt: skip
    return out


def launch_product_return(rows_RK: Tensor, matrices_XKN: Tensor, rows: ExpertRows, call: KernelCall) -> None:
    """Multiply ``rows_RK``, contiguous, with their experts' matrices, and send each to the rank that it came from."""
    matrices, transposed = stack_as_it_lies(matrices_XKN)
    depth, columns = matrices_XKN.shape[1:]
    shape, mailbox = call.shape(matrices.dtype), call.mailbox
    received = rows.owner_tiles(shape.rows, sends=True).to(rows_RK.device, non_blocking=True)
    product_return_kernel[call.grid(rows_RK.device)](
        rows_RK, matrices, matrices.new_empty(0), received, len(received),
        mailbox.slots, mailbox.arrivals, mailbox.status, *call.numbers, columns, depth,
        RANKS=mailbox.ranks, MATRIX_TRANSPOSED=transposed, PRECISION=precision(), **tile_shape(shape), GROUP=GROUP,
    )  # fmt: skip


def launch_collect_rows(columns: int, rows: ExpertRows, call: KernelCall, dtype: torch.dtype) -> Tensor:
    """out [T, N]: this rank's rows, as the owners of their experts have sent them back, in the order of its tokens."""
    shape, mailbox = call.shape(dtype), call.mailbox
    device = mailbox.status.device
    out = torch.empty((rows.own, columns), dtype=dtype, device=device)
    sent = rows.source_tiles(shape.rows, sends=False).to(device, non_blocking=True)
    collect_rows_kernel[call.grid(out.device)](
        out, sent, len(sent), mailbox.slots, mailbox.arrivals, mailbox.status, *call.numbers, columns,
        RANKS=mailbox.ranks, BM=shape.rows, BN=shape.columns, num_warps=shape.warps,
    )  # fmt: skip
    return out
