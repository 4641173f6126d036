"""Gated linear units in Triton; one program for each piece of a row.

Shape suffixes: N rows, F width. Input rows may have a stride; outputs are contiguous.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.gpu.activation_math import activated, activated_gradient
from engine.kernels.gpu.launch_shapes import ceil_div, column_shape


@triton.jit
def gated_forward_kernel(gate, up, y, width, gate_stride, up_stride, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """Compute BLOCK columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    g = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * width + column, (activated(g, KIND) * u).to(y.dtype.element_ty), mask=inside)


@triton.jit
def gated_backward_kernel(
    dy, gate, up, dgate, dup, width, dy_stride, gate_stride, up_stride, KIND: tl.constexpr, BLOCK: tl.constexpr
):
    """Compute the gradients of BLOCK columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    d = tl.load(dy + row * dy_stride + column, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    place = row * width + column
    tl.store(dgate + place, (d * u * activated_gradient(g, KIND)).to(dgate.dtype.element_ty), mask=inside)
    tl.store(dup + place, (d * activated(g, KIND)).to(dup.dtype.element_ty), mask=inside)


def gated_forward(gate_NF: Tensor, up_NF: Tensor, activation: str) -> Tensor:
    """Return f(gate) up [N, F]."""
    rows, width = gate_NF.shape
    y_NF = gate_NF.new_empty(gate_NF.shape)
    shape = column_shape(width)
    if rows:
        gated_forward_kernel[rows, ceil_div(width, shape.block)](
            gate_NF, up_NF, y_NF, width, gate_NF.stride(0), up_NF.stride(0),
            KIND=activation, BLOCK=shape.block, num_warps=shape.warps,
        )  # fmt: skip
    return y_NF


def gated_backward(dy_NF: Tensor, gate_NF: Tensor, up_NF: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Return (dgate, dup), [N, F] each."""
    rows, width = gate_NF.shape
    dgate_NF = gate_NF.new_empty(gate_NF.shape)
    dup_NF = torch.empty_like(dgate_NF)
    shape = column_shape(width)
    if rows:
        gated_backward_kernel[rows, ceil_div(width, shape.block)](
            dy_NF, gate_NF, up_NF, dgate_NF, dup_NF, width, dy_NF.stride(0), gate_NF.stride(0), up_NF.stride(0),
            KIND=activation, BLOCK=shape.block, num_warps=shape.warps,
        )  # fmt: skip
    return dgate_NF, dup_NF
