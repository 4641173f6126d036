"""This rank's slice of logits whose vocabulary is cut over the axis "tp": what the rules for functions work on.

Logits may wait: then the slice holds the hidden states and the head that makes logits of them, and what changes shapes
changes those of the hidden states.

What meets cut logits in an elementwise operation: a part of it, or all of it, with the gradient of the whole.

A bias [V] is cut to this rank's columns; its gradient is gathered. A temperature [], [1] or [B, S, 1] is the same
for all columns; its gradient is summed. Both backwards communicate over "tp", label "logit operands". What needs no
gradient (a mask, a constant) sends nothing.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.kernels.dispatch import Kernels
from engine.parallel.tensor.collectives import gather_last, refuse_second_derivatives
from engine.parallel.tensor.tp_axis import TensorAxis


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """How a vocabulary lies on the tensor ranks."""

    axis: TensorAxis
    widths: tuple[int, ...]
    """Rows by rank."""
    gathers: list[str] = field(default_factory=list)
    """Functions that have asked for all of it, once each."""

    @property
    def size(self) -> int:
        """All rows."""
        return sum(self.widths)

    @property
    def start(self) -> int:
        """This rank's first row."""
        return sum(self.widths[: self.axis.index])

    @property
    def width(self) -> int:
        """This rank's rows."""
        return self.widths[self.axis.index]


class SoftmaxParts(NamedTuple):
    """Of N tokens, without gradients, in fp32 or wider.

    exp(x - largest - log_sum) is the softmax over the whole vocabulary.
    """

    largest: Tensor
    """[N], over the whole vocabulary; 0 where that is infinite."""
    log_sum: Tensor
    """[N]"""
    shares: Tensor | None
    """[N, W], this rank's columns of the softmax, where a backward needs them."""


@dataclass(slots=True)
class SharedSoftmax:
    """What the first loss of some logits finds out and the others use again."""

    parts: SoftmaxParts | None = None


@dataclass(frozen=True, slots=True, eq=False)
class LateProduct:
    """The linear layer that makes logits of hidden states [.., H], when somebody wants them."""

    weight: Tensor
    """[W, H], this rank's rows."""
    bias: Tensor | None
    dtype: torch.dtype
    """Of the logits: that of the product, or a wider one that they were converted to."""
    kernels: Kernels

    def detached(self) -> "LateProduct":
        """Without gradients."""
        bias = None if self.bias is None else self.bias.detach()
        return LateProduct(self.weight.detach(), bias, self.dtype, self.kernels)


@dataclass(frozen=True, slots=True, eq=False)
class LogitShard:
    """A tensor of which dim ``dim`` is the vocabulary, and ``local`` what this rank holds of it."""

    local: Tensor
    """With a ``product`` the hidden states, whose width lies where the vocabulary will."""
    vocabulary: Vocabulary
    dim: int
    """Counted from the front."""
    softmax: SharedSoftmax = field(default_factory=SharedSoftmax)
    """Shared by all that have the same values in the same order of tokens."""
    product: LateProduct | None = None
    """For logits that are not computed yet."""

    @property
    def width(self) -> int:
        """Of ``local``, in the dim of the vocabulary."""
        return self.vocabulary.width if self.product is None else self.product.weight.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """Of the logits."""
        return self.local.dtype if self.product is None else self.product.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole."""
        shape = list(self.local.shape)
        shape[self.dim] = self.vocabulary.size
        return tuple(shape)

    @property
    def leading(self) -> tuple[int, ...]:
        """The shape without the vocabulary."""
        return (*self.local.shape[: self.dim], *self.local.shape[self.dim + 1 :])

    @property
    def is_last(self) -> bool:
        """Whether the vocabulary is the last dim."""
        return self.dim == self.local.dim() - 1

    def rows(self) -> Tensor:
        """``local`` as [N, W], a row for each token; [N, H] while the logits wait."""
        return self.local.movedim(self.dim, -1).reshape(-1, self.width)

    def now(self, local: Tensor, dim: int | None = None, same: bool = False) -> "LogitShard":
        """Another local part; ``same``: with the same values in the same order of tokens."""
        dim = self.dim if dim is None else dim
        softmax = self.softmax if same else SharedSoftmax()
        return LogitShard(local, self.vocabulary, dim, softmax, self.product)

    def detached(self) -> "LogitShard":
        """The same without gradients."""
        product = None if self.product is None else self.product.detached()
        return LogitShard(self.local.detach(), self.vocabulary, self.dim, self.softmax, product)

    def aligned(self, other: "LogitShard") -> bool:
        """Whether equal columns lie at equal places."""
        mine, its = self.vocabulary, other.vocabulary
        places = self.dim - self.local.dim() == other.dim - other.local.dim()
        return places and mine.widths == its.widths and mine.axis is its.axis


OPERANDS = "logit operands"


def share_operand(x: Tensor, axis: TensorAxis, label: str = OPERANDS) -> Tensor:
    """``x``, whole, used by every rank for its own columns: the gradient is summed over the ranks."""
    if not (torch.is_grad_enabled() and x.requires_grad):
        return x
    axis.expect("all_reduce", label, x)
    shared: Tensor = _Share.apply(x, axis, label)  # type: ignore[no-untyped-call]
    return shared


def cut_operand(x: Tensor, dim: int, vocabulary: Vocabulary) -> Tensor:
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
