"""Activation functions by name, in PyTorch; ``engine.kernels.gpu.activation_math`` holds the same ones in Triton.

none, relu, silu (Elfwing et al. 2018), gelu by erf and gelu_tanh (Hendrycks and Gimpel 2016), and relu2, the squared
ReLU (So et al. 2021)
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal

from torch import Tensor
from torch.nn import functional

Activation = Literal["none", "relu", "relu2", "silu", "gelu", "gelu_tanh"]


def squared_relu(x: Tensor) -> Tensor:
    """Squared ReLU: max(x, 0)^2."""
    return functional.relu(x).square()


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU in the tanh approximation."""
    return functional.gelu(x, approximate="tanh")


def identity(x: Tensor) -> Tensor:
    """Return ``x`` unchanged: the activation named "none"."""
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
