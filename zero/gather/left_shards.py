"""Parameters left sharded by a closed engine (ZeRO 3), until the model's next engine gathers them.

close        each parameter knows its bucket, whose shard this rank keeps
make_whole   all ranks give their shards, bucket by bucket, and parameters have their own memory again, on the host
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from engine.parallel.grid import Grid
from engine.parallel.trace.absent_parameter import reveal
from engine.zero.flat_buckets import FlatBucket, slot_view

_LEFT = "_left_shards"


@dataclass(frozen=True, slots=True)
class LeftBucket:
    """Bucket that a closed engine has left sharded, with the ranks that store its shards."""

    flat: FlatBucket
    ranks: tuple[int, ...]
    """Global ranks with the shards, in shard order."""


def leave_shards(buckets: Sequence[FlatBucket], grid: Grid) -> None:
    """Records in each parameter of ``buckets`` the bucket that contains it and the ranks with shards of that bucket,
    for a later :func:`make_whole`.

    Does nothing with several tensor or pipeline ranks; such models stay sharded.
    """
    if grid.size("replica") > 1:
        return
    for flat in buckets:
        for parameter in flat.parameters:
            setattr(parameter, _LEFT, LeftBucket(flat, grid.peers(flat.bucket.spread.sharding)))


@torch.no_grad()
def make_whole(model: nn.Module, gather: Callable[[Tensor], Sequence[Tensor]]) -> None:
    """Replaces the data of the parameters of ``model`` that a closed engine has left sharded by full CPU tensors.
    Collective over all ranks of the job; does nothing if no parameter is sharded.

    ``gather``: callback that all-gathers a tensor; returns one tensor per rank.
    """
    left: dict[int, LeftBucket] = {}
    for parameter in model.parameters():
        if (found := vars(parameter).get(_LEFT)) is not None:
            left.setdefault(id(found.flat), found)
    for bucket in left.values():
        flat = bucket.flat
        parts = gather(flat.kept.to(flat.params.device))
        whole = torch.cat([parts[rank] for rank in bucket.ranks]).cpu()
        for slot, parameter in zip(flat.bucket.slots, flat.parameters, strict=True):
            delattr(parameter, _LEFT)
            reveal(parameter)
            parameter.data = slot_view(whole, slot)
