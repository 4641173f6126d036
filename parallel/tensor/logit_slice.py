"""This rank's slice of logits whose vocabulary is cut over the axis "tp": what the rules for functions work on.

Logits may wait: then the slice holds the hidden states and the head that makes logits of them, and what changes shapes
changes those of the hidden states.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from engine.kernels.choice import Kernels
from engine.parallel.tensor.axis import TensorAxis


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
class Slice:
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

    def now(self, local: Tensor, dim: int | None = None, same: bool = False) -> "Slice":
        """Another local part; ``same``: with the same values in the same order of tokens."""
        dim = self.dim if dim is None else dim
        softmax = self.softmax if same else SharedSoftmax()
        return Slice(local, self.vocabulary, dim, softmax, self.product)

    def detached(self) -> "Slice":
        """The same without gradients."""
        product = None if self.product is None else self.product.detached()
        return Slice(self.local.detach(), self.vocabulary, self.dim, self.softmax, product)

    def aligned(self, other: "Slice") -> bool:
        """Whether equal columns lie at equal places."""
        mine, its = self.vocabulary, other.vocabulary
        places = self.dim - self.local.dim() == other.dim - other.local.dim()
        return places and mine.widths == its.widths and mine.axis is its.axis
