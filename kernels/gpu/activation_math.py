"""Activation functions and their derivatives for use inside Triton kernels, fp32 in and out.

KIND is a name from ``engine.kernels.ops.activation_functions``.

Exponentials cannot overflow, so finite inputs give finite results. NaN inputs give NaN.
"""

import triton
import triton.language as tl


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
    """Cumulative distribution function of the standard normal distribution."""
    return 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def activated(x, KIND: tl.constexpr):
    """Apply the activation: f(x)."""
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
    """Derivative f'(x); 0 at the corner of a ReLU, as in torch."""
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
