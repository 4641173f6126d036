"""Gated linear units (Dauphin et al. 2017; SwiGLU, GeGLU, ReGLU: Shazeer 2020), applied to the outputs of both
products.

    y = f(gate) up      elementwise; the backward recomputes f(gate)

Shape suffixes: N rows (all leading dims together), F width.
"""

from typing import Any

from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from engine.kernels.dispatch import Kernels, is_narrow, rows_of
from engine.kernels.fused_operator import fused_operator
from engine.kernels.ops.activation_functions import ACTIVATIONS, Activation


def gated(gate: Tensor, up: Tensor, activation: Activation, kernels: Kernels) -> Tensor:
    """Fused ``f(gate) * up``: [.., F] each; the two halves of one tensor are read in place. Differentiable."""
    if has_torch_function((gate, up)):
        return handle_torch_function(gated, (gate, up), gate, up, activation, kernels)
    alike = gate.shape == up.shape and gate.dtype == up.dtype
    if not alike or not is_narrow(gate) or not kernels.triton("gated", gate, gate.shape[-1]):
        return gated_reference(gate, up, activation)
    return _gated(gate, up, activation)


def gated_reference(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """PyTorch reference of :func:`gated`."""
    return ACTIVATIONS[activation](gate) * up


@fused_operator("trine::gated")
def _gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    from engine.kernels.gpu.gated_unit import gated_forward

    return gated_forward(_rows(gate), _rows(up), activation).view(gate.shape)


@fused_operator("trine::gated_backward")
def _gated_backward(dy: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    from engine.kernels.gpu.gated_unit import gated_backward

    dgate, dup = gated_backward(_rows(dy), _rows(gate), _rows(up), activation)
    return dgate.view(gate.shape), dup.view(gate.shape)


def _rows(x: Tensor) -> Tensor:
    """Return ``x`` where its rows lie one behind the other, else its rows as a matrix."""
    return x if x.is_contiguous() else rows_of(x)


@_gated.register_fake
def _(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    return gate.new_empty(gate.shape)


@_gated_backward.register_fake
def _(dy: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), gate.new_empty(gate.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    gate, up, ctx.activation = inputs
    ctx.save_for_backward(gate, up)


def _gradients(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    return *_gated_backward(dy, *ctx.saved_tensors, ctx.activation), None


_gated.register_autograd(_gradients, setup_context=_keep)
