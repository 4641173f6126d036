"""Modules that are a gated perceptron, down(act(gate(x)) * up(x)), of three linear layers or of two.

    gate, up, down       Llama, T5, Gemma ...
    gate_up, down        Phi-3, GLM: one layer whose output is cut in half

The trial has the module's own code over small layers; the layers themselves, cut by tensor ranks or not, are called as
modules afterwards, so that hooks and parallelism stay theirs.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import permutations
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from engine.kernels.dispatch import REFERENCE, Kernels
from engine.kernels.ops.activation_functions import ACTIVATIONS, Activation
from engine.kernels.ops.gated_unit import gated
from engine.parallel.kernel_injection.equivalence import (
    agrees_in_use,
    is_hooked,
    own_forward,
    parameterless_copy,
    sizes_of,
    small_linear,
    twin,
)
from engine.parallel.tensor.deferred_linear import is_linear
from engine.parallel.tensor.layers.linear import has_plain_forward

_HIDDEN, _INNER = 6, 10
"""Widths in the trial."""


class GatedModule(NamedTuple):
    """Which layers a gated perceptron is made of."""

    gate: str
    up: str | None
    """None: ``gate`` has both."""
    down: str
    activation: Activation
    gate_first: bool = True
    """Of one layer for both: which half is the gate."""

    @property
    def words(self) -> str:
        """For people."""
        return f"{self.activation}({self.gate}) * {self.up or 'its other half'}, {self.down}"

    def run(self, module: nn.Module, x: Tensor, kernels: Kernels) -> Tensor:
        """What the module computes, by its layers and the operator."""
        layers: Any = module
        first = getattr(layers, self.gate)(x)
        if self.up is not None:
            gate, up = first, getattr(layers, self.up)(x)
        else:
            gate, up = first.chunk(2, dim=-1) if self.gate_first else reversed(first.chunk(2, dim=-1))
        out: Tensor = getattr(layers, self.down)(gated(gate, up, self.activation, kernels))
        return out


def find_gated(module: nn.Module) -> GatedModule | None:
    """What gated perceptron ``module`` is, if it is one."""
    forward = own_forward(module)
    linear = {name: child for name, child in module.named_children() if is_linear(child)}
    others = [child for child in module.children() if not is_linear(child)]
    if forward is None or len(linear) not in (2, 3) or module._parameters or module._buffers:
        return None
    if any(True for child in others for _ in child.parameters()) or not all(map(has_plain_forward, linear.values())):
        return None
    if any(map(is_hooked, others)):
        return None
    for sizes in _roles(linear):
        copies = _small(module, linear, sizes)
        for found in _forms(sizes):
            operator = lambda x, f=found: f.run(copies, x, REFERENCE)  # noqa: B023, E731
            if agrees_in_use(copies, partial(forward, copies), operator, _HIDDEN):
                return found
    return None


def _roles(linear: Mapping[str, nn.Module]) -> Iterator[dict[str, str]]:
    """Which layer may be what: by name "gate", "up", "down" or "both"."""
    shapes = {name: sizes_of(layer) for name, layer in linear.items()}
    words = ("gate", "up", "down") if len(linear) == 3 else ("both", "down")
    for names in permutations(linear):
        roles = dict(zip(words, names, strict=True))
        inner, hidden = shapes[roles["down"]]
        first = [shapes[name] for name in names[:-1]]
        if all(size == (hidden, inner if len(linear) == 3 else 2 * inner) for size in first):
            yield roles


def _small(module: nn.Module, linear: Mapping[str, nn.Module], roles: Mapping[str, str]) -> nn.Module:
    layers: dict[str, nn.Module] = {}
    for number, (role, name) in enumerate(roles.items()):
        inputs, outputs = {"down": (_INNER, _HIDDEN), "both": (_HIDDEN, 2 * _INNER)}.get(role, (_HIDDEN, _INNER))
        layers[name] = small_linear(inputs, outputs, linear[name], seed=number)
    rest = {name: parameterless_copy(child) for name, child in module.named_children() if name not in linear}
    return twin(module, {}, {**rest, **layers})


def _forms(roles: Mapping[str, str]) -> Iterator[GatedModule]:
    for name in ACTIVATIONS:
        activation = cast(Activation, name)
        if "both" in roles:
            yield from (GatedModule(roles["both"], None, roles["down"], activation, first) for first in (True, False))
        else:
            yield GatedModule(roles["gate"], roles["up"], roles["down"], activation)


def injected_gated_mlp(found: GatedModule, own: Callable[..., Any], kernels: Kernels) -> Callable[..., Any]:
    """The forward of such a module through the operator."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs or torch.is_autocast_enabled(args[0].device.type):
            return own(self, *args, **kwargs)
        return found.run(self, args[0], kernels)

    return forward
