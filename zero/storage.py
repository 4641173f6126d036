"""Flat tensors that follow the layout, with the user's parameters as views into them.

For each bucket (glossary in ``zero/__init__.py``), here with N = 4 and an fp32 master:

    params   bf16  [ shard 0 | shard 1 | shard 2 | shard 3 ]   parameter.data are views of it
    grads    fp32  [ shard 0 | shard 1 | shard 2 | shard 3 ]   gradients are summed here; ZeRO 2 that reduces
                                                               every microbatch holds its shard only
    master   fp32            [ shard 1 ]                       on the rank that owns shard 1

With fp32 parameters there is no master: the owned shard of ``params`` is updated itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from engine.zero.layout import Bucket, FlatLayout

NORM_PIECE = 1 << 20
"""Elements whose squares are summed at a time."""


@dataclass(frozen=True, slots=True)
class FlatBucket:
    """The tensors of one bucket on this rank."""

    bucket: Bucket
    params: Tensor
    """[elements] in the dtype of the computation; the parameters are views of it."""
    grads: Tensor
    """[held] in the dtype of accumulation."""
    held: slice
    """The elements whose gradients are kept: all, or this rank's shard."""
    owned: slice
    """The elements that this rank updates: its shard, or all of them at ZeRO stage 0."""
    shard: slice
    """The elements whose gradient this rank counts in the norm; always its 1/N."""
    master: Tensor | None
    """[owned] in fp32, if ``params`` are narrower."""
    parameters: tuple[nn.Parameter, ...]
    """The user's parameters, in the order of the slots."""

    def address(self, start: int) -> int:
        """Memory address of element ``start`` of ``params``."""
        return self.params.data_ptr() + start * self.params.element_size()

    def gradient(self, part: slice) -> Tensor:
        """The gradients of these elements of the bucket, which are held."""
        return self.grads[part.start - self.held.start : part.stop - self.held.start]

    @property
    def weights(self) -> Tensor:
        """[owned]: what the optimizer updates."""
        return self.params[self.owned] if self.master is None else self.master


@dataclass(frozen=True, slots=True)
class Ownership:
    """Which data rank this is, and whether it updates its shard only (ZeRO 1) or everything (0)."""

    index: int
    ranks: int
    sharded: bool
    sharded_gradients: bool = False
    """Keep the shard of gradients only (ZeRO 2 with ``reduce: microbatch``); not where they are partial over
    tensor ranks, because only whole ones can be summed there."""


def allocate(
    layout: FlatLayout, parameters: Mapping[str, nn.Parameter], who: Ownership, device: torch.device
) -> tuple[FlatBucket, ...]:
    """Move ``parameters`` into flat buckets on ``device``, bucket by bucket.

    Afterwards ``parameter.data`` is a view in the bucket's dtype; the given values are kept exactly in
    the weights (master or parameter). Nothing is communicated.
    """
    return tuple(_fill(bucket, parameters, who, device) for bucket in layout.buckets)


def _fill(bucket: Bucket, parameters: Mapping[str, nn.Parameter], who: Ownership, device: torch.device) -> FlatBucket:
    dtype = getattr(torch, bucket.dtype)
    wide = torch.promote_types(dtype, torch.float32)
    shard = bucket.shard(who.index, who.ranks)
    owned = shard if who.sharded else slice(0, bucket.elements)
    params = torch.zeros(bucket.elements, dtype=dtype, device=device)
    held = shard if who.sharded_gradients and not bucket.partial else slice(0, bucket.elements)
    grads = torch.zeros(held.stop - held.start, dtype=wide, device=device)
    master = None
    if wide != dtype:
        master = torch.zeros(owned.stop - owned.start, dtype=wide, device=device)
    for slot in bucket.slots:
        parameter = parameters[slot.name]
        given = parameter.detach().reshape(-1)
        params[slot.start : slot.stop].copy_(given)
        start, stop = max(slot.start, owned.start), min(slot.stop, owned.stop)
        if master is not None and start < stop:
            kept = given[start - slot.start : stop - slot.start]
            master[start - owned.start : stop - owned.start].copy_(kept)
        parameter.data = params[slot.start : slot.stop].view(slot.shape)
    members = tuple(parameters[slot.name] for slot in bucket.slots)
    return FlatBucket(bucket, params, grads, held, owned, shard, master, members)


def squared_norm(buckets: Sequence[FlatBucket]) -> Tensor:
    """Sum of squares of the gradients that this rank counts in its shards, as one fp64 scalar; padding is zero.

    In pieces, because torch widens all that it sums before it sums.
    """
    parts = [flat.gradient(part) for flat in buckets for part in flat.bucket.counted(flat.shard)]
    pieces = [piece for part in parts for piece in torch.split(part, NORM_PIECE)]
    if not pieces:
        return torch.zeros((), dtype=torch.float64)
    norms = [torch.linalg.vector_norm(piece, dtype=torch.float64) for piece in pieces]
    return torch.stack(norms).square().sum()
