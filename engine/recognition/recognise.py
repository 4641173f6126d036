"""Look through a model for what our operators compute, and put them there."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import nn

from engine.kernels.activations import Activation
from engine.kernels.choice import Kernels
from engine.recognition.activations import activated_forward, find_activated, unchanged
from engine.recognition.forwards import put_on
from engine.recognition.norms import find_norm, norm_forward
from engine.recognition.perceptrons import find_gated, gated_forward
from engine.recognition.rotary import find_rotary, rotary_forward, rotary_globals

PutOn = Callable[[], Callable[[], None]]
"""Puts a forward on; what it returns takes it off."""


class Replacement(NamedTuple):
    """A module whose forward goes through an operator of ours."""

    module: str
    operator: str
    detail: str
    """What exactly it computes, for people."""
    activation: Activation = "none"
    """Of a linear layer: what it computes beside."""


def describe(replacements: Sequence[Replacement]) -> list[str]:
    """For people: each operator with the modules that have got it, alike ones together."""
    groups = Counter((r.operator, re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", r.module), r.detail) for r in replacements)
    return [f"{operator:<7} {name} ({count}): {detail}" for (operator, name, detail), count in groups.items()]


def recognise(model: nn.Module, kernels: Kernels) -> list[tuple[Replacement, PutOn]]:
    """The modules that compute what one of our operators does, and what puts it there. Nothing is communicated.

    No parameter is read, so that a model on the meta device will do, and no random number of the user's is drawn.
    """
    forwards: dict[object, Callable[..., Any]] = {}
    uses = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    found: list[tuple[Replacement, PutOn]] = []
    for path, module in model.named_modules():
        parts = _parts(module, kernels)
        targets = [module.get_submodule(part.child) for part in parts]
        if any(uses[id(target)] > uses[id(module)] for target in targets):
            continue  # somebody else calls it too
        for part, target in zip(parts, targets, strict=True):
            # alike modules share one function, which torch.compile then compiles once
            forward = forwards.setdefault((type(module), part.child, part.detail), part.forward)
            name = ".".join(filter(None, (path, part.child)))
            what = Replacement(name, part.operator, part.words, part.activation)
            found.append((what, partial(put_on, target, forward)))
    return found


class _Part(NamedTuple):
    """A forward for a module, or for a child of it."""

    operator: str
    words: str
    detail: object
    """What the forward is made of, beside the class of the module."""
    forward: Callable[..., Any]
    child: str = ""
    activation: Activation = "none"


def _parts(module: nn.Module, kernels: Kernels) -> list[_Part]:
    own = type(module).forward
    if (norm := find_norm(module)) is not None:
        return [_Part("norm", norm.words, norm, norm_forward(norm, own, kernels))]
    if (gated := find_gated(module)) is not None:
        return [_Part("gated", gated.words, gated, gated_forward(gated, own, kernels))]
    if (pair := find_activated(module)) is not None:
        layer = _Part(
            "linear", f"with {pair.activation}", pair, activated_forward(pair, kernels), pair.linear, pair.activation
        )
        return [layer, _Part("linear", f"in {pair.linear}", pair, unchanged, pair.act)]
    for name, function in rotary_globals(module):
        if (form := find_rotary(function)) is not None:
            return [_Part("rotary", name, form, rotary_forward(own, name, function, form, kernels))]
    return []
