"""Modules that are a gated MLP, down(act(gate(x)) * up(x)), of three linear layers or of two.

    gate, up, down       Llama, T5, Gemma ...
    gate_up, down        Phi-3, GLM: one layer whose output is split in half

The trial runs the module's own code over small layers. In the model the operator calls the layers, sharded over tensor
ranks or not, as modules, so their hooks and their parallelism stay.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import permutations
from typing import Any, NamedTuple, cast

from torch import Tensor, nn

from engine.kernels.dispatch import REFERENCE, Kernels, is_autocast
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
"""The widths of the trial's layers."""


class GatedModule(NamedTuple):
    """The layers that a gated MLP is made of."""

    gate: str
    up: str | None
    """The up layer; None: ``gate`` computes both."""
    down: str
    activation: Activation
    gate_first: bool = True
    """If one layer computes both: whether the first half is the gate."""

    @property
    def words(self) -> str:
        """The description for reports."""
        return f"{self.activation}({self.gate}) * {self.up or 'its other half'}, {self.down}"

    def run(self, module: nn.Module, x: Tensor, kernels: Kernels) -> Tensor:
        """The module's output, computed by its layers and the operator."""
        layers: Any = module
        first = getattr(layers, self.gate)(x)
        if self.up is not None:
            gate, up = first, getattr(layers, self.up)(x)
        else:
            gate, up = first.chunk(2, dim=-1) if self.gate_first else reversed(first.chunk(2, dim=-1))
        out: Tensor = getattr(layers, self.down)(gated(gate, up, self.activation, kernels))
        return out


def find_gated(module: nn.Module) -> GatedModule | None:
    """The gated MLP that ``module`` is, or None."""
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
    """The possible assignments of the layers to "gate", "up", "down" or "both", with their names."""
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
    """The forward of such a module through the operator; calls that it does not cover run the module's own forward."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs or is_autocast(args[0]):
            return own(self, *args, **kwargs)
        return found.run(self, args[0], kernels)

    return forward
