"""Bias, activation and residual sum in Triton.

    forward    one program for each piece of a row
    backward   a fixed number of programs loops over the rows, each on some of the columns, and accumulates dbias in
               fp32; the partial sums are then added in a fixed order, so that equal inputs give equal bits

Shape suffixes: N rows, H width, P programs over the rows. Input rows may have a stride; outputs are contiguous.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.gpu.activation_math import activated, activated_gradient
from engine.kernels.gpu.launch_shapes import ceil_div, column_shape, processors


@triton.jit
def activation_forward_kernel(
    x, bias, residual, y, width, x_stride, residual_stride,
    KIND: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    s = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        s += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    out = activated(s, KIND)
    if RESIDUAL:
        out += tl.load(residual + row * residual_stride + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * width + column, out.to(y.dtype.element_ty), mask=inside)


@triton.jit
def activation_backward_kernel(
    dy, x, bias, dx, dbias, rows, width, dy_stride, x_stride, rows_each,
    KIND: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK columns of ``rows_each`` consecutive rows, and the partial sum of their bias gradients."""
    program = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    b = tl.zeros((BLOCK,), tl.float32)
    db = tl.zeros((BLOCK,), tl.float32)
    if BIAS:
        b += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    first = program * rows_each
    for row in range(first, tl.minimum(first + rows_each, rows)):
        s = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32) + b
        d = tl.load(dy + row * dy_stride + column, mask=inside, other=0.0).to(tl.float32)
        d *= activated_gradient(s, KIND)
        if BIAS:
            db += d
        tl.store(dx + row * width + column, d.to(dx.dtype.element_ty), mask=inside)
    if BIAS:
        tl.store(dbias + program * width + column, db, mask=inside)


def activation_forward(x_NH: Tensor, bias_H: Tensor | None, residual_NH: Tensor | None, kind: str) -> Tensor:
    """Return f(x + bias) + residual [N, H]."""
    rows, width = x_NH.shape
    y_NH = x_NH.new_empty(x_NH.shape)
    shape = column_shape(width)
    if rows:
        activation_forward_kernel[rows, ceil_div(width, shape.block)](
            x_NH, _contiguous(bias_H), residual_NH, y_NH, width, x_NH.stride(0),
            width if residual_NH is None else residual_NH.stride(0),
            KIND=kind, BIAS=bias_H is not None, RESIDUAL=residual_NH is not None,
            BLOCK=shape.block, num_warps=shape.warps,
        )  # fmt: skip
    return y_NH


def activation_backward(dy_NH: Tensor, x_NH: Tensor, bias_H: Tensor | None, kind: str) -> tuple[Tensor, Tensor]:
    """Return (dx [N, H], dbias [H] in fp32, which is empty without a bias)."""
    rows, width = x_NH.shape
    shape = column_shape(width)
    columns = ceil_div(width, shape.block)
    programs = max(1, min(rows, ceil_div(16 * processors(x_NH.device), columns)))
    dx_NH = x_NH.new_empty(x_NH.shape)
    dbias_PH = x_NH.new_zeros((programs, width if bias_H is not None else 0), dtype=torch.float32)
    if rows:
        activation_backward_kernel[programs, columns](
            dy_NH, x_NH, _contiguous(bias_H), dx_NH, dbias_PH, rows, width, dy_NH.stride(0), x_NH.stride(0),
            ceil_div(rows, programs),
            KIND=kind, BIAS=bias_H is not None, BLOCK=shape.block, num_warps=shape.warps,
        )  # fmt: skip
    return dx_NH, dbias_PH.sum(0)


def _contiguous(bias_H: Tensor | None) -> Tensor | None:
    return None if bias_H is None else bias_H.contiguous()
