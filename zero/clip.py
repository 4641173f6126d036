"""One gradient norm over the whole grid, and the factor that clipping multiplies with."""

import math

import torch
from torch import Tensor

from engine.errors import EngineError


def clip_factor(norm: float, max_norm: float) -> float:
    """What gradients of L2 norm ``norm`` are multiplied with (Pascanu et al. 2013); 0 switches clipping off.

    The small constant is torch's, so that a run equals ``torch.nn.utils.clip_grad_norm_``.
    """
    return min(1.0, max_norm / (norm + 1e-6)) if max_norm > 0 else 1.0


def gradient_norm(sum_of_squares: float, weight: float) -> float:
    """Norm of the averaged gradient, from the sum of squares of the summed one and the weight it is divided by."""
    if weight == 0:
        raise EngineError("the weight of this step is 0 on all ranks: nothing to average; mask fewer labels.")
    return math.sqrt(sum_of_squares) / weight


def factor_on_device(sum_of_squares: Tensor, weight: Tensor, max_norm: float) -> tuple[Tensor, Tensor]:
    """(norm, what summed gradients are multiplied with) of fp64 scalars, where they lie; no host synchronization.

    As ``gradient_norm``, and ``clip_factor`` over ``weight``, to the bit on a GPU: quotients of two tensors are rounded
    once, where those with a number are products with a reciprocal there. (torch's root on a CPU misses the last bit of
    one number in a hundred.)
    """
    one = torch.ones_like(weight)
    norm = sum_of_squares.sqrt() / weight
    ratio = torch.full_like(norm, max_norm) / (norm + 1e-6) if max_norm > 0 else one
    return norm, torch.where(ratio < one, ratio, one) / weight
