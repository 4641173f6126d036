"""Activation functions and their derivatives inside Triton kernels, fp32 in and out, with bias and residual, and gated.

KIND is a name from ``engine.kernels.ops.activations``.

Exponentials cannot overflow, so results of finite inputs are finite. Results of NaN inputs are NaN.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.gpu.launch_shapes import ceil_div, column_shape, processors


@triton.jit
def _sigmoid(x):
    z = tl.exp(-tl.abs(x))
    return tl.where(x < 0, z, 1.0) / (1.0 + z)


@triton.jit
def _sigmoid_slope(x):
    z = tl.exp(-tl.abs(x))
    return z / ((1.0 + z) * (1.0 + z))


@triton.jit
def _normal_share(x):
    """Computes the cumulative distribution function of the standard normal distribution."""
    return 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def activated(x, KIND: tl.constexpr):
    """Returns f(x) for fp32 values ``x``; KIND names the activation f, such as "gelu"."""
    y = x
    if KIND == "relu":
        y = tl.where(x <= 0, 0.0, x)
    if KIND == "relu2":
        y = tl.where(x <= 0, 0.0, x * x)
    if KIND == "silu":
        y = x * _sigmoid(x)
    if KIND == "gelu":
        y = x * _normal_share(x)
    if KIND == "gelu_tanh":
        # (1 + tanh u) / 2 equals sigmoid(2 u)
        y = x * _sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    return y


@triton.jit
def activated_gradient(x, KIND: tl.constexpr):
    """Returns the derivative f'(x) at fp32 values ``x``; KIND names the activation f, such as "gelu".

    The derivative of a ReLU at 0 is 0, as in torch.
    """
    slope = tl.full(x.shape, 1.0, tl.float32)
    if KIND == "relu":
        slope = tl.where(x <= 0, 0.0, 1.0)
    if KIND == "relu2":
        slope = tl.where(x <= 0, 0.0, 2.0 * x)
    if KIND == "silu":
        slope = _sigmoid(x) + x * _sigmoid_slope(x)
    if KIND == "gelu":
        slope = _normal_share(x) + x * (0.3989422804014327 * tl.exp(-0.5 * x * x))
    if KIND == "gelu_tanh":
        square = x * x
        u = 1.5957691216057308 * (x + 0.044715 * x * square)
        slope = _sigmoid(u) + x * _sigmoid_slope(u) * (1.5957691216057308 * (1.0 + 0.134145 * square))
    return slope


@triton.jit
def activation_forward_kernel(
    x, bias, residual, y, width, x_stride, residual_stride,
    KIND: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Computes y = f(x + bias) + residual for BLOCK columns of one row; KIND names the activation f.

    The grid is (rows, blocks of columns). Strides are distances between rows, in elements.
    """
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
    """Computes dx = dy f'(x + bias) for BLOCK columns of ``rows_each`` consecutive rows; KIND names the activation f.

    With BIAS, it also writes the sum of dx over the program's rows to one row of ``dbias`` [programs, width], fp32.
    """
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


_BACKWARD_PROGRAMS = 16
"""Programs per processor of the backward."""
_PER_THREAD_FORWARD, _PER_THREAD_BACKWARD = 16, 4
"""Elements of a thread: the fastest of 4, 8 and 16 on an H200, for gelu_tanh with a bias of width 14336."""


def activation_forward(x_NH: Tensor, bias_H: Tensor | None, residual_NH: Tensor | None, kind: str) -> Tensor:
    """Returns f(x + bias) + residual [N, H] in the dtype of ``x_NH``; ``kind`` names the activation f, such as "gelu".

    A ``bias_H`` or ``residual_NH`` of None is left out.
    """
    rows, width = x_NH.shape
    y_NH = x_NH.new_empty(x_NH.shape)
    shape = column_shape(width, _PER_THREAD_FORWARD)
    if rows:
        activation_forward_kernel[rows, ceil_div(width, shape.block)](
            x_NH, _contiguous(bias_H), residual_NH, y_NH, width, x_NH.stride(0),
            width if residual_NH is None else residual_NH.stride(0),
            KIND=kind, BIAS=bias_H is not None, RESIDUAL=residual_NH is not None,
            BLOCK=shape.block, num_warps=shape.warps,
        )  # fmt: skip
    return y_NH


def activation_backward(dy_NH: Tensor, x_NH: Tensor, bias_H: Tensor | None, kind: str) -> tuple[Tensor, Tensor]:
    """Returns the gradients (dx [N, H], dbias [H] in fp32) of f(x + bias); ``kind`` names the activation f.

    ``dy_NH`` is the gradient of the result. dbias is empty if ``bias_H`` is None.
    """
    rows, width = x_NH.shape
    shape = column_shape(width, _PER_THREAD_BACKWARD)
    columns = ceil_div(width, shape.block)
    programs = max(1, min(rows, ceil_div(_BACKWARD_PROGRAMS * processors(x_NH.device), columns)))
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


@triton.jit
def gated_forward_kernel(gate, up, y, width, gate_stride, up_stride, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """Computes y = f(gate) * up for BLOCK columns of one row; KIND names the activation f.

    The grid is (rows, blocks of columns). Strides are distances between rows, in elements.
    """
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
    """Computes the gradients dgate and dup of y = f(gate) * up for BLOCK columns of one row; KIND names the activation
    f.

    ``dy`` is the gradient of y. The grid is (rows, blocks of columns).
    """
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
    """Returns f(gate) * up elementwise, in the dtype of ``gate``; ``activation`` names the activation f, such as
    "silu".

    ``gate`` and ``up`` have the same shape.
    """
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
    """Returns the gradients (dgate, dup) of y = f(gate) * up, where ``activation`` names the activation f.

    ``dy`` is the gradient of y.
    """
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
    """Returns the distance between rows, in elements."""
    return x.shape[-1] if x.is_contiguous() else x.stride(0)
