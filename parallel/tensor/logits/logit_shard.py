"""Shard of logits with a vocabulary sharded over the axis "tp", and the operands that meet it.

    LogitShard       operand of the rules for functions. For lazy logits it has the hidden states and the head that
                     computes the logits; functions that change shapes then change the hidden states
    cut_operand      a bias [V] is narrowed to this rank's columns; the gradient is gathered
    share_operand    a temperature [], [1] or [B, S, 1] is the same for all columns; the gradient is summed

Both backwards communicate over "tp", label "logit operands". Operands without a gradient (masks, constants) send
nothing.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.kernels.dispatch import Kernels
from engine.parallel.tensor.collectives import gather_last, refuse_second_derivatives
from engine.parallel.tensor.global_tensor.index_sets import replaced
from engine.parallel.tensor.tp_axis import TensorAxis


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Distribution of the vocabulary rows of an embedding or head over the tensor ranks."""

    axis: TensorAxis
    widths: tuple[int, ...]
    """Number of vocabulary rows on each tensor rank."""
    gathers: list[str] = field(default_factory=list)
    """Names of the functions that have gathered the full vocabulary, each once."""

    @property
    def size(self) -> int:
        """Number of rows of the full vocabulary."""
        return sum(self.widths)

    @property
    def start(self) -> int:
        """First vocabulary row on this rank."""
        return sum(self.widths[: self.axis.index])

    @property
    def width(self) -> int:
        """Number of vocabulary rows on this rank."""
        return self.widths[self.axis.index]


class SoftmaxParts(NamedTuple):
    """Softmax statistics over the full vocabulary, for N tokens with logits x, in fp32 or fp64, without gradients.

    The softmax is exp(x - largest - log_sum).
    """

    largest: Tensor
    """Maximum logit of each token over the full vocabulary, [N]; 0 for an infinite maximum."""
    log_sum: Tensor
    """Logarithm of the sum of exp(x - largest) over the full vocabulary, [N]."""
    shares: Tensor | None
    """This rank's columns of the softmax, [N, W]; None if backward does not read them."""


@dataclass(slots=True)
class SharedSoftmax:
    """Cache of the softmax statistics of one tensor of logits, shared by all losses on it."""

    parts: SoftmaxParts | None = None


@dataclass(frozen=True, slots=True, eq=False)
class LateProduct:
    """Linear head that computes lazy logits [.., V] from hidden states [.., H] when the logits are first read."""

    weight: Tensor
    """Rows of the head's weight on this rank, [W, H]."""
    bias: Tensor | None
    dtype: torch.dtype
    """Dtype of the logits: the product's, or a wider one after a conversion."""
    kernels: Kernels

    def detached(self) -> "LateProduct":
        """Returns this head with weight and bias detached from the autograd graph."""
        bias = None if self.bias is None else self.bias.detach()
        return LateProduct(self.weight.detach(), bias, self.dtype, self.kernels)


@dataclass(frozen=True, slots=True, eq=False)
class LogitShard:
    """This rank's shard of logits. Lazy logits, which are not computed yet, store their hidden states instead."""

    local: Tensor
    """Shard of this rank; for lazy logits the hidden states, with the hidden size in dim ``dim``."""
    vocabulary: Vocabulary
    dim: int
    """Dim of the vocabulary, counted from the front."""
    softmax: SharedSoftmax = field(default_factory=SharedSoftmax)
    """Cache of the softmax, shared with shards of equal values in equal token order."""
    product: LateProduct | None = None
    """Head that computes lazy logits; None for computed logits."""

    @property
    def width(self) -> int:
        """Size of ``local`` along ``dim``: this rank's vocabulary columns, or the hidden size for lazy logits."""
        return self.vocabulary.width if self.product is None else self.product.weight.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the logits."""
        return self.local.dtype if self.product is None else self.product.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The full shape of the logits."""
        shape = list(self.local.shape)
        shape[self.dim] = self.vocabulary.size
        return tuple(shape)

    @property
    def leading(self) -> tuple[int, ...]:
        """Shape of the logits without the vocabulary dim."""
        return (*self.local.shape[: self.dim], *self.local.shape[self.dim + 1 :])

    @property
    def is_last(self) -> bool:
        """True if the vocabulary is the last dim."""
        return self.dim == self.local.dim() - 1

    def rows(self) -> Tensor:
        """Returns ``local`` as a matrix with one row per token: [N, W] logits, or [N, H] hidden states if lazy."""
        return self.local.movedim(self.dim, -1).reshape(-1, self.width)

    def now(self, local: Tensor, dim: int | None = None, same: bool = False) -> "LogitShard":
        """Returns a copy of this shard with the tensor ``local``.

        ``dim``: vocabulary dim of ``local``; None: unchanged. ``same``: True if ``local`` has the values of this
        shard's tensor in the same token order; the copy then shares the softmax cache.
        """
        dim = self.dim if dim is None else dim
        softmax = self.softmax if same else SharedSoftmax()
        return LogitShard(local, self.vocabulary, dim, softmax, self.product)

    def detached(self) -> "LogitShard":
        """Returns this shard with its tensors detached from the autograd graph."""
        product = None if self.product is None else self.product.detached()
        return LogitShard(self.local.detach(), self.vocabulary, self.dim, self.softmax, product)

    def aligned(self, other: "LogitShard") -> bool:
        """Returns True if this shard and ``other`` have the same vocabulary columns in the same dim, counted from the
        back.
        """
        mine, its = self.vocabulary, other.vocabulary
        places = self.dim - self.local.dim() == other.dim - other.local.dim()
        return places and mine.widths == its.widths and mine.axis is its.axis


OPERANDS = "logit operands"


def share_operand(x: Tensor, axis: TensorAxis, label: str = OPERANDS) -> Tensor:
    """Returns ``x``, a tensor equal on all ranks, for an operation with sharded logits. Backward sums the gradient of
    ``x`` over "tp", with the label ``label``.
    """
    if not (torch.is_grad_enabled() and x.requires_grad):
        return x
    shared: Tensor = _Share.apply(x, axis, label)  # type: ignore[no-untyped-call]
    axis.expect("all_reduce", label, x, shared)
    return shared


def cut_operand(x: Tensor, dim: int, vocabulary: Vocabulary) -> Tensor:
    """Returns this rank's columns of ``x``, a full tensor with the vocabulary in dim ``dim``. Backward gathers the
    gradient over "tp".
    """
    if not (torch.is_grad_enabled() and x.requires_grad):
        return x.narrow(dim, vocabulary.start, vocabulary.width)
    widest = max(vocabulary.widths) * len(vocabulary.widths)
    part: Tensor = _Cut.apply(x, dim, vocabulary)  # type: ignore[no-untyped-call]
    whole = x.narrow(dim, 0, 1).expand(replaced(x.shape, dim, widest))
    vocabulary.axis.expect("all_gather", OPERANDS, whole, part)
    return part


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
