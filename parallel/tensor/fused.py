"""Linear layers that compute the activation behind them: at the end of their product's kernel, or in one pass over it.

``fuse`` a column layer or one that is not cut, when the model has been cut; whoever does it makes the model's own
module for the activation do nothing. ``unfuse`` puts back what was.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.overrides import _get_current_function_mode

from engine.kernels.activation import activate
from engine.kernels.activations import Activation
from engine.kernels.choice import Kernels
from engine.kernels.linear import LinearForm, linear
from engine.parallel.tensor.product import is_conv1d


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


def fuse(layer: nn.Module, activation: Activation, kernels: Kernels) -> None:
    """Let a layer, a matrix product and nothing else, compute ``activation`` too. A cut one has its axis' kernels."""
    layer.tensor_activation = activation  # type: ignore[assignment]
    if not hasattr(layer, "multiply"):  # which cut layers have
        object.__setattr__(layer, "forward", FusedForward(layer, activation, kernels))


def unfuse(layer: nn.Module) -> None:
    """Undo :func:`fuse`."""
    for name in ("tensor_activation", "forward"):
        if name in vars(layer):
            object.__delattr__(layer, name)
