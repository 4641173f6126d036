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


def full(view: GlobalTensor, reason: str) -> Tensor:
    """Everything everywhere, as a plain tensor; ``reason`` is noted."""
    views = view.views
    views.note_gather(reason)
    dims = [dim for dim, index in enumerate(view.sets) if index is not None]
    if not dims:
        owner: Tensor = _Owner.apply(view.local, views.axis.index == 0)  # type: ignore[no-untyped-call]
        return owner
    index = view.sets[dims[0]]
    if len(dims) == 1 and index is not None and index.even:
        as_bytes = view.local.view(torch.uint8) if view.local.dtype is torch.bool else view.local
        joined = in_order(views, gather_whole(as_bytes, views.axis, dims[0]), dims[0], index)
        return joined.view(view.local.dtype) if joined.dtype != view.local.dtype else joined
    return _sum_of_owned(view)


def gather_global(view: GlobalTensor, owned: bool = False) -> GlobalTensor:
    """The same with all on every rank; gradients are summed over the ranks. Once for all uses of the part."""
    views, local = view.views, view.local
    dims = [dim for dim, index in enumerate(view.sets) if index is not None]
    index = view.sets[dims[0]] if len(dims) == 1 else None

    def gather(passed: Any) -> Tensor:
        if index is not None and index.even:
            joined = gather_to(local, views.axis, dims[0], COLUMN_INPUTS, passed=passed)
            return in_order(views, joined, dims[0], index)
        return copy_to(_sum_of_owned(view), views.axis, passed=passed)

    joined = views.entered((id(local), view.sets), local, gather) if dims else local
    made = GlobalTensor(joined, view.full, (None,) * view.ndim, views)
    made.folded = view.folded
    return made


def add(views: "GlobalTensorContext", local: Tensor, label: str) -> Tensor:
    """The sum over the ranks of their ``local``, which nobody else reads."""
    return reduce_from(local, views.axis, label)


def enter_stream(views: "GlobalTensorContext", x: Tensor) -> Tensor:
    """A plain tensor [B, S, H] as a view cut along S, as ``add_rows`` gives it; any other tensor as it is."""
    if views.axis.size == 1 or x.ndim != 3 or x.shape[-2] % views.axis.size:
        return x
    return cut_rows(views, slice_of(x, views.axis, x.ndim - 2, COLUMN_INPUTS), tuple(x.shape))


def stream_dim(view: GlobalTensor) -> int | None:
    """The one dim that is cut, into equal parts in rank order; None if it is another cut."""
    cut = [dim for dim, index in enumerate(view.sets) if index is not None]
    index = view.sets[cut[0]] if len(cut) == 1 else None
    return cut[0] if index is not None and index.blocks else None


def add_rows(
    views: "GlobalTensorContext", local: Tensor, folded: tuple[int, ...] | None = None, label: str = ROW_OUTPUTS
) -> GlobalTensor | Tensor:
    """The sum over the ranks of what each has of a product; see ``Views.sequence``.

    ``folded``: the dims that the first of two dims was made of.

    Raises:
        SequenceError: the ranks cannot share the rows equally.
    """
    rows = folded if folded is not None and local.ndim == 2 else tuple(local.shape[:-1])
    ranks = views.axis.size
    if not views.sequence or ranks == 1 or not rows or (len(rows) == 1 and rows[0] % ranks):
        return add(views, local, label)
    if rows[-1] % ranks:
        raise SequenceError(
            f"a sequence of {rows[-1]} does not divide among {ranks} tensor ranks, as sequence_parallel wants; pad "
            f"it to a multiple of {ranks}, or switch sequence_parallel off."
        )
    shape = tuple(local.shape)
    mine = scatter_from(local.view(*rows, shape[-1]), views.axis, -2, label, owned=True)
    made = cut_rows(views, mine, (*rows, shape[-1]))
    if len(shape) == len(rows) + 1:
        return made
    flat = views.find(("reshape", made.full, made.sets, shape), lambda: reshaped(Layout(made.full, made.sets), shape))
    unfolded = GlobalTensor(mine.view(-1, shape[-1]), flat.shape, flat.sets, views)
    unfolded.folded = rows
    return unfolded


def scatter_stream(views: "GlobalTensorContext", plain: Tensor) -> GlobalTensor:
    """A stream that is plain, cut along its rows from here on, as :func:`add_rows` leaves it.

    Layers that are called more than once so never see both, a plain stream and a cut one: of the gradient of their
    parameters, one would be whole and the other a part.

    Raises:
        EngineError: the ranks cannot share the rows equally.
    """
    return cut_rows(views, slice_of(plain, views.axis, -2, COLUMN_INPUTS), tuple(plain.shape))


def cut_rows(views: "GlobalTensorContext", local: Tensor, shape: tuple[int, ...]) -> GlobalTensor:
    """This rank's rows of a tensor of ``shape`` [.., S, O], as the view that they are of it."""
    ranks = views.axis.size
    index = views.find(("blocks", shape[-2]), lambda: Index.even_blocks(shape[-2], ranks)) if ranks > 1 else None
    return GlobalTensor(local, shape, (*(None,) * (len(shape) - 2), index, None), views)


def in_order(views: "GlobalTensorContext", joined: Tensor, dim: int, index: Index) -> Tensor:
    """Joined parts of all ranks, every index at its place."""
    if index.blocks:
        return joined
    return joined.index_select(dim, on_device(views, ("order", index, joined.device), index.order, joined.device))


def _sum_of_owned(view: GlobalTensor) -> Tensor:
    views, local, dtype = view.views, view.local, view.local.dtype
    if dtype is torch.bool:
        local = local.to(torch.uint8)
    mask = views.find(("mask", view.sets), lambda: _owned_mask(view.sets, views.axis.index))
    if mask is not None:
        key = ("mask", view.sets, local.device)
        shaped = on_device(views, key, mask, local.device).view(_aligned(view.sets, mask.shape))
        local = torch.where(shaped, local, torch.zeros((), dtype=local.dtype, device=local.device))
    for dim, index in enumerate(view.sets):
        if index is not None:
            places = on_device(views, ("held", index, local.device), index.ranks[views.axis.index], local.device)
            shape = (*local.shape[:dim], index.size, *local.shape[dim + 1 :])
            local = local.new_zeros(shape).index_copy(dim, places, local)
    return reduce_from(local, views.axis, ROW_OUTPUTS).to(dtype)


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
