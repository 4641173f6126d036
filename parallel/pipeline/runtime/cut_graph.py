"""An autograd graph that ends at some tensors and goes on behind them later, in another backward.

loss -> ... -> outputs | cut         the first backward hands over the gradients of the outputs
               outputs | root -> ... the second begins with them, on the rank that has what is behind
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Gradients = Sequence[Tensor | None]
"""Of each tensor; None where the loss does not read it."""


def cut_graph(tensors: list[Tensor], arrive: Callable[[Gradients], None]) -> tuple[Tensor, ...]:
    """The tensors with a graph that ends at them: a backward that reaches any of them calls ``arrive`` once.

    They may be written into, as outputs of a model may.
    """
    anchor = torch.empty(0, requires_grad=True)
    attached: tuple[Tensor, ...] = _Cut.apply(anchor, _Given(tensors, arrive))  # type: ignore[no-untyped-call]
    return attached


def resume_graph(tensors: Sequence[Tensor], gradients: list[Tensor | None]) -> Tensor:
    """A 0-dim root: its backward goes on from ``tensors`` with what ``gradients`` then has, and empties it.

    Empty gradients are those of a loss that reads none of the tensors.
    """
    root: Tensor = _Root.apply(gradients, *tensors)  # type: ignore[no-untyped-call]
    return root


class _Given:
    """Arguments that autograd must not take for inputs."""

    def __init__(self, tensors: list[Tensor], arrive: Callable[[Gradients], None]) -> None:
        self.tensors, self.arrive = tensors, arrive


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, given: _Given) -> tuple[Tensor, ...]:
        ctx.arrive = given.arrive
        ctx.set_materialize_grads(False)
        return tuple(given.tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None]:
        ctx.arrive(gradients)
        return None, None


class _Root(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor | None], *tensors: Tensor) -> Tensor:
        ctx.gradients, ctx.count = gradients, len(tensors)
        return tensors[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        gradients = ctx.gradients[:] or [None] * ctx.count
        ctx.gradients.clear()
        return None, *gradients
