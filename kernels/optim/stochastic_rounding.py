"""fp32 to bf16 by stochastic rounding, on local tensors.

A value between two bf16 numbers becomes the upper one with the probability of its distance from the lower one, so
that it is kept on average, and small updates of large weights are not lost (Gupta et al. 2015; Zamirai et al. 2020).
The random bits are a hash of a key and of the element's index: whoever rounds the same element with the same key
gets the same number, on any rank, in any piece, in any order.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF


# A 32-bit mix whose every input bit turns every output bit with a chance close to 1/2 (found by Wellons' hash
# prospector). Both factors are below 2^31, so that a product fits in int64.
_FACTORS = (0x21F0AAAD, 0x735A2D97)
_SHIFTS = (16, 15, 15)


def random_bits(index: Tensor, key: int) -> Tensor:
    """int64 in [0, 2^32) for every element of ``index`` (int64, not negative); ``key``: 64 bits."""
    low = _mix((index & _WORD) ^ (key & _WORD))
    return _mix(low ^ (index >> 32) ^ (key >> 32 & _WORD))


def _mix(x: Tensor) -> Tensor:
    x = x ^ (x >> _SHIFTS[0])
    for factor, shift in zip(_FACTORS, _SHIFTS[1:], strict=True):
        x = (x * factor) & _WORD
        x = x ^ (x >> shift)
    return x


def round_to_bf16(values: Tensor, index: Tensor, key: int) -> Tensor:
    """``values`` (fp32) as bf16, of the same shape; ``index`` (int64, same shape) and ``key`` choose the bits.

    What bf16 can hold stays as it is, and so does what is not finite. Beyond the largest bf16 number lies infinity.
    """
    noise = (random_bits(index, key) >> 16).to(torch.int32)
    # the 16 bits that bf16 lacks carry into those that it has; sign and magnitude: down is towards zero
    rounded = (values.view(torch.int32) + noise) & -0x10000
    return torch.where(values.isfinite(), rounded.view(torch.float32), values).to(torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Lines:
    """How a part of a parameter lies in the whole: it has some places along one dim, and all of the others."""

    places: Tensor
    """int32 [held]: along the cut dim, where in the whole each of its own lies."""
    along: int
    """Size of the cut dim in the whole."""
    inner: int
    """Elements behind the cut dim."""

    @property
    def held(self) -> int:
        """Size of the cut dim here."""
        return self.places.numel()

    def index(self, own: Tensor) -> Tensor:
        """int64 indices in the whole of elements of the part, flat."""
        line = own // self.inner
        outer, along = line // self.held, self.places[line % self.held].long()
        return (outer * self.along + along) * self.inner + own % self.inner


@dataclass(frozen=True, slots=True)
class StochasticRounding:
    """How a run of elements of one parameter is rounded in one update."""

    keys: tuple[int, int, int]
    """Of the weights, of the first and of the second moment."""
    begin: int
    """The run's first element, in the part of the parameter that is held here."""
    lines: Lines | None = None
    """None: the whole parameter is held."""

    def round(self, values: Tensor, kind: int) -> Tensor:
        """``values`` (fp32, flat) as bf16; ``kind``: which key."""
        own = torch.arange(self.begin, self.begin + values.numel(), device=values.device)
        index = own if self.lines is None else self.lines.index(own)
        return round_to_bf16(values, index, self.keys[kind])
