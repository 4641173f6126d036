"""Fused bias, activation and residual sum, in one pass over memory.

    y = f(x + bias) + residual      elementwise; the backward recomputes x + bias for the derivative of f

Shape suffixes: N rows (all leading dims together), H width.
"""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from engine.kernels.dispatch import Kernels, is_narrow, rows_of
from engine.kernels.fused_operator import fused_operator
from engine.kernels.ops.activation_functions import ACTIVATIONS, Activation


def activate(
    x: Tensor, bias: Tensor | None, kind: Activation, kernels: Kernels, residual: Tensor | None = None
) -> Tensor:
    """Fused ``f(x + bias) + residual``: x, residual [.., H] -> [.., H]; bias [H]. Differentiable."""
    given = tuple(t for t in (x, bias, residual) if t is not None)
    if has_torch_function(given):
        return handle_torch_function(activate, given, x, bias, kind, kernels, residual)
    if not _fits(x, bias, residual) or not kernels.triton("activation", x, x.shape[-1]):
        return activate_reference(x, bias, kind, residual)
    added_NH = None if residual is None else rows_of(residual)
    y: Tensor = _activate(rows_of(x), bias, added_NH, kind)
    return y.view(x.shape)


def activate_reference(x: Tensor, bias: Tensor | None, kind: Activation, residual: Tensor | None = None) -> Tensor:
    """PyTorch reference of :func:`activate`."""
    y = ACTIVATIONS[kind](x if bias is None else x + bias)
    return y if residual is None else y + residual


def _fits(x: Tensor, bias: Tensor | None, residual: Tensor | None) -> bool:
    if not is_narrow(x) or (bias is not None and (bias.dtype != x.dtype or bias.shape != x.shape[-1:])):
        return False
    return residual is None or (residual.dtype == x.dtype and residual.shape == x.shape)


@fused_operator("trine::activate")
def _activate(x: Tensor, bias: Tensor | None, residual: Tensor | None, kind: str) -> Tensor:
    from engine.kernels.gpu.bias_activation import activation_forward

    return activation_forward(x, bias, residual, kind)


@fused_operator("trine::activate_backward")
def activate_backward(dy: Tensor, x: Tensor, bias: Tensor | None, kind: str) -> tuple[Tensor, Tensor]:
    """Return the gradients of x [N, H] and of the bias, [H] in fp32 or empty without one, for dy [N, H]."""
    from engine.kernels.gpu.bias_activation import activation_backward

    return activation_backward(dy, x, bias, kind)


@_activate.register_fake
def _(x: Tensor, bias: Tensor | None, residual: Tensor | None, kind: str) -> Tensor:
    return x.new_empty(x.shape)


@activate_backward.register_fake
def _(dy: Tensor, x: Tensor, bias: Tensor | None, kind: str) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(0 if bias is None else x.shape[1], dtype=torch.float32)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, bias, residual, ctx.kind = inputs
    ctx.bias, ctx.residual = None if bias is None else bias.dtype, residual is not None
    if ctx.kind != "none":
        ctx.save_for_backward(x, bias)


def _gradients(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    dresidual = dy if ctx.residual else None
    if ctx.kind == "none":
        return dy, None if ctx.bias is None else dy.sum(0), dresidual, None
    dx, dbias = activate_backward(rows_of(dy), *ctx.saved_tensors, ctx.kind)
    return dx, None if ctx.bias is None else dbias.to(ctx.bias), dresidual, None


_activate.register_autograd(_gradients, setup_context=_keep)
