"""Matrix product of a linear layer with a weight gradient that may be deferred, and fusion with an activation.

    y = x W' + b     dx = dy W      computed at once: the layer before waits for it
                     dW = dy' x     may be deferred: it needs x and dy only, neither W nor the graph
                     db = sum dy    deferred with dW

All three are products of ``kernels.ops.linear``: the library's, or Triton's as ``LinearSpec.kernels`` selects.

A :class:`DeferralPolicy` chooses the time: a pipeline fills bubbles with weight gradients (zero bubble), a tensor
region overlaps them with the all-reduce of dx (``overlap.async_input_grad``). In both cases nothing is computed twice,
and the results have the same bits as products that run at once.

:func:`fuse` lets a layer, column-sharded or replicated, also compute the activation that follows it: in the epilogue of
the product's kernel, or in one pass over the output. The caller runs :func:`fuse` after the model is sharded, and turns
the model's own activation module into a no-op.

Shape suffixes: B rows (all leading dims together), I inputs, O outputs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from engine.kernels.dispatch import REFERENCE, Kernels, MainGradient
from engine.kernels.ops.activations import Activation, activate
from engine.kernels.ops.linear import LinearForm, added_to_main, linear, product, unviewed
from engine.kernels.ops.linear import linear as kernel_linear
from engine.parallel.model.forward_patch import ForwardPatches, PatchLayer
from engine.parallel.model.operand_casts import is_watched
from engine.parallel.model.placeholders import is_plain


def is_conv1d(module: nn.Module) -> bool:
    """Returns True if ``module`` is Hugging Face's ``Conv1D``, a linear layer with weight [in, out]."""
    if isinstance(module, nn.Linear):  # first: every call asks, and the lookup of an absent attribute takes 2 us
        return False
    return hasattr(module, "nf") and any(base.__name__ == "Conv1D" for base in type(module).__mro__)


def only_argument(given: Sequence[Tensor], named: Mapping[str, Tensor]) -> Tensor:
    """Returns the only argument of a layer's call, positional or named as the layer's own forward names it.

    Raises:
        TypeError: the call has no argument, or several.
    """
    if len(given) + len(named) != 1:
        raise TypeError(f"a layer that takes one tensor was called with {len(given) + len(named)} arguments; pass one.")
    return given[0] if given else next(iter(named.values()))


def is_linear(module: nn.Module) -> bool:
    """Returns True if ``module`` is an ``nn.Linear`` or Hugging Face's ``Conv1D``."""
    return isinstance(module, nn.Linear) or is_conv1d(module)


class GradsWanted(NamedTuple):
    """Weight and bias gradients of one product that are not computed yet."""

    weight: partial[Tensor]
    """Call of :func:`weight_gradient` with all arguments bound."""
    bias: partial[Tensor] | None
    main: MainGradient | None = None
    """Main gradient of the weight, to which :func:`unless_added` may add the weight gradient in place."""


class DeferralPolicy(Protocol):
    """Interface of policies for weight and bias gradients in backward: computed at once, later or never."""

    def put_off(self, wanted: GradsWanted, nodes: tuple[Any, ...]) -> bool:
        """Returns True if the policy computes the gradients ``wanted`` later or never; False: backward computes them at
        once.

        ``nodes``: ``next_functions`` of the autograd node of the matrix product.
        """


class LinearSpec(NamedTuple):
    """Settings of one matrix product: memory order of its weight, policy for deferred gradients, and kernels."""

    transposed: bool
    """True if the weight is stored as [I, O]."""
    later: DeferralPolicy
    kernels: Kernels = REFERENCE


class Beside(NamedTuple):
    """Optional inputs of :func:`deferrable_linear`, for a layer that restores x in backward or runs code after the
    product's backward.
    """

    kept: Tensor | None = None
    """Tensor saved for backward in place of x, from which the deferral policy restores x."""
    token: Tensor | None = None
    """Tensor with an empty gradient; its autograd node runs after the product's backward."""


def deferrable_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, linear: LinearSpec, beside: Beside | None = None
) -> Tensor:
    """Returns ``x`` [.., I] times the transpose of ``weight``, plus ``bias`` [O]: a tensor [.., O].

    The policy ``linear.later`` decides when the gradients of weight and bias are computed. The caller checks
    :func:`can_multiply` first.
    """
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    y: Tensor = _Product.apply(x, weight, bias, linear, *(beside or Beside()))  # type: ignore[no-untyped-call]
    return y


def can_multiply(x: Tensor, weight: Tensor) -> bool:
    """Returns True if :func:`deferrable_linear` can compute ``x`` times ``weight``.

    It needs eager execution, an ``x`` that requires a gradient, and equal dtypes or autocast.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or not is_plain(x):
        return False
    # a tracer that matches operations by name must see torch's own product, both in the trace and in the run
    if is_watched():
        return False
    # autocast leaves float64 as it is
    casts = torch.is_autocast_enabled(x.device.type)
    return x.requires_grad and (x.dtype != torch.float64 if casts else x.dtype == weight.dtype)


class _Product(torch.autograd.Function):
    """Product x [.., I] -> x W' + b [.., O], for W [O, I], or [I, O] if the layer is transposed."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, linear: LinearSpec, *beside: Tensor | None
    ) -> Tensor:
        kept, token = beside
        ctx.save_for_backward(x if kept is None else kept, weight)
        ctx.linear, ctx.bias, ctx.token = linear, None if bias is None else bias.dtype, token is not None
        ctx.main = linear.kernels.main.use(weight)
        with torch.autocast(x.device.type, enabled=False):
            w_OI = weight.to(x.dtype)
            b_O = None if bias is None else bias.to(x.dtype)
            y = kernel_linear(x, w_OI, b_O, LinearForm(transposed=linear.transposed), linear.kernels)
        return unviewed(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        (transposed, later, kernels), bias = ctx.linear, ctx.bias
        w_OI = weight.to(dy.dtype)
        dx = product(dy, w_OI.t() if transposed else w_OI, kernels)
        token = dy.new_empty(0) if ctx.token else None
        if not torch.is_grad_enabled():
            x, dy = x.detach(), dy.detach()  # a deferred gradient must not keep the graph alive
        wanted = GradsWanted(
            partial(weight_gradient, x, dy, weight.dtype, transposed, kernels),
            None if bias is None else partial(bias_gradient, dy, bias),
            ctx.main,
        )
        if later.put_off(wanted, ctx.next_functions):
            return dx, None, None, None, None, token
        db = None if wanted.bias is None else wanted.bias()
        return dx, unless_added(wanted.weight, wanted.main, ctx.next_functions[1][0]), db, None, None, token


def weight_gradient(
    x: Tensor, dy: Tensor, dtype: torch.dtype, transposed: bool, kernels: Kernels = REFERENCE
) -> Tensor:
    """Returns the weight gradient of a product with input ``x`` [.., I] and output gradient ``dy`` [.., O].

    The result has the dtype ``dtype`` and the shape [O, I], or [I, O] if ``transposed``.
    """
    x_BI, dy_BO = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
    left, right = (x_BI, dy_BO) if transposed else (dy_BO, x_BI)
    return product(left.t(), right, kernels).to(dtype)


def unless_added(compute: "partial[Tensor]", main: MainGradient | None, node: Any | None) -> Tensor | None:
    """Computes a weight gradient. If the running backward may write ``main``, adds the gradient to it in place and
    returns None; otherwise returns the gradient.

    ``main``: buffer that sums the weight's gradients. ``compute``: :func:`weight_gradient` with bound arguments.
    ``node``: autograd node that accumulates the gradient; None outside of autograd.
    """
    if main is None:
        return compute()
    x, dy, _, transposed, kernels = compute.args
    x_BI, dy_BO = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
    left, right = (x_BI, dy_BO) if transposed else (dy_BO, x_BI)
    return None if added_to_main(main, node, left.t(), right, kernels) else compute()


def bias_gradient(dy: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the bias gradient [O] in ``dtype``: the sum of ``dy`` [.., O] over all dims but the last."""
    return dy.reshape(-1, dy.shape[-1]).sum(0).to(dtype)


def fused_forward(module: nn.Module, x: Tensor, activation: Activation, kernels: Kernels) -> Tensor:
    """Returns act(x W' + b) [.., O] for ``x`` [.., I], with weight W and bias b of the linear layer ``module``.

    ``activation``: the function act.
    """
    layer: Any = module
    return linear(x, layer.weight, layer.bias, LinearForm(activation, is_conv1d(module)), kernels)


def fused_activation(layer: nn.Module) -> Activation:
    """Returns the activation that a call of ``layer`` now applies; "none" if the call does not come from the forward
    that calls the activation's module next (``tensor_outside``).
    """
    kind: Activation | None = getattr(layer, "tensor_activation", None)
    return "none" if kind in (None, "none") or getattr(layer, "tensor_outside", False) else kind


def fused_as_first(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a wrapper of ``forward`` for one call of ``module`` and its recomputations, in which layers apply their
    activations as in the first run: the code that has called it (``tensor_outside``) does not run again.
    """
    marked: list[Any] = [each for each in module.modules() if hasattr(each, "tensor_outside")]
    if not marked:
        return forward
    first = [each.tensor_outside for each in marked]

    def run(*args: Any, **kwargs: Any) -> Any:
        before = [each.tensor_outside for each in marked]
        try:
            set_outside(marked, first)
            return forward(*args, **kwargs)
        finally:
            set_outside(marked, before)

    return run


def set_outside(modules: Sequence[nn.Module], outside: Sequence[bool]) -> None:
    """Sets ``tensor_outside`` of each module of fused pairs: False while the forward of the pair's owner runs."""
    for each, value in zip(modules, outside, strict=True):
        object.__setattr__(each, "tensor_outside", value)


def followed(layer: nn.Module, y: Tensor, kernels: Kernels) -> Tensor:
    """Applies the activation fused into ``layer``, if there is one, to ``y``, the layer's output with bias."""
    kind = fused_activation(layer)
    return y if kind == "none" else activate(y, None, kind, kernels)


@dataclass(frozen=True, slots=True)
class FusedForward:
    """Forward of a replicated linear layer with an activation fused into it."""

    module: nn.Module
    activation: Activation
    kernels: Kernels
    form: LinearForm = field(init=False)
    plain: LinearForm = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "form", LinearForm(self.activation, is_conv1d(self.module)))
        object.__setattr__(self, "plain", LinearForm("none", is_conv1d(self.module)))

    def __call__(self, *given: Tensor, **named: Tensor) -> Tensor:
        """Computes x [.., I] -> [.., O]; x is the only argument."""
        x = only_argument(given, named)
        if is_watched():
            # a tracer matches products by torch's own names
            return followed(self.module, type(self.module).forward(self.module, x), self.kernels)
        layer: Any = self.module
        form = self.plain if fused_activation(layer) == "none" else self.form
        return linear(x, layer.weight, layer.bias, form, self.kernels)


def fuse(layer: nn.Module, activation: Activation, kernels: Kernels, patches: ForwardPatches) -> None:
    """Makes the linear layer ``layer`` apply ``activation`` to its output, in the matrix product's kernel if possible.

    ``kernels``: implementation for a replicated layer; a sharded layer uses the implementation of its tensor axis.
    Removal of ``patches`` restores ``layer``.
    """
    note = f"computes the activation {activation} in its product's kernel"
    if activation == "none":
        note = "adds its weight gradient to the flat bucket in its product's kernel"
    with patches.changing(layer, PatchLayer.FUSED, note):
        vars(layer).pop("forward", None)
        layer.tensor_activation = activation  # type: ignore[assignment]
        if not hasattr(layer, "multiply"):  # a sharded layer applies tensor_activation itself
            object.__setattr__(layer, "forward", FusedForward(layer, activation, kernels))
