"""Shards that a closed engine leaves on the parameters (ZeRO 3), until the next engine of the model gathers them.

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
    """Bucket of a closed engine."""

    flat: FlatBucket
    ranks: tuple[int, ...]
    """Ranks of the job that keep its shards, in their order."""


def leave_shards(buckets: Sequence[FlatBucket], grid: Grid) -> None:
    """Notes on the parameters of ``buckets`` where their shards are, except shards of a tensor rank's part.

    Parameters of other stages have no shards, so a model on tensor or pipeline ranks does not become whole again.
    """
    if grid.size("replica") > 1:
        return
    for flat in buckets:
        for parameter in flat.parameters:
            setattr(parameter, _LEFT, LeftBucket(flat, grid.peers(flat.bucket.spread.sharding)))


@torch.no_grad()
def make_whole(model: nn.Module, gather: Callable[[Tensor], Sequence[Tensor]]) -> None:
    """Restores the full values of parameters that a closed engine has left in shards; nothing without such parameters.

    Collective: ``gather`` returns the given tensor of every rank of the job.
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
