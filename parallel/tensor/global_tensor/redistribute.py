"""Gathers shards to full tensors and back, and sums over the tensor ranks (DTensor: redistribute).

                                              forward                   backward
    full            global -> plain           all-gather                own slice
    gather_global   global -> global, full    all-gather                reduce-scatter
    add             partial sums -> plain     all-reduce                identity
    add_rows        ... sharded along rows    reduce-scatter            all-gather

 ``full`` is for plain code: the gradient of the result is equal on all ranks, so each rank takes its own slice.
``gather_global`` is for further sharded computation: each rank has a partial gradient of the result, and the ranks sum
them.

An all-gather needs shards of equal size without common elements. In other cases every rank writes its shard into zeros,
each element only on the first of its holders, and an all-reduce sums them.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from engine.errors import PlanError
from engine.parallel.tensor.collectives import (
    COLUMN_INPUTS,
    ROW_OUTPUTS,
    copy_to,
    gather_to,
    gather_whole,
    reduce_from,
    scatter_from,
    slice_of,
    sum_parts,
)
from engine.parallel.tensor.global_tensor.context import PlainGradient
from engine.parallel.tensor.global_tensor.global_tensor import GlobalTensor
from engine.parallel.tensor.global_tensor.index_sets import Index, Sets, replaced
from engine.parallel.tensor.global_tensor.layout import Layout, reshaped
from engine.parallel.tensor.global_tensor.operands import on_device
from engine.parallel.tensor.tp_axis import TensorAxis

if TYPE_CHECKING:
    from engine.parallel.tensor.global_tensor.context import GlobalTensorContext


STATISTICS = "statistics"


class SequenceError(PlanError):
    """Error for a sequence length that the number of tensor ranks does not divide."""


def full(x: GlobalTensor, reason: str) -> Tensor:
    """Gathers the global tensor ``x`` into a plain tensor with the full shape, on every rank of its axis.

    ``reason``: name under which the gather is counted.
    """
    context = x.views
    context.note_gather(reason)
    if type(x.local) is GlobalTensor:
        joined = _gather_nested(x, x.local)
        return full(joined, reason) if type(joined) is GlobalTensor else joined
    dims = [dim for dim, index in enumerate(x.sets) if index is not None]
    partial = context.plain is PlainGradient.PARTIAL
    if not dims and partial:
        return x.local
    if not dims:
        # every rank has all elements and a complete gradient of the result, but gradients of ``x`` are partial and will
        # be summed: only one rank may pass the gradient on
        return gradient_to_owner(x.local, context.axis)
    index = x.sets[dims[0]]
    if len(dims) == 1 and index is not None and index.even:
        # collectives have no bool; one byte each has the same bits
        as_bytes = x.local.view(torch.uint8) if x.local.dtype is torch.bool else x.local
        gather = gather_to if partial else gather_whole
        joined = in_order(context, gather(as_bytes, context.axis, dims[0], ROW_OUTPUTS), dims[0], index)
        return joined.view(x.local.dtype) if joined.dtype != x.local.dtype else joined
    return _sum_of_owned(x)


def gather_global(x: GlobalTensor) -> GlobalTensor:
    """Gathers the global tensor ``x``: every rank of its axis stores all elements. Backward sums the gradient.

    Repeated calls share one gather.
    """
    context, local = x.views, x.local
    if type(local) is GlobalTensor:
        return GlobalTensor(_gather_nested(x, local), x.full, (None,) * x.ndim, context)
    dims = [dim for dim, index in enumerate(x.sets) if index is not None]
    index = x.sets[dims[0]] if len(dims) == 1 else None

    def gather(passed: Any) -> Tensor:
        if index is not None and index.even:
            joined = gather_to(local, context.axis, dims[0], COLUMN_INPUTS, passed=passed)
            return in_order(context, joined, dims[0], index)
        if context.plain is PlainGradient.PARTIAL:
            return _sum_of_owned(x)
        return copy_to(_sum_of_owned(x), context.axis, passed=passed)

    # entered once: a second gather of the same shard would send its bytes, and sum its gradient, twice
    joined = context.entered((id(local), x.sets), local, gather) if dims else local
    made = GlobalTensor(joined, x.full, (None,) * x.ndim, context)
    made.folded = x.folded
    return made


def _gather_nested(x: GlobalTensor, inner: GlobalTensor) -> Tensor:
    """Gathers ``x`` over its own axis only; returns a global tensor over the axis of its shard ``inner``.

    A dim that is sharded over both axes is gathered over both: the result is plain.
    """
    if any(own is not None and within is not None for own, within in zip(x.sets, inner.sets, strict=True)):
        whole = GlobalTensor(full(inner, ROW_OUTPUTS), x.full, x.sets, x.views)
        return gather_global(whole).local
    sizes = zip(inner.local.shape, x.full, x.sets, strict=True)
    shape = tuple(own if index is None else whole for own, whole, index in sizes)
    joined = gather_global(GlobalTensor(inner.local, shape, x.sets, x.views)).local
    return GlobalTensor(joined, x.full, inner.sets, inner.views)


def add(context: "GlobalTensorContext", local: Tensor, label: str) -> Tensor:
    """Returns the sum of ``local`` over the ranks of the context's axis; it may overwrite ``local``.

    ``label``: label of the traffic.
    """
    if type(local) is GlobalTensor:
        return GlobalTensor(add(context, local.local, label), local.full, local.sets, local.views)
    if context.plain is PlainGradient.PARTIAL:
        return sum_parts(local, context.axis, label)
    return reduce_from(local, context.axis, label)


def enter_stream(context: "GlobalTensorContext", x: Tensor) -> Tensor:
    """Shards a plain tensor [B, S, H] evenly along S over the ranks, for sequence parallelism.

    Returns ``x`` unchanged if it has other dims or the number of ranks does not divide S.
    """
    if context.axis.size == 1 or x.ndim != 3 or x.shape[-2] % context.axis.size:
        return x
    return cut_rows(context, slice_of(x, context.axis, x.ndim - 2, COLUMN_INPUTS), tuple(x.shape))


def stream_dim(x: GlobalTensor) -> int | None:
    """Returns the only sharded dim of ``x``, if its shards are equal blocks in rank order; otherwise None."""
    cut = [dim for dim, index in enumerate(x.sets) if index is not None]
    index = x.sets[cut[0]] if len(cut) == 1 else None
    return cut[0] if index is not None and index.blocks else None


def add_rows(
    context: "GlobalTensorContext", local: Tensor, folded: tuple[int, ...] | None = None, label: str = ROW_OUTPUTS
) -> GlobalTensor | Tensor:
    """Sums ``local``, the partial result of a product, over the ranks by an all-reduce to a plain tensor.

    With ``context.sequence``, a reduce-scatter of ``local`` [.., S, O] makes a global tensor sharded along S. The sum
    may overwrite ``local``. ``folded``: if several dims (.., S) were flattened into the first dim of ``local``, their
    sizes; the sequence of each batch entry is then sharded by itself.

    Raises:
        SequenceError: ``local`` has batch dims, and the number of ranks does not divide S.
    """
    # [B S, O] from flattened activations: shard S inside every batch entry, not B S as one dim, because the blocks
    # must be those of a [B, S, O] stream
    rows = folded if folded is not None and local.ndim == 2 else tuple(local.shape[:-1])
    ranks = context.axis.size
    if not context.sequence or ranks == 1 or not rows or (len(rows) == 1 and rows[0] % ranks):
        return add(context, local, label)
    if rows[-1] % ranks:
        raise SequenceError(
            f"a sequence of length {rows[-1]} does not divide among {ranks} tensor ranks, as sequence_parallel "
            f"requires; pad it to a multiple of {ranks}, or set parallel.sequence_parallel to false."
        )
    shape = tuple(local.shape)
    mine = scatter_from(local.view(*rows, shape[-1]), context.axis, -2, label, owned=True)
    made = cut_rows(context, mine, (*rows, shape[-1]))
    if len(shape) == len(rows) + 1:
        return made
    flat = context.find(("reshape", made.full, made.sets, shape), lambda: reshaped(Layout(made.full, made.sets), shape))
    unfolded = GlobalTensor(mine.view(-1, shape[-1]), flat.shape, flat.sets, context)
    unfolded.folded = rows
    return unfolded


def cut_rows(context: "GlobalTensorContext", local: Tensor, shape: tuple[int, ...]) -> GlobalTensor:
    """Wraps ``local``, this rank's shard, as a global tensor of full shape ``shape`` [.., S, O], sharded along S."""
    ranks = context.axis.size
    index = context.find(("blocks", shape[-2]), lambda: Index.even_blocks(shape[-2], ranks)) if ranks > 1 else None
    return GlobalTensor(local, shape, (*(None,) * (len(shape) - 2), index, None), context)


def in_order(context: "GlobalTensorContext", joined: Tensor, dim: int, index: Index) -> Tensor:
    """Sorts ``joined``, the shards of all ranks concatenated along ``dim``, into the order of the full tensor.

    ``index``: sharding of ``dim``, with each index on one rank.
    """
    if index.blocks:
        return joined
    return joined.index_select(dim, on_device(context, ("order", index, joined.device), index.order, joined.device))


def _sum_of_owned(x: GlobalTensor) -> Tensor:
    context, local, dtype = x.views, x.local, x.local.dtype
    if dtype is torch.bool:
        local = local.to(torch.uint8)
    # several holders of an element must not count it twice: zero it on all but the first, then sum over the ranks
    mask = context.find(("mask", x.sets), lambda: _owned_mask(x.sets, context.axis.index))
    if mask is not None:
        key = ("mask", x.sets, local.device)
        shaped = on_device(context, key, mask, local.device).view(_aligned(x.sets, mask.shape))
        local = torch.where(shaped, local, torch.zeros((), dtype=local.dtype, device=local.device))
    for dim, index in enumerate(x.sets):
        if index is not None:
            places = on_device(context, ("held", index, local.device), index.ranks[context.axis.index], local.device)
            shape = replaced(local.shape, dim, index.size)
            local = local.new_zeros(shape).index_copy(dim, places, local)
    return add(context, local, ROW_OUTPUTS).to(dtype)


def _owned_mask(sets: Sets, rank: int) -> Any:
    """Returns a mask over the sharded dims: True where ``rank`` is the element's first holder; None if it always is."""
    holders = [index.holders[index.ranks[rank]] for index in sets if index is not None]
    meets = holders[0]
    for mask in holders[1:]:
        meets = meets[..., None] & mask
    first = (meets & -meets) == 1 << rank  # the lowest set bit names the first holder
    return None if bool(np.all(first)) else first


def _aligned(sets: Sets, shape: tuple[int, ...]) -> tuple[int, ...]:
    sizes = iter(shape)
    return tuple(1 if index is None else next(sizes) for index in sets)


def gradient_to_owner(x: Tensor, axis: TensorAxis) -> Tensor:
    """Returns ``x``. In backward the first rank of the axis gets the gradient, all other ranks get zeros."""
    owner: Tensor = _Owner.apply(x, axis.index == 0)  # type: ignore[no-untyped-call]
    return owner


class _Owner(torch.autograd.Function):
    """Pass of a tensor that is full on all ranks: backward sends the gradient to the owner only, zeros to others."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, owner: bool) -> Tensor:
        ctx.owner = owner
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return (grad if ctx.owner else torch.zeros_like(grad)), None
