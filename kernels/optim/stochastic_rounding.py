"""Stochastic rounding from fp32 to bf16, on local tensors.

A value between two bf16 numbers is rounded up with a probability proportional to the distance from the lower number, so
that the expectation equals the value and small updates of large weights are not lost (Gupta et al. 2015; Zamirai et al.
2020). The random bits are a hash of a key and the element's index: the same element with the same key is rounded to the
same number on any rank, in any partition and in any order.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF


# A 32-bit mixer: every input bit flips every output bit with a probability close to 1/2 (found by Wellons' hash
# prospector). Both factors are below 2^31, so that products fit in int64.
_FACTORS = (0x21F0AAAD, 0x735A2D97)
_SHIFTS = (16, 15, 15)


def random_bits(index: Tensor, key: int) -> Tensor:
    """Returns a random number in [0, 2^32) for each element of ``index``, as int64 of the same shape.

    The numbers depend only on ``index`` (int64, nonnegative) and the 64-bit ``key``.
    """
    low = _mix((index & _WORD) ^ (key & _WORD))
    return _mix(low ^ (index >> 32) ^ (key >> 32 & _WORD))


def _mix(x: Tensor) -> Tensor:
    x = x ^ (x >> _SHIFTS[0])
    for factor, shift in zip(_FACTORS, _SHIFTS[1:], strict=True):
        x = (x * factor) & _WORD
        x = x ^ (x >> shift)
    return x


def round_to_bf16(values: Tensor, index: Tensor, key: int) -> Tensor:
    """Rounds ``values`` (fp32) stochastically to one of the two nearest bf16 numbers.

    ``index`` (int64, same shape) and ``key`` determine the random bits. Non-finite numbers are unchanged.
    """
    noise = (random_bits(index, key) >> 16).to(torch.int32)
    # Random noise in the 16 bits that bf16 drops carries into the remaining bits. The encoding is sign and
    # magnitude, so dropping bits rounds towards zero.
    rounded = (values.view(torch.int32) + noise) & -0x10000
    return torch.where(values.isfinite(), rounded.view(torch.float32), values).to(torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Lines:
    """Position of a shard in a parameter that is sharded along one dim."""

    places: Tensor
    """Index along the sharded dim of the full parameter, for each line of the shard: int32 [held]."""
    along: int
    """Size of the sharded dim in the full parameter."""
    inner: int
    """Elements per index of the sharded dim: the product of the later dims."""

    @property
    def held(self) -> int:
        """Number of indices of the sharded dim in this shard."""
        return self.places.numel()

    def index(self, own: Tensor) -> Tensor:
        """Maps flat indices ``own`` in the shard to flat indices in the full parameter, int64."""
        line = own // self.inner
        outer, along = line // self.held, self.places[line % self.held].long()
        return (outer * self.along + along) * self.inner + own % self.inner


@dataclass(frozen=True, slots=True)
class StochasticRounding:
    """Random keys for stochastic rounding of a parameter's shard in one update, and position of the shard."""

    keys: tuple[int, int, int]
    """Random keys of the weights, the first moment and the second moment."""
    begin: int
    """Index of the first element in this rank's shard of the parameter."""
    lines: Lines | None = None
    """Position of the shard in the full parameter; None if the parameter is not sharded."""

    def round(self, values: Tensor, kind: int) -> Tensor:
        """Rounds ``values`` (fp32, flat) stochastically to bf16: up or down, by random bits.

        ``kind`` selects the random key: 0 for weights, 1 for the first moment, 2 for the second moment.
        """
        own = torch.arange(self.begin, self.begin + values.numel(), device=values.device)
        index = own if self.lines is None else self.lines.index(own)
        return round_to_bf16(values, index, self.keys[kind])
