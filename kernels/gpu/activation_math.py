"""Activations and their derivatives inside kernels, fp32 in and out.

KIND is a name of ``engine.kernels.ops.activation_functions``.

No exponential overflows, so that no value but one that is not finite itself gives one that is not. What is NaN stays.
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
    """The part of a normal distribution below x."""
    return 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def activated(x, KIND: tl.constexpr):
    """f(x)."""
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
        # (1 + tanh u) / 2 is the sigmoid of 2 u
        y = x * _sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    return y


@triton.jit
def activated_gradient(x, KIND: tl.constexpr):
    """f'(x); at the corner of a ReLU 0, as in torch."""
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
