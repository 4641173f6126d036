"""One gradient norm over the whole grid, and the factor that clipping multiplies with.

What the user writes into bf16 parameters between steps reaches the fp32 masters.

``load_state_dict`` after ``initialize``, an averaged model swapped in, a clamp: all write into the
parameters, and the next update would overwrite them from the masters without a word. A parameter that
nobody wrote to is its master rounded, so comparing the two finds every written element, and leaves the
master of all others exactly as it was.

Weights made whole over the data axis, for who wants to read them all.
"""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from engine.errors import EngineError
from engine.parallel.comm.comm import Comm
from engine.zero.flat_buckets import FlatBucket, slot_view


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


@torch.no_grad()
def sync_masters(flat: FlatBucket) -> None:
    """Take written elements into the part of the master that this rank holds. No host synchronization."""
    if flat.master is None:
        return
    written = flat.kept != flat.master.to(flat.kept.dtype)
    torch.where(written, flat.kept.to(flat.master.dtype), flat.master, out=flat.master)


@torch.no_grad()
def full_weights(buckets: Sequence[FlatBucket], comm: Comm) -> Iterator[tuple[str, Tensor]]:
    """(name of the parameter, its values whole over dp and in their widest dtype), bucket by bucket.

    One all-gather over dp, label "full state", for each bucket whose masters or parameters are sharded; every rank
    has to take all items. A tensor is a view of the parameters or of one gathered bucket.
    """
    for flat in buckets:
        sync_masters(flat)
        whole = flat.params
        if flat.sharded or flat.master is not None:
            whole = torch.zeros(flat.bucket.elements, dtype=flat.weights.dtype, device=flat.params.device)
            whole[flat.owned].copy_(flat.weights)
            if flat.owned == flat.shard:
                comm.all_gather(whole, whole[flat.shard], "dp", "full state").wait()
        for slot in flat.bucket.slots:
            yield slot.name, slot_view(whole, slot)
