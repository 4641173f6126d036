"""Activation functions by name, in PyTorch; ``engine.kernels.gpu.activations`` contains them in Triton.

none, relu, silu (Elfwing et al. 2018), gelu by erf and gelu_tanh (Hendrycks and Gimpel 2016), and relu2, the squared
ReLU (So et al. 2021)

    y = f(x + bias) + residual    in one pass over memory; the backward recomputes x + bias for the derivative of f
    y = f(gate) up                gated linear units (Dauphin et al. 2017; SwiGLU, GeGLU, ReGLU: Shazeer 2020), of both
                                  products; the backward recomputes f(gate)

Shape suffixes: N rows (all leading dims together), H or F width.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import handle_torch_function, has_torch_function

from engine.kernels.dispatch import Kernels, fused_operator, is_narrow, rows_of

Activation = Literal["none", "relu", "relu2", "silu", "gelu", "gelu_tanh"]


def squared_relu(x: Tensor) -> Tensor:
    """Returns the squared ReLU of each element: max(x, 0)^2."""
    return functional.relu(x).square()


def gelu_tanh(x: Tensor) -> Tensor:
    """Returns GELU of each element, approximated by a tanh."""
    return functional.gelu(x, approximate="tanh")


def identity(x: Tensor) -> Tensor:
    """Returns ``x`` unchanged: the activation named "none"."""
    return x


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "none": identity,
        "relu": functional.relu,
        "relu2": squared_relu,
        "silu": functional.silu,
        "gelu": functional.gelu,
        "gelu_tanh": gelu_tanh,
    }
)


def activate(
    x: Tensor, bias: Tensor | None, kind: Activation, kernels: Kernels, residual: Tensor | None = None
) -> Tensor:
    """Returns f(x + bias) + residual; ``kind`` names the activation f. Differentiable.

    ``x``, ``residual`` and the result are [.., H]; ``bias`` is [H]. ``kernels`` selects Triton (one pass) or PyTorch.
    """
    given = tuple(t for t in (x, bias, residual) if t is not None)
    if has_torch_function(given):
        return handle_torch_function(activate, given, x, bias, kind, kernels, residual)
    if not _fits(x, bias, residual) or not kernels.triton("activation", x, x.shape[-1]):
        return activate_reference(x, bias, kind, residual)
    added_NH = None if residual is None else rows_of(residual)
    y: Tensor = _activate(rows_of(x), bias, added_NH, kind)
    return y.view(x.shape)


def activate_reference(x: Tensor, bias: Tensor | None, kind: Activation, residual: Tensor | None = None) -> Tensor:
    """Returns f(x + bias) + residual in PyTorch; ``kind`` names the activation f."""
    y = ACTIVATIONS[kind](x if bias is None else x + bias)
    return y if residual is None else y + residual


def _fits(x: Tensor, bias: Tensor | None, residual: Tensor | None) -> bool:
    if not is_narrow(x) or (bias is not None and (bias.dtype != x.dtype or bias.shape != x.shape[-1:])):
        return False
    return residual is None or (residual.dtype == x.dtype and residual.shape == x.shape)


@fused_operator("trine::activate")
def _activate(x: Tensor, bias: Tensor | None, residual: Tensor | None, kind: str) -> Tensor:
    from engine.kernels.gpu.activations import activation_forward

    return activation_forward(x, bias, residual, kind)


@fused_operator("trine::activate_backward")
def activate_backward(dy: Tensor, x: Tensor, bias: Tensor | None, kind: str) -> tuple[Tensor, Tensor]:
    """Computes the backward of f(x + bias); returns the gradients of ``x`` [N, H] and ``bias`` [H].

    ``dy`` [N, H] is the gradient of the result; ``kind`` names the activation f. The gradient of the bias is fp32; it
    is empty without bias.
    """
    from engine.kernels.gpu.activations import activation_backward

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


def gated(gate: Tensor, up: Tensor, activation: Activation, kernels: Kernels) -> Tensor:
    """Returns f(gate) * up in one pass; ``activation`` names the activation f. Differentiable.

    ``gate``, ``up`` and the result are [.., F]. ``kernels`` selects Triton or PyTorch.
    """
    if has_torch_function((gate, up)):
        return handle_torch_function(gated, (gate, up), gate, up, activation, kernels)
    alike = gate.shape == up.shape and gate.dtype == up.dtype
    if not alike or not is_narrow(gate) or not kernels.triton("gated", gate, gate.shape[-1]):
        return gated_reference(gate, up, activation)
    return _gated(gate, up, activation)


def gated_reference(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """Returns f(gate) * up in PyTorch; ``activation`` names the activation f."""
    return ACTIVATIONS[activation](gate) * up


@fused_operator("trine::gated")
def _gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    from engine.kernels.gpu.activations import gated_forward

    return gated_forward(_rows(gate), _rows(up), activation).view(gate.shape)


@fused_operator("trine::gated_backward")
def _gated_backward(dy: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    from engine.kernels.gpu.activations import gated_backward

    dgate, dup = gated_backward(_rows(dy), _rows(gate), _rows(up), activation)
    return dgate.view(gate.shape), dup.view(gate.shape)


def _rows(x: Tensor) -> Tensor:
    """Returns ``x`` if contiguous, else its rows as a matrix."""
    return x if x.is_contiguous() else rows_of(x)


@_gated.register_fake
def _(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    return gate.new_empty(gate.shape)


@_gated_backward.register_fake
def _(dy: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), gate.new_empty(gate.shape)


def _keep_gated(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    gate, up, ctx.activation = inputs
    ctx.save_for_backward(gate, up)


def _gated_gradients(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    return *_gated_backward(dy, *ctx.saved_tensors, ctx.activation), None


_gated.register_autograd(_gated_gradients, setup_context=_keep_gated)
