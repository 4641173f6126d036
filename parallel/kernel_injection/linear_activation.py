"""Linear layers whose output goes through an activation and nowhere else: both become one operator.

The trial runs the module's own code over small layers twice: as they are, and with the activation moved into the linear
layer. Dropout is replaced by a nonlinear function, so that a dropout between the two shows.
"""

from collections.abc import Callable, Mapping
from functools import partial
from inspect import signature
from typing import Any, NamedTuple, cast

from torch import Tensor, nn

from engine.kernels.dispatch import Kernels
from engine.kernels.ops.activation_functions import ACTIVATIONS, Activation
from engine.kernels.ops.bias_activation import activate
from engine.parallel.kernel_injection.equivalence import (
    SCALES,
    agrees,
    agrees_in_use,
    is_hooked,
    is_linear_layer,
    own_forward,
    parameterless_copy,
    random,
    sizes_of,
    small_linear,
    twin,
)
from engine.parallel.model.forward_patch import through_class


class ActivatedLinear(NamedTuple):
    """The names of the two children of one module, and the activation."""

    linear: str
    act: str
    activation: Activation


def find_activated(module: nn.Module) -> ActivatedLinear | None:
    """The linear layer among the children of ``module`` whose output only goes into an activation, or None."""
    forward = own_forward(module)
    layers: dict[str, Any] = {name: child for name, child in module._modules.items() if is_linear_layer(child)}
    if forward is None or len(layers) not in (1, 2) or module._parameters or module._buffers:
        return None
    if len(signature(forward).parameters) != 2:  # self and x: other arguments may select other behaviour
        return None
    acts = [(name, kind) for name, child in module._modules.items() if child and (kind := _kind(child)) is not None]
    if len(acts) != 1:
        return None
    act, activation = acts[0]
    if any(is_hooked(child) for child in (module._modules[act], *layers.values())):
        return None
    small = _small(layers)
    children = {name: parameterless_copy(child) for name, child in module._modules.items() if child} | small
    apart = twin(module, {}, children)
    sizes = {name: layer.in_features for name, layer in small.items()}
    for name in layers:
        fused = {name: nn.Sequential(children[name], children[act]), act: nn.Identity()}
        together, width = twin(module, {}, children | fused), sizes[name]
        operator = partial(_both_modes, forward, apart, together)
        if agrees_in_use(apart, partial(forward, apart), operator, width):
            return ActivatedLinear(name, act, activation)
    return None


def _both_modes(forward: Callable[..., Any], leader: nn.Module, follower: nn.Module, x: Tensor) -> Any:
    """Run ``follower`` in the mode of ``leader``; the children that they share are in it already."""
    follower.training = leader.training
    return forward(follower, x)


def _small(layers: Mapping[str, Any]) -> dict[str, nn.Linear]:
    """Small layers with other weights; equal sizes stay equal."""
    shapes = {name: sizes_of(layer) for name, layer in layers.items()}
    known = sorted({size for shape in shapes.values() for size in shape})
    small = {size: 6 + 4 * rank for rank, size in enumerate(known)}
    return {
        name: small_linear(small[inputs], small[outputs], layers[name], seed)
        for seed, (name, (inputs, outputs)) in enumerate(shapes.items())
    }


def _kind(child: nn.Module) -> Activation | None:
    """The activation that this child computes, found by running it on random values."""
    forward = own_forward(child)
    if forward is None or child._modules or child._parameters or child._buffers or isinstance(child, nn.Dropout):
        return None
    for name, function in ACTIVATIONS.items():
        if name != "none" and all(agrees(partial(forward, child), function, [random(64) * scale]) for scale in SCALES):
            return cast(Activation, name)
    return None


def injected_activation(found: ActivatedLinear, kernels: Kernels) -> Callable[..., Any]:
    """The forward of the linear layer followed by the activation; it stays right however the layer is sharded.

    Once the model is sharded, replicated and column layers get a kernel that computes both
    (``tensor.deferred_linear.fuse``).
    """

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return activate(type(self).forward(self, *args, **kwargs), None, found.activation, kernels)

    return through_class(forward)


def pass_through(self: Any, x: Tensor) -> Tensor:
    """The forward of the activation module, which now does nothing."""
    return x
