"""Look through a model for what our operators compute, and put them there."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import nn

from engine.kernels.choice import Kernels
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


def describe(replacements: Sequence[Replacement]) -> list[str]:
    """For people: each operator with the modules that have got it, alike ones together."""
    groups = Counter((r.operator, re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", r.module), r.detail) for r in replacements)
    return [f"{operator:<7} {name} ({count}): {detail}" for (operator, name, detail), count in groups.items()]


def recognise(model: nn.Module, kernels: Kernels) -> list[tuple[Replacement, PutOn]]:
    """The modules that compute what one of our operators does, and what puts it there. Nothing is communicated.

    No parameter is read, so that a model on the meta device will do, and no random number of the user's is drawn.
    """
    forwards: dict[object, Callable[..., Any]] = {}
    found: list[tuple[Replacement, PutOn]] = []
    for name, module in model.named_modules():
        if (made := _made(module, kernels)) is not None:
            # alike modules share one function, which torch.compile then compiles once
            forward = forwards.setdefault((type(module), made.detail), made.forward)
            found.append((Replacement(name, made.operator, made.words), partial(put_on, module, forward)))
    return found


class _Made(NamedTuple):
    operator: str
    words: str
    detail: object
    """Of what the forward is made, beside the class of the module."""
    forward: Callable[..., Any]


def _made(module: nn.Module, kernels: Kernels) -> _Made | None:
    own = type(module).forward
    if (norm := find_norm(module)) is not None:
        return _Made("norm", norm.words, norm, norm_forward(norm, own, kernels))
    if (gated := find_gated(module)) is not None:
        return _Made("gated", gated.words, gated, gated_forward(gated, own, kernels))
    for name, function in rotary_globals(module):
        if (form := find_rotary(function)) is not None:
            return _Made("rotary", name, form, rotary_forward(own, name, function, form, kernels))
    return None
