"""Logits that wait: what they will be made of, and how.

head       hidden states, weight, bias          computed: their product
derived    the same after a view, a slice ...   computed: what that makes of the source's logits, as if done then
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from engine.errors import EngineError
from engine.parallel.tensor.logit_slice import Slice


class Source(Protocol):
    """Logits that others are made of."""

    @property
    def part(self) -> Slice:
        """Computed."""

    @property
    def waits(self) -> bool:
        """Whether they are not."""


@dataclass(frozen=True, slots=True, eq=False)
class Waiting:
    """What stands behind logits until they are computed."""

    part: Slice
    """Hidden states and a product."""
    compute: Callable[[], Slice]
    source: Source | None = None


def product_of(hidden: Slice, weight: Tensor) -> Callable[[], Slice]:
    """Computes the logits of ``hidden``, with gradients; under no autocast, which has been done to its tensors.

    ``weight``: the parameter, whose version tells whether it has been updated.

    Raises:
        EngineError: the weight, the bias or the hidden states have changed since.
    """
    product = hidden.product
    assert product is not None
    kept = weight, hidden.local, product.bias

    def state() -> tuple[int, ...]:
        return tuple(tensor._version for tensor in kept if tensor is not None)

    before = state()

    def compute() -> Slice:
        if state() != before:
            raise EngineError(
                "logits were looked at for the first time after the weights or hidden states that they are made of had "
                "been written, and they are computed when looked at: look before the step, or keep "
                "output.logits.clone()."
            )
        with torch.enable_grad(), torch.autocast(hidden.local.device.type, enabled=False):
            local = functional.linear(hidden.local, product.weight, product.bias)
        return Slice(local, hidden.vocabulary, hidden.dim, hidden.softmax)

    return compute


def derived(source: Source, part: Slice, change: Callable[[Slice], Any]) -> Waiting:
    """What ``change`` makes of the source's logits, in today's grad mode; ``part`` is what it made of hidden states."""
    graded = torch.is_grad_enabled()

    def compute() -> Slice:
        logits = source.part
        with torch.set_grad_enabled(graded):
            found = change(logits)
        assert isinstance(found, Slice), "logits cannot be changed as the hidden states were"
        return found

    return Waiting(part, compute, source)
