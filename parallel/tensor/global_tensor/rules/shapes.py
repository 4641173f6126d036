"""Rules of functions that change the shape and not the elements.

``copied`` marks results without shared memory: plain code may write into a view and expect the tensor to change.
"""

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engine.parallel.model.operand_casts import is_watched
from engine.parallel.tensor.global_tensor.global_tensor import Function, GlobalTensor
from engine.parallel.tensor.global_tensor.index_sets import NoRuleError, Sets
from engine.parallel.tensor.global_tensor.layout import (
    Layout,
    Shape,
    infer_size,
    local_shape,
    positive_dim,
    repeated,
    reshaped,
)

if TYPE_CHECKING:
    from engine.parallel.tensor.global_tensor.context import GlobalTensorContext


def moved(x: GlobalTensor, local: Tensor, full: Shape, sets: Sets, copied: bool = False) -> GlobalTensor:
    """Wraps ``local``, a view or copy of this rank's shard of ``x``, as a global tensor.

    ``full``: full shape; ``sets``: sharding of each dim; ``copied``: True if ``local`` does not share memory with the
    shard.
    """
    made = GlobalTensor(local, full, sets, x.views)
    made.copied = x.copied or copied
    return made


def given_sizes(sizes: tuple[Any, ...], **named: Any) -> tuple[int, ...]:
    """Returns sizes or dims as a tuple of ints, from one of the keywords ``named`` or from ``sizes``.

    ``sizes``: separate numbers or one sequence.
    """
    found: Any = next((value for value in named.values() if value is not None), sizes)
    if len(sizes) == 1 and isinstance(sizes[0], tuple | list):
        found = sizes[0]
    return tuple(int(size) for size in found)


def is_view_of(piece: Tensor, local: Tensor) -> bool:
    """Returns True if ``piece``, a result of an operation on ``local``, shares the memory of ``local``."""
    return piece is local or piece._is_view()


def reshape(
    context: "GlobalTensorContext", func: Function, input: Any, *sizes: Any, shape: Any = None, size: Any = None
) -> Any:
    """Runs ``view`` or ``reshape`` of a global tensor to a new full shape.

    Raises:
        NoRuleError: ``view`` gets a dtype, or a rank's elements do not form a shard of the new shape.
    """
    if sizes and isinstance(sizes[0], torch.dtype):
        raise NoRuleError("view as another dtype has no rule.")
    return to_shape(input, infer_size(input.numel(), given_sizes(sizes, shape=shape, size=size)))


def reshape_as(context: "GlobalTensorContext", func: Function, input: Any, other: Tensor) -> Any:
    """Runs ``view_as`` or ``reshape_as``: reshapes a global tensor to the full shape of ``other``."""
    if type(input) is not GlobalTensor:
        return input.reshape(other.shape)
    return to_shape(input, tuple(other.shape))


def to_shape(x: GlobalTensor, shape: Shape) -> GlobalTensor:
    """Returns ``x`` reshaped to the full shape ``shape``, as a view if possible."""
    context = x.views
    if shape == x.full:
        return moved(x, x.local.view_as(x.local), x.full, x.sets)
    layout = Layout(x.full, x.sets)
    made, local = context.find(("reshape", layout, shape), lambda: _reshape_plan(layout, shape, context.axis.index))
    try:
        if is_watched():  # strides differ between ranks, but a trace has the operations of one
            part = x.local.reshape(local)
            out = moved(x, part, made.shape, made.sets, copied=not is_view_of(part, x.local))
        else:
            out = moved(x, x.local.view(local), made.shape, made.sets)
    except (RuntimeError, ValueError):  # real tensors, shapes: the shard's strides allow no view
        out = moved(x, x.local.reshape(local), made.shape, made.sets, copied=True)
    if len(shape) == 2 and x.ndim > 2 and shape[1] == x.full[-1]:
        out.folded = tuple(x.full[:-1])
    return out


def _reshape_plan(layout: Layout, shape: Shape, rank: int) -> tuple[Layout, Shape]:
    made = reshaped(layout, shape)
    return made, local_shape(made, rank)


def permute(context: "GlobalTensorContext", func: Function, input: Any, *sizes: Any, dims: Any = None) -> Any:
    """Runs ``permute`` of a global tensor: reorders its dims."""
    return ordered(input, tuple(positive_dim(dim, input.ndim) for dim in given_sizes(sizes, dims=dims)))


def ordered(x: GlobalTensor, dims: tuple[int, ...]) -> GlobalTensor:
    """Returns ``x`` with the dims in the order ``dims``."""
    full, sets = tuple(x.full[dim] for dim in dims), tuple(x.sets[dim] for dim in dims)
    return moved(x, x.local.permute(dims), full, sets)


def transpose(
    context: "GlobalTensorContext",
    func: Function,
    input: Any,
    dim0: int | None = None,
    dim1: int | None = None,
    **names: int,
) -> Any:
    """Runs ``transpose`` or ``swapaxes`` of a global tensor. ``names``: keywords ``axis0`` and ``axis1``."""
    a, b = (dim0, dim1) if dim0 is not None and dim1 is not None else (names["axis0"], names["axis1"])
    dims = list(range(input.ndim))
    dims[a], dims[b] = dims[b], dims[a]
    return ordered(input, tuple(dims))


def last_two(context: "GlobalTensorContext", func: Function, input: Any) -> Any:
    """Runs ``t`` or ``mT`` of a global tensor: swaps its last two dims."""
    return input if input.ndim < 2 else transpose(context, func, input, -1, -2)


def reversed_dims(context: "GlobalTensorContext", func: Function, input: Any) -> Any:
    """Runs ``T`` of a global tensor: reverses the order of its dims."""
    return ordered(input, tuple(reversed(range(input.ndim))))


def movedim(context: "GlobalTensorContext", func: Function, input: Any, source: Any, destination: Any) -> Any:
    """Runs ``movedim`` of a global tensor: moves the dims ``source`` to the positions ``destination``."""
    ends = [
        (source,) if isinstance(source, int) else source,
        (destination,) if isinstance(destination, int) else destination,
    ]
    sources, places = ([positive_dim(dim, input.ndim) for dim in end] for end in ends)
    left = [dim for dim in range(input.ndim) if dim not in sources]
    by_place = dict(zip(places, sources, strict=True))
    return ordered(input, tuple(by_place[dim] if dim in by_place else left.pop(0) for dim in range(input.ndim)))


def flatten(context: "GlobalTensorContext", func: Function, input: Any, start_dim: int = 0, end_dim: int = -1) -> Any:
    """Runs ``flatten`` of a global tensor: joins the dims from ``start_dim`` to ``end_dim``."""
    start, end, full = positive_dim(start_dim, input.ndim), positive_dim(end_dim, input.ndim), tuple(input.full)
    return to_shape(input, (*full[:start], math.prod(full[start : end + 1]), *full[end + 1 :]))


def unflatten(context: "GlobalTensorContext", func: Function, input: Any, dim: int, sizes: Any) -> Any:
    """Runs ``unflatten`` of a global tensor: splits ``dim`` into the full sizes ``sizes``."""
    dim, full = positive_dim(dim, input.ndim), tuple(input.full)
    return to_shape(input, (*full[:dim], *infer_size(full[dim], given_sizes((tuple(sizes),))), *full[dim + 1 :]))


def unsqueeze(context: "GlobalTensorContext", func: Function, input: Any, dim: int) -> Any:
    """Runs ``unsqueeze`` of a global tensor: adds a dim of size one."""
    dim = positive_dim(dim, input.ndim + 1)
    full, sets = input.full, input.sets
    return moved(input, input.local.unsqueeze(dim), (*full[:dim], 1, *full[dim:]), (*sets[:dim], None, *sets[dim:]))


def squeeze(context: "GlobalTensorContext", func: Function, input: Any, dim: Any = None) -> Any:
    """Runs ``squeeze`` of a global tensor: removes dims of full size one, all of them or only ``dim``."""
    dims = (
        range(input.ndim)
        if dim is None
        else [positive_dim(d, input.ndim) for d in ((dim,) if isinstance(dim, int) else dim)]
    )
    gone = [d for d in dims if input.full[d] == 1]
    kept = [d for d in range(input.ndim) if d not in gone]
    local = input.local.squeeze(tuple(gone)) if gone else input.local.view_as(input.local)
    return moved(input, local, tuple(input.full[d] for d in kept), tuple(input.sets[d] for d in kept))


def expand(context: "GlobalTensorContext", func: Function, input: Any, *sizes: Any, size: Any = None) -> Any:
    """Runs ``expand`` of a global tensor to the given full sizes."""
    return to_expanded(input, given_sizes(sizes, size=size))


def expand_as(context: "GlobalTensorContext", func: Function, input: Any, other: Tensor) -> Any:
    """Runs ``expand_as``: expands a global tensor to the full shape of ``other``."""
    return to_expanded(input, tuple(other.shape)) if type(input) is GlobalTensor else input.expand(other.shape)


def to_expanded(x: GlobalTensor, sizes: Shape) -> GlobalTensor:
    """Returns ``x`` expanded to the full sizes ``sizes``; -1 leaves a dim unchanged."""
    new = len(sizes) - x.ndim
    kept = zip(sizes[new:], x.full, strict=True) if new >= 0 else ()
    if new < 0 or -1 in sizes[:new] or any(old not in (1, size) and size != -1 for size, old in kept):
        raise NoRuleError("the sizes do not agree; torch raises its own error.")
    full = tuple(x.full[dim - new] if size == -1 else size for dim, size in enumerate(sizes))
    sets = (*(None,) * new, *x.sets)
    return moved(x, x.local.expand(local_shape(Layout(full, sets), x.views.axis.index)), full, sets)


def repeat(context: "GlobalTensorContext", func: Function, input: Any, *sizes: Any, repeats: Any = None) -> Any:
    """Runs ``repeat`` of a global tensor: repeats each dim the given number of times, as a b a b."""
    times = given_sizes(sizes, repeats=repeats)
    new = len(times) - input.ndim
    full = (1,) * new + tuple(input.full)
    sets = tuple(
        index if index is None or times[dim] == 1 else repeated(index, times[dim], interleaved=False)
        for dim, index in enumerate((*(None,) * new, *input.sets))
    )
    return GlobalTensor(input.local.repeat(times), tuple(map(int.__mul__, full, times)), sets, context)


def tile(context: "GlobalTensorContext", func: Function, input: Any, *sizes: Any, dims: Any = None) -> Any:
    """Runs ``tile`` of a global tensor, with a number of repeats in ``sizes`` or ``dims`` for each of the last dims."""
    times = given_sizes(sizes, dims=dims)
    return repeat(context, func, input, repeats=(*(1,) * (input.ndim - len(times)), *times))


def repeat_interleave(
    context: "GlobalTensorContext", func: Function, input: Any, repeats: Any, dim: int | None = None, **named: Any
) -> Any:
    """Runs ``repeat_interleave`` of a global tensor: repeats each index of ``dim`` ``repeats`` times in a row.

    Raises:
        NoRuleError: ``dim`` is None or ``repeats`` is a tensor.
    """
    if dim is None or not isinstance(repeats, int):
        raise NoRuleError("repeat_interleave has a rule for a dim and one number of times only.")
    dim = positive_dim(dim, input.ndim)
    full, sets, index = list(input.full), list(input.sets), input.sets[dim]
    full[dim] *= repeats
    if index is not None:
        sets[dim] = context.find(("repeat", index, repeats), lambda: repeated(index, repeats, interleaved=True))
    return GlobalTensor(input.local.repeat_interleave(repeats, dim), tuple(full), tuple(sets), context)
