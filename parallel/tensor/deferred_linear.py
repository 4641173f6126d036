"""The product of a linear layer whose weight gradient need not come with its input gradient.

    y = x W' + b     dx = dy W      at once: whoever made x waits for it
                     dW = dy' x     may be put off: x and dy are all it needs, neither W nor the graph
                     db = sum dy

The three products are those of ``kernels.linear``: the library's, or Triton's where ``Linear.kernels`` says so.

What is gained by putting it off is for the caller to say: a pipeline fills its bubbles (``pipeline.weights``), a
tensor region hides the sum of dx (``tensor.late``). Put off or not, nothing is computed twice, and results are equal
to the bit to those of the same products at once.

Shape suffixes: B rows (all leading dims together), I inputs, O outputs.

Linear layers that compute the activation behind them: at the end of their product's kernel, or in one pass over it.

``fuse`` takes a column layer or one that is not cut, after the model has been cut; its caller makes the model's own
module for the activation do nothing.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode

from engine.kernels.dispatch import REFERENCE, Kernels
from engine.kernels.ops.activation_functions import Activation
from engine.kernels.ops.bias_activation import activate
from engine.kernels.ops.linear import LinearForm, linear, product
from engine.kernels.ops.linear import linear as kernel_linear
from engine.parallel.model.forward_patch import ForwardPatches, PatchLayer


def is_conv1d(module: nn.Module) -> bool:
    """Whether this is Hugging Face's Conv1D, a linear layer with the weight [in, out]; known by name and ``nf``."""
    return hasattr(module, "nf") and any(base.__name__ == "Conv1D" for base in type(module).__mro__)


def is_linear(module: nn.Module) -> bool:
    """Whether this layer is a matrix product that can be cut."""
    return isinstance(module, nn.Linear) or is_conv1d(module)


class GradsWanted(NamedTuple):
    """The gradients of a product's parameters, before they are computed."""

    weight: partial[Tensor]
    bias: partial[Tensor] | None


class DeferralPolicy(Protocol):
    """Decides what becomes of the gradients of a product's parameters."""

    def put_off(self, wanted: GradsWanted, nodes: tuple[Any, ...]) -> bool:
        """Whether somebody else computes them, or nobody; ``nodes`` stand behind x, W, b and token in the graph."""


class LinearSpec(NamedTuple):
    """What a product needs to know beside its tensors."""

    transposed: bool
    """Whether the weight is [I, O]."""
    later: DeferralPolicy
    kernels: Kernels = REFERENCE


class Beside(NamedTuple):
    """Tensors that a product takes along."""

    kept: Tensor | None = None
    """Saved in place of x; whoever puts the weight gradient off makes x of it."""
    token: Tensor | None = None
    """Its gradient is an empty tensor: whoever made it comes after the backward of the product."""


def deferrable_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, linear: LinearSpec, beside: Beside | None = None
) -> Tensor:
    """x [.., I] -> [.., O], under autocast in its dtype; call it only where :func:`can_multiply`."""
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    y: Tensor = _Product.apply(x, weight, bias, linear, *(beside or Beside()))  # type: ignore[no-untyped-call]
    return y


def can_multiply(x: Tensor, weight: Tensor) -> bool:
    """Whether :func:`deferrable_linear` may replace the layer's own product here: an input gradient comes first."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or type(x) not in (Tensor, nn.Parameter):
        return False
    # who looks at operations by name sees the same in the probe and in a run: a layer that code between units calls
    if _get_current_function_mode() is not None:  # type: ignore[no-untyped-call]
        return False
    # autocast casts no double
    casts = torch.is_autocast_enabled(x.device.type)
    return x.requires_grad and (x.dtype != torch.float64 if casts else x.dtype == weight.dtype)


class _Product(torch.autograd.Function):
    """x [.., I] -> x W' + b [.., O], for W [O, I], or [I, O] where the layer is transposed."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, linear: LinearSpec, *beside: Tensor | None
    ) -> Tensor:
        kept, token = beside
        ctx.save_for_backward(x if kept is None else kept, weight)
        ctx.linear, ctx.bias, ctx.token = linear, None if bias is None else bias.dtype, token is not None
        with torch.autocast(x.device.type, enabled=False):
            w_OI = weight.to(x.dtype)
            b_O = None if bias is None else bias.to(x.dtype)
            y = kernel_linear(x, w_OI, b_O, LinearForm(transposed=linear.transposed), linear.kernels)
        # what it was made as lives no longer: with the mark of a view nobody could write into it (ReLU(inplace=True))
        return torch.ops.aten._unsafe_view(y, y.shape) if y._is_view() else y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        (transposed, later, kernels), bias = ctx.linear, ctx.bias
        w_OI = weight.to(dy.dtype)
        dx = product(dy, w_OI.t() if transposed else w_OI, kernels)
        token = dy.new_empty(0) if ctx.token else None
        if not torch.is_grad_enabled():
            x, dy = x.detach(), dy.detach()  # who keeps them does not keep the graph that made them
        wanted = GradsWanted(
            partial(weight_gradient, x, dy, weight.dtype, transposed, kernels),
            None if bias is None else partial(bias_gradient, dy, bias),
        )
        if later.put_off(wanted, ctx.next_functions):
            return dx, None, None, None, None, token
        return dx, wanted.weight(), None if wanted.bias is None else wanted.bias(), None, None, token


def weight_gradient(
    x: Tensor, dy: Tensor, dtype: torch.dtype, transposed: bool, kernels: Kernels = REFERENCE
) -> Tensor:
    """dW [O, I], or [I, O] where ``transposed``, in ``dtype``."""
    x_BI, dy_BO = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
    left, right = (x_BI, dy_BO) if transposed else (dy_BO, x_BI)
    return product(left.t(), right, kernels).to(dtype)


def bias_gradient(dy: Tensor, dtype: torch.dtype) -> Tensor:
    """db [O] in ``dtype``."""
    return dy.reshape(-1, dy.shape[-1]).sum(0).to(dtype)


def is_executed(node: Any) -> bool:
    """Whether the running backward goes through ``node``: one of the user's own inside a recomputed block, which asks
    for other gradients (``torch.autograd.grad``), may not."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # it asks for this one
        return False


def fused_forward(module: nn.Module, x: Tensor, activation: Activation, kernels: Kernels) -> Tensor:
    """x [.., I] -> act(x W' + b) [.., O], for an ``nn.Linear`` or a Conv1D with a forward of the library's own."""
    layer: Any = module
    return linear(x, layer.weight, layer.bias, LinearForm(activation, is_conv1d(module)), kernels)


def followed(layer: nn.Module, y: Tensor, kernels: Kernels) -> Tensor:
    """What a layer gives whose product with its bias is ``y``."""
    kind: Activation | None = getattr(layer, "tensor_activation", None)
    return y if kind is None else activate(y, None, kind, kernels)


@dataclass(frozen=True, slots=True)
class FusedForward:
    """The forward of a layer that is not cut."""

    module: nn.Module
    activation: Activation
    kernels: Kernels

    def __call__(self, x: Tensor) -> Tensor:
        """x [.., I] -> [.., O]."""
        if _get_current_function_mode() is not None:  # type: ignore[no-untyped-call]
            # who watches operations looks for products by torch's own names
            return activate(type(self.module).forward(self.module, x), None, self.activation, self.kernels)
        return fused_forward(self.module, x, self.activation, self.kernels)


def fuse(layer: nn.Module, activation: Activation, kernels: Kernels, patches: ForwardPatches) -> None:
    """Let a layer, a matrix product and nothing else, compute ``activation`` too. A sharded one has its axis' kernels.

    An operator that stood in the layer's slot gives way to it.
    """
    with patches.changing(layer, PatchLayer.FUSED, f"computes the activation {activation} in its product's kernel"):
        vars(layer).pop("forward", None)
        layer.tensor_activation = activation  # type: ignore[assignment]
        if not hasattr(layer, "multiply"):  # which sharded layers have
            object.__setattr__(layer, "forward", FusedForward(layer, activation, kernels))
