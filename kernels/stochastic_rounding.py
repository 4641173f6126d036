"""fp32 to bf16 by stochastic rounding, on local tensors.

A value between two bf16 numbers becomes the upper one with the probability of its distance from the lower one, so
that it is kept on average, and small updates of large weights are not lost (Gupta et al. 2015; Zamirai et al. 2020).
The random bits are a hash of a key and of the element's index: whoever rounds the same element with the same key
gets the same number, on any rank, in any piece, in any order.
"""

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
