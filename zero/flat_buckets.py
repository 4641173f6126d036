"""Flat tensors that follow the layout, with the user's parameters as views into them.

For each bucket (glossary in ``zero/__init__.py``), here with N = 4 and an fp32 master:

    params   bf16  [ shard 0 | shard 1 | shard 2 | shard 3 ]   parameter.data are views of it
    kept     bf16            [ shard 1 ]                       the owned part: of ``params`` itself, except at ZeRO 3
    grads    fp32  [ shard 0 | shard 1 | shard 2 | shard 3 ]   gradients are summed here; ZeRO 2 or 3 that reduces
                                                               every microbatch holds its shard only
    master   fp32            [ shard 1 ]                       on the rank that owns shard 1

With fp32 parameters, or bf16 ones that are their own master (``rounding``), ``kept`` is updated itself. At ZeRO 3
``params`` has memory only while it is gathered, and views of it, saved by autograd too, are good again whenever it is.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from engine.kernels.dispatch import Kernels
from engine.kernels.ops.squared_norm import squared_norm as sum_of_squares
from engine.zero.layout import Bucket, FlatLayout, Slot


@dataclass(frozen=True, slots=True)
class FlatBucket:
    """The tensors of one bucket on this rank."""

    bucket: Bucket
    params: Tensor
    """[elements] in the dtype of the computation; the parameters are views of it."""
    kept: Tensor
    """[owned] of ``params``, and at ZeRO 3 in memory of its own."""
    grads: Tensor
    """[held] in the dtype of accumulation; empty if the bucket is frozen."""
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
    views: tuple[Tensor, ...]
    """What their data is: their places in ``params``. Made once, since torch makes no view where memory is missing."""
    sharded: bool
    """ZeRO 3: ``params`` are whole only while they are gathered."""

    def gradient(self, part: slice) -> Tensor:
        """The gradients of these elements of the bucket, which are held."""
        return self.grads[part.start - self.held.start : part.stop - self.held.start]

    @property
    def weights(self) -> Tensor:
        """[owned]: what the optimizer updates."""
        return self.kept if self.master is None else self.master

    def place(self, slot: Slot, given: Tensor) -> None:
        """Take the values of a parameter in, exact in the weights."""
        flat = given.reshape(-1)
        start, stop = max(slot.start, self.owned.start), min(slot.stop, self.owned.stop)
        if start < stop:
            part, ours = flat[start - slot.start : stop - slot.start], slice(start - self.owned.start, None)
            for target in (self.kept, self.master):
                if target is not None:
                    target[ours][: stop - start].copy_(part)
        if not self.sharded:
            self.params[slot.start : slot.stop].copy_(flat)


@dataclass(frozen=True, slots=True)
class Ownership:
    """Which data rank this is, and what it does not keep whole."""

    index: int
    ranks: int
    sharded: bool
    """Update the shard only (ZeRO 1)."""
    sharded_gradients: bool = False
    """Keep the shard of gradients only (ZeRO 2 with ``reduce: microbatch``); not where they are partial over
    tensor ranks, because only whole ones can be summed there."""
    sharded_parameters: bool = False
    """Keep the shard of parameters only (ZeRO 3)."""
    master: bool = True
    """False: narrow parameters are their own master, and gradients are summed in their dtype."""


def reserve(
    layout: FlatLayout, parameters: Mapping[str, nn.Parameter], who: Ownership, device: torch.device
) -> tuple[FlatBucket, ...]:
    """Memory for the buckets of ``layout`` on ``device``, zero; the trained ones, then the frozen ones."""
    trained = [_reserve(bucket, parameters, who, device, trainable=True) for bucket in layout.buckets]
    return (*trained, *(_reserve(bucket, parameters, who, device, trainable=False) for bucket in layout.frozen))


def allocate(
    layout: FlatLayout, parameters: Mapping[str, nn.Parameter], who: Ownership, device: torch.device
) -> tuple[FlatBucket, ...]:
    """Move ``parameters`` into flat buckets on ``device``, bucket by bucket.

    Afterwards ``parameter.data`` is a view in the bucket's dtype; the given values are kept exactly in
    the weights (master or parameter). Nothing is communicated.
    """
    buckets = reserve(layout, parameters, who, device)
    for flat in buckets:
        fill(flat)
    return buckets


def fill(flat: FlatBucket, placed: Collection[str] = ()) -> None:
    """Move the parameters of a bucket into it, except those whose values have been ``placed`` there."""
    for slot, parameter, view in zip(flat.bucket.slots, flat.parameters, flat.views, strict=True):
        if slot.name not in placed:
            flat.place(slot, parameter.detach())
            parameter.data = view


def _reserve(
    bucket: Bucket, parameters: Mapping[str, nn.Parameter], who: Ownership, device: torch.device, trainable: bool
) -> FlatBucket:
    dtype = getattr(torch, bucket.dtype)
    wide = torch.promote_types(dtype, torch.float32) if trainable and who.master else dtype
    shard, whole = bucket.shard(who.index, who.ranks), slice(0, bucket.elements)
    owned = shard if who.sharded else whole
    held = shard if who.sharded_gradients and not bucket.partial else whole

    def zeros(part: slice, dtype: torch.dtype) -> Tensor:
        return torch.zeros(part.stop - part.start, dtype=dtype, device=device)

    params = torch.empty(bucket.elements, dtype=dtype, device=device) if who.sharded_parameters else zeros(whole, dtype)
    kept = zeros(owned, dtype) if who.sharded_parameters else params[owned]
    # .data: gathering writes into the bucket, and autograd must not take that for a change of the parameter
    views = tuple(params[slot.start : slot.stop].view(slot.shape).data for slot in bucket.slots)
    if who.sharded_parameters:
        params.untyped_storage().resize_(0)
    grads = zeros(held if trainable else slice(0, 0), wide)
    master = zeros(owned, wide) if wide != dtype else None
    members = tuple(parameters[slot.name] for slot in bucket.slots)
    return FlatBucket(bucket, params, kept, grads, held, owned, shard, master, members, views, who.sharded_parameters)


def gradient_squared_norm(buckets: Sequence[FlatBucket], kernels: Kernels) -> Tensor:
    """Sum of squares of the gradients that this rank counts in its shards, as one fp64 scalar; padding is zero.

    Copies that other ranks count add nothing, unless they are not finite: then the sum is not a number.
    """
    parts = [
        (flat.gradient(part), counts)
        for flat in buckets
        for counts, parts in ((True, flat.bucket.counted(flat.shard)), (False, flat.bucket.uncounted(flat.shard)))
        for part in parts
    ]
    return sum_of_squares(parts, kernels)
