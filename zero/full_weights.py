"""Weights made whole over the data axis, for who wants to read them all."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from engine.parallel.comm import Comm
from engine.zero.edits import carry_over
from engine.zero.storage import FlatBucket


@torch.no_grad()
def full_weights(buckets: Sequence[FlatBucket], comm: Comm) -> Iterator[tuple[str, Tensor]]:
    """(name of the parameter, its values whole over dp and in their widest dtype), bucket by bucket.

    One all-gather over dp, label "full state", for each bucket whose masters or parameters are sharded; every rank
    has to take all items. A tensor is a view of the parameters or of one gathered bucket.
    """
    for flat in buckets:
        carry_over(flat)
        whole = flat.params
        if flat.sharded or flat.master is not None:
            whole = torch.zeros(flat.bucket.elements, dtype=flat.weights.dtype, device=flat.params.device)
            whole[flat.owned].copy_(flat.weights)
            if flat.owned == flat.shard:
                comm.all_gather(whole, whole[flat.shard], "dp", "full state").wait()
        for slot in flat.bucket.slots:
            yield slot.name, whole[slot.start : slot.stop].view(slot.shape)
