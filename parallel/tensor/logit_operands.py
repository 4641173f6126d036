"""What meets cut logits in an elementwise operation: a part of it, or all of it, with the gradient of the whole.

A bias [V] is cut to this rank's columns; its gradient is gathered. A temperature [], [1] or [B, S, 1] is the same
for all columns; its gradient is summed. Both backwards communicate over "tp", label "logit operands". What needs no
gradient (a mask, a constant) sends nothing.
"""

from typing import Any

import torch
from torch import Tensor

from engine.parallel.tensor.axis import TensorAxis
from engine.parallel.tensor.collectives import gather_last, refuse_second_derivatives
from engine.parallel.tensor.logit_slice import Vocabulary

OPERANDS = "logit operands"


def share(x: Tensor, axis: TensorAxis, label: str = OPERANDS) -> Tensor:
    """``x``, whole, used by every rank for its own columns: the gradient is summed over the ranks."""
    if not (torch.is_grad_enabled() and x.requires_grad):
        return x
    axis.expect("all_reduce", label, x)
    shared: Tensor = _Share.apply(x, axis, label)  # type: ignore[no-untyped-call]
    return shared


def cut(x: Tensor, dim: int, vocabulary: Vocabulary) -> Tensor:
    """This rank's columns of ``x``, which is whole and has the vocabulary in ``dim``; its gradient is whole again."""
    if not (torch.is_grad_enabled() and x.requires_grad):
        return x.narrow(dim, vocabulary.start, vocabulary.width)
    widest = max(vocabulary.widths) * len(vocabulary.widths)
    vocabulary.axis.expect("all_gather", OPERANDS, x.narrow(dim, 0, 1).expand(_with(x.shape, dim, widest)))
    part: Tensor = _Cut.apply(x, dim, vocabulary)  # type: ignore[no-untyped-call]
    return part


def _with(shape: torch.Size, dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], size, *shape[dim + 1 :])


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: TensorAxis, label: str) -> Tensor:
        ctx.axis, ctx.label = axis, label
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        refuse_second_derivatives()
        grad = grad.clone(memory_format=torch.contiguous_format)
        ctx.axis.all_reduce(grad, ctx.label)
        return grad, None, None


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, vocabulary: Vocabulary) -> Tensor:
        ctx.dim, ctx.vocabulary = dim, vocabulary
        return x.narrow(dim, vocabulary.start, vocabulary.width)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        refuse_second_derivatives()
        vocabulary: Vocabulary = ctx.vocabulary
        whole = gather_last(grad.movedim(ctx.dim, -1), vocabulary.widths, vocabulary.axis, OPERANDS)
        return whole.movedim(-1, ctx.dim), None, None
