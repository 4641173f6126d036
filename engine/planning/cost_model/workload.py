"""What training a model takes, as data: products, attention, passes over memory, and what is kept for the backward.

    product    a matrix product of each token: inner x outer, and which side tensor ranks cut
    pass       elementwise code and norms: bytes that a token moves; those of a cut part are shared by tensor ranks
    kept       bytes that a token leaves for the backward, by what is recomputed

Widths in bytes are those of a 16-bit model; elements of logits are fp32. Attention counts all pairs of tokens, as torch
counts its FLOPs; half of them are computed where it is causal.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

Recomputation = Literal["none", "selective", "full"]
Side = Literal["inner", "outer", "none"]


class Product(NamedTuple):
    """Matrix products of one token with a weight."""

    inner: int
    outer: int
    cut: Side
    times: float = 1.0

    @property
    def weights(self) -> float:
        """Elements of the weights."""
        return self.inner * self.outer * self.times

    def narrow(self, tp: int) -> float:
        """The narrower side of what a tensor rank multiplies."""
        inner = self.inner / tp if self.cut == "inner" else self.inner
        outer = self.outer / tp if self.cut == "outer" else self.outer
        return min(inner, outer)


class CutAmount(NamedTuple):
    """A number with a part that tensor ranks share, and a part that each has whole (or shares along the sequence)."""

    cut: float
    whole: float

    def on(self, tp: int, sequence: bool) -> float:
        """Of one tensor rank."""
        return self.cut / tp + self.whole / (tp if sequence else 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model of equal blocks between an embedding and a head."""

    blocks: int
    context: int
    """Tokens of a row."""
    width: int
    """Elements of a token between blocks."""
    products: tuple[Product, ...]
    """Of a block."""
    attention: float
    """Width of all heads: pairs of tokens cost 4 FLOPs for each."""
    causal: bool
    heads: int
    passes: CutAmount
    """Bytes a token in the forward of a block, each operator by itself."""
    fused: CutAmount
    """The same with fused operators."""
    kept: tuple[CutAmount, CutAmount, CutAmount]
    """Bytes a token and block, with nothing, everything but products and attention, and everything recomputed."""
    head: tuple[Product, ...]
    vocabulary: int
    block_parameters: float
    """Of one block, all of them cut by tensor ranks (norms are neglected)."""
    outer_parameters: float
    """Of embedding and head, tied ones once."""

    @property
    def parameters(self) -> float:
        """Of the model."""
        return self.blocks * self.block_parameters + self.outer_parameters

    def flops_of_token(self) -> float:
        """Model FLOPs of training one token: three times the forward; attention counts all pairs."""
        block = sum(2 * product.weights for product in self.products) + 4 * self.attention * self.context
        return 3 * (self.blocks * block + sum(2 * product.weights for product in self.head))

    def keeps(self, recomputation: Recomputation) -> CutAmount:
        """Bytes a token and block."""
        return self.kept[("none", "selective", "full").index(recomputation)]
