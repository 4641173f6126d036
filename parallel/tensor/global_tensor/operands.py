"""Shards of the operands that this rank needs for an operation; shapes are aligned at the last dims.

    global tensor                           its local shard, or a slice of the shard
    parameter                               a slice; the gradient is recorded as partial
    plain, with a gradient                  f: the gradient is summed over the ranks, once for all uses of the object
    plain, with a gradient, one dim         a slice: the gradient is gathered, half the bytes of a sum
        sharded in blocks
    plain, without a gradient               a slice

A parameter that plain code uses as well counts as plain.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from engine.parallel.tensor.collectives import COLUMN_INPUTS, copy_to, slice_of
from engine.parallel.tensor.global_tensor.context import PlainGradient
from engine.parallel.tensor.global_tensor.global_tensor import GlobalTensor
from engine.parallel.tensor.global_tensor.index_runs import as_slices, indices_of
from engine.parallel.tensor.global_tensor.index_sets import Index, Sets, positions
from engine.parallel.tensor.global_tensor.layout import Layout, Shape, join_layouts

if TYPE_CHECKING:
    from engine.parallel.tensor.global_tensor.context import GlobalTensorContext


def layout_of(tensor: Tensor) -> Layout:
    """Returns the full shape of ``tensor`` and the sharding of each dim. All dims of a plain tensor are unsharded."""
    if type(tensor) is GlobalTensor:
        return Layout(tensor.full, tensor.sets)
    return Layout(tensor.shape, (None,) * tensor.ndim)


class Joined(NamedTuple):
    """Result of :func:`broadcast_operands`: full shape, sharding, and the sharding that each operand needs."""

    shape: Shape
    sets: Sets
    operands: tuple[Sets, ...]


def broadcast_operands(context: "GlobalTensorContext", tensors: Sequence[Tensor], tail: int = 0) -> Joined:
    """Returns the full shape and sharding of the broadcast of ``tensors``, and the sharding that each operand needs.

    The last ``tail`` dims take no part in the broadcast: the result has size 1 in their place.

    Raises:
        NoRuleError: some element of the result needs elements of operands that are not all on one rank.
    """
    layouts = tuple(map(layout_of, tensors))
    return context.find(("join", tail, layouts), lambda: _join(layouts, tail))


def _join(layouts: Sequence[Layout], tail: int) -> Joined:
    made = join_layouts(layouts, tail)
    return Joined(*made, tuple(_wanted(layout.shape, made.sets, tail) for layout in layouts))


def _wanted(shape: Shape, sets: Sets, tail: int) -> Sets:
    """Returns ``sets`` for the dims of an operand; dims of size one are left to broadcasting."""
    offset = len(sets) - len(shape)
    return tuple(sets[offset + dim] if shape[dim] != 1 else None for dim in range(len(shape) - tail))


def part(context: "GlobalTensorContext", tensor: Tensor, sets: Sets) -> Tensor:
    """Returns this rank's shard of ``tensor`` for an operation with a result sharded as ``sets``.

    The dims of ``tensor`` and result are aligned from the last, as in a broadcast, and sharded equally; dims of size 1
    stay full.
    """
    return fit(context, tensor, _wanted(tensor.shape, sets, 0))


def fit(context: "GlobalTensorContext", tensor: Tensor, wanted: Sets) -> Tensor:
    """Returns this rank's shard of ``tensor``, plain or global, with dim i sharded as ``wanted[i]``."""
    if type(tensor) is not GlobalTensor:
        return cut_operand_as(context, tensor, wanted)
    local = tensor.local
    for dim, index in enumerate(wanted):
        if index is not tensor.sets[dim]:
            local = pick(context, local, dim, tensor.sets[dim], index)
    return local


def cut_operand_as(context: "GlobalTensorContext", plain: Tensor, wanted: Sets) -> Tensor:
    """Returns this rank's shard of the plain tensor ``plain``, with dim i sharded as ``wanted[i]``.

    If ``context.plain`` is EQUAL, partial gradients of ``plain`` are summed or gathered over the ranks: at the end of
    the step if ``plain`` is a parameter, outside ``context.equal``, with ``context.sums_once(plain)`` True; otherwise
    in backward.
    """
    if plain.requires_grad and context.plain is PlainGradient.EQUAL:
        # the gradient is complete only after a sum or a gather: once a step, or here
        if isinstance(plain, nn.Parameter) and plain not in context.equal and context.sums_once(plain):
            context.partial.add(plain)
        elif torch.is_grad_enabled() and context.axis.size > 1:
            cut = [dim for dim, index in enumerate(wanted) if index is not None]
            index = wanted[cut[0]] if len(cut) == 1 else None
            if index is not None and index.blocks:
                return slice_of(plain, context.axis, cut[0], COLUMN_INPUTS)
            plain = copied(context, plain)
    for dim, index in enumerate(wanted):
        if index is not None:
            plain = pick(context, plain, dim, None, index)
    return plain


def copied(context: "GlobalTensorContext", plain: Tensor) -> Tensor:
    """Returns a copy of ``plain`` for operations with shards; backward all-reduces its partial gradients.

    All operations of a block's forward share one copy.
    """
    return context.entered(id(plain), plain, lambda passed: copy_to(plain, context.axis, passed=passed))


def pick(context: "GlobalTensorContext", local: Tensor, dim: int, have: Index | None, want: Index | None) -> Tensor:
    """Slices ``local``, a shard with the sharding ``have`` along ``dim``, to the indices of this rank in ``want``.

    Raises:
        NoRuleError: some index of ``want`` of some rank is not on that rank; all ranks raise it.
    """
    axis = context.axis
    place = context.find(
        ("pick", have, want), lambda: [_place(have, want, rank) for rank in range(axis.size)][axis.index]
    )
    if place is None:
        return local
    if isinstance(place, slice):
        return local[(slice(None),) * dim + (place,)]
    if isinstance(place, list):
        return torch.cat([local[(slice(None),) * dim + (one,)] for one in place], dim)
    return local.index_select(dim, on_device(context, ("pick", have, want, local.device), place, local.device))


def on_device(context: "GlobalTensorContext", key: Any, places: Any, device: torch.device) -> Tensor:
    """Returns the indices ``places`` as a tensor on ``device``, cached in the context under ``key``."""
    return context.find(key, lambda: torch.as_tensor(places, device=device))


FEW_RUNS = 8
"""Largest number of runs that are sliced one by one, without a tensor of indices."""


def _place(have: Index | None, want: Index | None, rank: int) -> Any:
    """Returns None for all of a dim, a slice, the slices of a few long runs, or indices."""
    runs = positions(have, want, rank)
    if runs is None:
        return None
    if len(runs) < 2:
        return slice(*runs[0].tolist()) if len(runs) else slice(0, 0)
    first, step = int(runs[0, 0]), int(runs[1, 0] - runs[0, 0])
    if bool((np.diff(runs, axis=1) == 1).all()) and bool((np.diff(runs[:, 0]) == step).all()):
        return slice(first, int(runs[-1, 1]), step)
    return as_slices(runs) if len(runs) <= FEW_RUNS else indices_of(runs)
