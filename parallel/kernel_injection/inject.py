"""Kernel injection: replaces the forward of modules that compute the same as a fused operator by that operator.

Modules are recognised by what they compute, not by class: a copy with random weights runs against the operator, and
outputs and gradients are compared. A module that agrees with an operator gets its forward; every other module stays as
it is. Heads whose logits may be lazy are found the same way.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import nn

from engine.kernels.dispatch import Kernels
from engine.kernels.ops.activations import Activation
from engine.parallel.kernel_injection.equivalence import is_linear_layer
from engine.parallel.kernel_injection.expert_stacks import find_expert_stack, injected_experts
from engine.parallel.kernel_injection.replacements import (
    find_activated,
    find_gated,
    find_norm,
    find_rotary,
    injected_gated_mlp,
    injected_norm,
    injected_rotary,
    pair_forwards,
    put_forward,
    rotary_globals,
)
from engine.parallel.model.forward_patch import ForwardPatches
from engine.parallel.model.name_patterns import starred

PutOn = Callable[[ForwardPatches], None]
"""Function that installs a new forward on a module; the patches restore the old one."""


class Replacement(NamedTuple):
    """Description of a module that a fused operator can compute."""

    module: str
    operator: str
    detail: str
    """Description of the computation, for reports."""
    activation: Activation = "none"
    """Activation fused into a linear layer; "none" for other operators."""


LAZY_HEAD = "loss"
"""Operator of a head whose logits the loss computes in chunks of tokens."""


def describe_replacements(replacements: Sequence[Replacement]) -> list[str]:
    """Returns one line of text for each operator and group of modules.

    Names in a group differ only in numbers, such as "layers.*.norm".
    """
    groups = Counter((r.operator, starred(r.module), r.detail) for r in replacements)
    return [f"{operator:<7} {name} ({count}): {detail}" for (operator, name, detail), count in groups.items()]


def _put_on(
    owner: nn.Module, forwards: Mapping[str, Callable[..., Any]], replacement: Replacement, patches: ForwardPatches
) -> None:
    note = f"runs as the operator {replacement.operator} ({replacement.detail})"
    for child, forward in forwards.items():
        put_forward(owner.get_submodule(child), forward, note, patches)


def find_replacements(model: nn.Module, kernels: Kernels) -> list[tuple[Replacement, PutOn]]:
    """Returns (description, function) for each module of ``model`` that a fused operator can compute.

    Call ``function(patches)`` to install the operator on the module. ``model`` may be on the meta device.
    """
    forwards: dict[object, Mapping[str, Callable[..., Any]]] = {}
    uses = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    found: list[tuple[Replacement, PutOn]] = []
    for path, module in model.named_modules():
        parts = _parts(module, kernels)
        if any(uses[id(module.get_submodule(part.child))] > uses[id(module)] for part in parts):
            continue  # another module calls it too
        for part in parts:
            # equal modules share one function, so that torch.compile compiles it once
            shared = forwards.setdefault((type(module), part.child, part.detail), part.forwards)
            name = ".".join(filter(None, (path, part.child)))
            what = Replacement(name, part.operator, part.words, part.activation)
            found.append((what, partial(_put_on, module, shared, what)))
    return found


class _Part(NamedTuple):
    """Replacement of a module, or of a child of it."""

    operator: str
    words: str
    detail: object
    """Settings of the forwards, without the class of the module."""
    forwards: Mapping[str, Callable[..., Any]]
    """Forwards to install, by name of the child; "" is the module itself."""
    child: str = ""
    activation: Activation = "none"


def _parts(module: nn.Module, kernels: Kernels) -> list[_Part]:
    own = type(module).forward
    if (norm := find_norm(module)) is not None:
        return [_Part("norm", norm.words, norm, {"": injected_norm(norm, own, kernels)})]
    if (gated := find_gated(module)) is not None:
        return [_Part("gated", gated.words, gated, {"": injected_gated_mlp(gated, own, kernels)})]
    if (pair := find_activated(module)) is not None:
        fused = pair_forwards(pair, kernels)
        act, words = {pair.act: fused.pop(pair.act)}, (f"with {pair.activation}", f"in {pair.linear}")
        layer = _Part("linear", words[0], pair, fused, pair.linear, pair.activation)
        return [layer, _Part("linear", words[1], pair, act, pair.act)]
    if (stack := find_expert_stack(module)) is not None:
        return [_Part("experts", stack.words, stack, {"": injected_experts(stack, own, kernels)})]
    for name, function in rotary_globals(module):
        if (form := find_rotary(function)) is not None:
            return [_Part("rotary", name, form, {"": injected_rotary(own, name, function, form, kernels)})]
    return []


def find_heads(model: nn.Module) -> Iterator[str]:
    """Yields names of possible language-model heads: linear layers with as many outputs as an embedding has rows."""
    vocabularies = {module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)}
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or not is_linear_layer(module):
            continue
        if module.out_features in vocabularies and module.out_features > module.in_features:
            yield name
