"""Master weights in fp32: their gradient norm and clipping factor, the user's writes, and the full weights.

Users write into bf16 parameters between steps: ``load_state_dict`` after ``initialize``, an averaged model swapped in,
a clamp. The next update would silently overwrite these values from the masters. A parameter that nobody has written
equals its rounded master, so comparing the two finds every written element and leaves all other masters exactly as
they were.
"""

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from engine.errors import EngineError
from engine.kernels.optim.host_update import rounds_to
from engine.parallel.comm.comm import Comm
from engine.zero.flat_buckets import FlatBucket, slot_view

_AT_ONCE = 1 << 15
"""Elements that the host compares at a time, so that they stay in its cache."""


def clip_factor(norm: float, max_norm: float) -> float:
    """Returns the factor that clips a gradient with the L2 norm ``norm`` to ``max_norm`` (Pascanu et al. 2013). Returns
    1 if ``norm`` is smaller, or ``max_norm`` is 0.

    It adds 1e-6 to ``norm``, as ``torch.nn.utils.clip_grad_norm_`` does.
    """
    return min(1.0, max_norm / (norm + 1e-6)) if max_norm > 0 else 1.0


def gradient_norm(sum_of_squares: float, weight: float) -> float:
    """Returns the L2 norm of the averaged gradient, sqrt(``sum_of_squares``) / ``weight``, from the summed gradient's
    squared norm and the total weight of the samples.

    Raises:
        EngineError: ``weight`` is 0.
    """
    if weight == 0:
        raise EngineError("the weight of this step is 0 on all ranks: there is nothing to average; mask fewer labels.")
    return math.sqrt(sum_of_squares) / weight


def factor_on_device(sum_of_squares: Tensor, weight: Tensor, max_norm: float) -> tuple[Tensor, Tensor]:
    """Returns two fp64 scalar tensors, without host synchronization: the norm of the averaged gradient, and the factor
    that averages and clips the summed gradient. Arguments are as in ``gradient_norm`` and ``clip_factor``.

    On a GPU, the results are bitwise equal to ``gradient_norm``, and to ``clip_factor`` divided by ``weight``.
    """
    one = torch.ones_like(weight)
    norm = sum_of_squares.sqrt() / weight
    ratio = torch.full_like(norm, max_norm) / (norm + 1e-6) if max_norm > 0 else one
    return norm, torch.where(ratio < one, ratio, one) / weight


@torch.no_grad()
def sync_masters(flat: FlatBucket) -> None:
    """Updates the fp32 masters of the bucket ``flat`` with the parameter elements that user code has written since the
    last update. Waits for the device only if the masters are in host memory.
    """
    if flat.master is None:
        return
    kept = flat.kept.to(flat.master.device)
    if flat.wide is None:
        flat.master.copy_(kept)
        return
    if flat.codec is not None and flat.rounds_in_gathers:  # a gather has left what the codes stand for
        gathered = flat.codec.rounded(flat.master.to(flat.kept.device), kept.dtype).to(flat.master.device)
        _take_written(kept, flat.master, kept != gathered)
        return
    if flat.host_sums is None:
        _take_written(kept, flat.master)
        return
    if rounds_to(flat.master, kept):
        return
    for here, master in zip(torch.split(kept, _AT_ONCE), torch.split(flat.master, _AT_ONCE), strict=True):
        # most often nothing is written, which the bits tell without a copy in the dtype of the master
        if not torch.equal(master.to(here.dtype).view(torch.int64), here.view(torch.int64)):
            _take_written(here, master)


def _take_written(kept: Tensor, master: Tensor, among: Tensor | None = None) -> None:
    """Copies the elements of ``kept`` that differ from their rounded masters, within ``among``."""
    written = kept != master.to(kept.dtype)
    if among is not None:
        written &= among
    torch.where(written, kept.to(master.dtype), master, out=master)


@torch.no_grad()
def full_weights(
    buckets: Sequence[FlatBucket], comm: Comm, average: Callable[[FlatBucket], Tensor] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, full values) of each parameter, gathered over dp, from the fp32 masters if there are any. A tensor
    may be a view of the live parameters.

    ``average``: function that returns values to use in place of this rank's weights in a bucket, as a flat tensor.

    Collective: one all-gather over dp for each bucket with sharded parameters, masters or averages, label "full state".
    Every rank must consume all items.
    """
    for flat in buckets:
        sync_masters(flat)
        whole = flat.params
        if flat.sharded or flat.wide is not None or average is not None:
            weights = flat.weights if average is None else average(flat)
            whole = torch.zeros(flat.bucket.elements, dtype=weights.dtype, device=flat.params.device)
            whole[flat.owned].copy_(weights)
            if flat.owned == flat.shard:
                comm.all_gather(whole, whole[flat.shard], flat.bucket.spread.sharding, "full state").wait()
        for slot in flat.bucket.slots:
            yield slot.name, slot_view(whole, slot)


def sync_rounded(buckets: Sequence[FlatBucket]) -> None:
    """Copies the parameter elements that user code has written into the fp32 masters. Skips buckets without
    ``rounds_in_gathers`` (a quantized all-gather rounds the parameters).
    """
    for flat in filter(lambda each: each.rounds_in_gathers, buckets):
        sync_masters(flat)


def tell_autograd(buckets: Sequence[FlatBucket]) -> None:
    """Marks all parameters in ``buckets`` as changed in place. A backward through a graph with the old values then
    raises.
    """
    torch.autograd.graph.increment_version([parameter for flat in buckets for parameter in flat.parameters])
    torch.clear_autocast_cache()  # an autocast around several steps would go on using copies of the old weights
