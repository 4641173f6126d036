"""Main gradients: sums into which products add the gradients of weights (Megatron-LM: gradient accumulation fusion).

    apart    dW = dy' x    memory of its own       main += dW    another pass over both
    added    main += dy' x                         in the product's epilogue

Whose sum it is, and when it may be used, the layers above decide: :class:`MainGradient` is what a product sees of it.
"""

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


class OpenSum(NamedTuple):
    """The sum of one parameter's gradients, to add to."""

    into: Tensor
    """In the shape of the parameter; fp32, or the parameter's dtype."""
    holds: bool
    """False: nothing has been added yet and the content is stale, so that a product overwrites it."""


class MainGradient(Protocol):
    """The main gradient of one parameter."""

    def begin(self, node: Any | None) -> OpenSum | None:
        """The sum to add to in the running backward; None: the gradient has to be made and returned.

        ``node``: the node that accumulates the parameter's gradients in this backward; None: autograd takes no part.
        """

    def end(self, node: Any | None) -> None:
        """The product has been added, or its kernel launched."""


class MainGradients:
    """The main gradients of one engine, by parameter. Empty: every gradient is made apart."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[Tensor, MainGradient]] = {}

    def __bool__(self) -> bool:
        return bool(self._of)

    def register(self, parameter: Tensor, main: MainGradient) -> None:
        """From now on products add the gradient of ``parameter`` to ``main``."""
        self._of[id(parameter)] = parameter, main

    def clear(self) -> None:
        """From now on every gradient is made apart."""
        self._of.clear()

    def use(self, weight: Tensor) -> MainGradient | None:
        """The main gradient for a product of a forward with ``weight``, if there is one for this very tensor."""
        if torch.compiler.is_compiling() or not self._of or not weight.requires_grad:
            return None
        parameter, main = self._of.get(id(weight), (None, None))
        return main if parameter is weight else None


def is_executed(node: Any) -> bool:
    """Whether the running backward executes ``node``.

    A nested ``torch.autograd.grad`` inside a recomputed block asks for other gradients and may leave it out.
    """
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # torch raises this if backward asks for the gradient of this very node
        return False


def open_sum(main: MainGradient | None, node: Any | None) -> OpenSum | None:
    """The sum that a product in a backward adds to; None: it has to return its gradient.

    ``node``: as in :meth:`MainGradient.begin`. Second derivatives go through gradients that are made.
    """
    if main is None or torch.is_grad_enabled() or (node is not None and not is_executed(node)):
        return None
    return main.begin(node)
