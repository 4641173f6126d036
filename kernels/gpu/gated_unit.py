"""Gated linear units in Triton; one program for each piece of a row.

Inputs are contiguous with any leading dims, or [N, F] with rows at a distance; outputs are contiguous, in the shape of
the gate. Shape suffixes: N rows, F width.
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


def gated_forward(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """Return f(gate) up."""
    width = gate.shape[-1]
    y = gate.new_empty(gate.shape)
    shape = column_shape(width)
    if rows := gate.numel() // width:
        gated_forward_kernel[rows, ceil_div(width, shape.block)](
            gate, up, y, width, _distance(gate), _distance(up),
            KIND=activation, BLOCK=shape.block, num_warps=shape.warps,
        )  # fmt: skip
    return y


def gated_backward(dy: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Return (dgate, dup)."""
    width = gate.shape[-1]
    dgate = gate.new_empty(gate.shape)
    dup = torch.empty_like(dgate)
    shape = column_shape(width)
    if rows := gate.numel() // width:
        gated_backward_kernel[rows, ceil_div(width, shape.block)](
            dy, gate, up, dgate, dup, width, _distance(dy), _distance(gate), _distance(up),
            KIND=activation, BLOCK=shape.block, num_warps=shape.warps,
        )  # fmt: skip
    return dgate, dup


def _distance(x: Tensor) -> int:
    """Return the elements from one row to the next."""
    return x.shape[-1] if x.is_contiguous() else x.stride(0)
