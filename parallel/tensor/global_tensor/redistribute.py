"""From parts to the whole.

                                      forward                        backward
    full    View -> plain             all-gather                     own slice
    whole   View -> View, uncut       all-gather                     reduce-scatter
    add     parts of a sum -> plain   all-reduce                     identity
            ... cut along the rows    reduce-scatter                 all-gather
    cut     plain -> View             own slice of the rows          all-gather

Where the ranks do not hold equally many, or some elements lie on several ranks, parts are laid into zeros, each element
by the first of its holders, and summed.
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
)
from engine.parallel.tensor.global_tensor.global_tensor import GlobalTensor
from engine.parallel.tensor.global_tensor.index_sets import Index, Sets
from engine.parallel.tensor.global_tensor.layout import Layout, reshaped
from engine.parallel.tensor.global_tensor.operands import on_device

if TYPE_CHECKING:
    from engine.parallel.tensor.global_tensor.context import GlobalTensorContext


STATISTICS = "statistics"


class SequenceError(PlanError):
    """A sequence that the tensor ranks cannot share."""


def full(x: GlobalTensor, reason: str) -> Tensor:
    """Everything everywhere, as a plain tensor; ``reason`` is noted."""
    context = x.views
    context.note_gather(reason)
    dims = [dim for dim, index in enumerate(x.sets) if index is not None]
    if not dims:
        owner: Tensor = _Owner.apply(x.local, context.axis.index == 0)  # type: ignore[no-untyped-call]
        return owner
    index = x.sets[dims[0]]
    if len(dims) == 1 and index is not None and index.even:
        as_bytes = x.local.view(torch.uint8) if x.local.dtype is torch.bool else x.local
        joined = in_order(context, gather_whole(as_bytes, context.axis, dims[0]), dims[0], index)
        return joined.view(x.local.dtype) if joined.dtype != x.local.dtype else joined
    return _sum_of_owned(x)


def gather_global(x: GlobalTensor, owned: bool = False) -> GlobalTensor:
    """The same with all on every rank; gradients are summed over the ranks. Once for all uses of the part."""
    context, local = x.views, x.local
    dims = [dim for dim, index in enumerate(x.sets) if index is not None]
    index = x.sets[dims[0]] if len(dims) == 1 else None

    def gather(passed: Any) -> Tensor:
        if index is not None and index.even:
            joined = gather_to(local, context.axis, dims[0], COLUMN_INPUTS, passed=passed)
            return in_order(context, joined, dims[0], index)
        return copy_to(_sum_of_owned(x), context.axis, passed=passed)

    joined = context.entered((id(local), x.sets), local, gather) if dims else local
    made = GlobalTensor(joined, x.full, (None,) * x.ndim, context)
    made.folded = x.folded
    return made


def add(context: "GlobalTensorContext", local: Tensor, label: str) -> Tensor:
    """The sum over the ranks of their ``local``, which nobody else reads."""
    return reduce_from(local, context.axis, label)


def enter_stream(context: "GlobalTensorContext", x: Tensor) -> Tensor:
    """A plain tensor [B, S, H] as a global tensor sharded along S, as after ``add_rows``; other tensors unchanged."""
    if context.axis.size == 1 or x.ndim != 3 or x.shape[-2] % context.axis.size:
        return x
    return cut_rows(context, slice_of(x, context.axis, x.ndim - 2, COLUMN_INPUTS), tuple(x.shape))


def stream_dim(x: GlobalTensor) -> int | None:
    """The one dim that is cut, into equal parts in rank order; None if it is another cut."""
    cut = [dim for dim, index in enumerate(x.sets) if index is not None]
    index = x.sets[cut[0]] if len(cut) == 1 else None
    return cut[0] if index is not None and index.blocks else None


def add_rows(
    context: "GlobalTensorContext", local: Tensor, folded: tuple[int, ...] | None = None, label: str = ROW_OUTPUTS
) -> GlobalTensor | Tensor:
    """The sum over the ranks of what each has of a product; see ``Views.sequence``.

    ``folded``: the dims that the first of two dims was made of.

    Raises:
        SequenceError: the ranks cannot share the rows equally.
    """
    rows = folded if folded is not None and local.ndim == 2 else tuple(local.shape[:-1])
    ranks = context.axis.size
    if not context.sequence or ranks == 1 or not rows or (len(rows) == 1 and rows[0] % ranks):
        return add(context, local, label)
    if rows[-1] % ranks:
        raise SequenceError(
            f"a sequence of {rows[-1]} does not divide among {ranks} tensor ranks, as sequence_parallel wants; pad "
            f"it to a multiple of {ranks}, or switch sequence_parallel off."
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


def scatter_stream(context: "GlobalTensorContext", plain: Tensor) -> GlobalTensor:
    """A stream that is plain, cut along its rows from here on, as :func:`add_rows` leaves it.

    Layers that are called more than once so never see both, a plain stream and a cut one: of the gradient of their
    parameters, one would be whole and the other a part.

    Raises:
        EngineError: the ranks cannot share the rows equally.
    """
    return cut_rows(context, slice_of(plain, context.axis, -2, COLUMN_INPUTS), tuple(plain.shape))


def cut_rows(context: "GlobalTensorContext", local: Tensor, shape: tuple[int, ...]) -> GlobalTensor:
    """This rank's rows of a tensor of ``shape`` [.., S, O], as the view that they are of it."""
    ranks = context.axis.size
    index = context.find(("blocks", shape[-2]), lambda: Index.even_blocks(shape[-2], ranks)) if ranks > 1 else None
    return GlobalTensor(local, shape, (*(None,) * (len(shape) - 2), index, None), context)


def in_order(context: "GlobalTensorContext", joined: Tensor, dim: int, index: Index) -> Tensor:
    """Joined parts of all ranks, every index at its place."""
    if index.blocks:
        return joined
    return joined.index_select(dim, on_device(context, ("order", index, joined.device), index.order, joined.device))


def _sum_of_owned(x: GlobalTensor) -> Tensor:
    context, local, dtype = x.views, x.local, x.local.dtype
    if dtype is torch.bool:
        local = local.to(torch.uint8)
    mask = context.find(("mask", x.sets), lambda: _owned_mask(x.sets, context.axis.index))
    if mask is not None:
        key = ("mask", x.sets, local.device)
        shaped = on_device(context, key, mask, local.device).view(_aligned(x.sets, mask.shape))
        local = torch.where(shaped, local, torch.zeros((), dtype=local.dtype, device=local.device))
    for dim, index in enumerate(x.sets):
        if index is not None:
            places = on_device(context, ("held", index, local.device), index.ranks[context.axis.index], local.device)
            shape = (*local.shape[:dim], index.size, *local.shape[dim + 1 :])
            local = local.new_zeros(shape).index_copy(dim, places, local)
    return reduce_from(local, context.axis, ROW_OUTPUTS).to(dtype)


def _owned_mask(sets: Sets, rank: int) -> Any:
    """Over the cut dims of a part: whether this rank is the first to hold an element; None if it always is."""
    holders = [index.holders[index.ranks[rank]] for index in sets if index is not None]
    meets = holders[0]
    for mask in holders[1:]:
        meets = meets[..., None] & mask
    first = (meets & -meets) == 1 << rank
    return None if bool(np.all(first)) else first


def _aligned(sets: Sets, shape: tuple[int, ...]) -> tuple[int, ...]:
    sizes = iter(shape)
    return tuple(1 if index is None else next(sizes) for index in sets)


class _Owner(torch.autograd.Function):
    """A tensor of which all ranks hold all, each with a part of the gradient: one of them takes it."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, owner: bool) -> Tensor:
        ctx.owner = owner
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return (grad if ctx.owner else torch.zeros_like(grad)), None
