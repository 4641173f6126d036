"""Linear layers that compute the activation behind them: as the end of their product's kernel, or in one pass over it.

A cut layer that has ``tensor_activation`` gives act(x W' + b). Whoever sets it makes the model's own module for the
activation do nothing.
"""

from typing import Any

from torch import Tensor, nn

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
