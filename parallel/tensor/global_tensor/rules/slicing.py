"""Rules of functions that slice or concatenate tensors.

qkv.split(C, dim=2)      every rank has its shard of each third
x[:, -1]                 one position of a sharded sequence: the rank that stores it sends it to all ranks
cat([k_0, k_1], dim)     sharded along another dim: the sharding stays
                         sharded along dim: each rank concatenates its shard of every operand
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from engine.parallel.tensor.global_tensor.global_tensor import Function, GlobalTensor
from engine.parallel.tensor.global_tensor.index_sets import Index, NoRuleError, replaced
from engine.parallel.tensor.global_tensor.layout import (
    Layout,
    checked,
    concatenated,
    join_layouts,
    positive_dim,
    sliced,
)
from engine.parallel.tensor.global_tensor.operands import layout_of, part, pick
from engine.parallel.tensor.global_tensor.redistribute import full
from engine.parallel.tensor.global_tensor.rules.shapes import is_view_of, moved, unsqueeze

if TYPE_CHECKING:
    from engine.parallel.tensor.global_tensor.context import GlobalTensorContext


def cat(context: "GlobalTensorContext", func: Function, tensors: Any, dim: int = 0) -> Any:
    """Runs ``torch.cat``: joins ``tensors``, global or plain, along ``dim``. Each rank joins its shards."""
    tensors = [tensor for tensor in tensors if tensor.ndim > 1 or tensor.shape[0] > 0]  # torch skips empty ones
    dim = positive_dim(dim, tensors[0].ndim)
    layouts = [layout_of(tensor) for tensor in tensors]
    made = context.find(("cat", dim, *layouts), lambda: _joined(layouts, dim, context.axis.size))
    locals_ = [
        part(context, t, replaced(made.sets, dim, own.sets[dim])) for t, own in zip(tensors, layouts, strict=True)
    ]
    return GlobalTensor(torch.cat(locals_, dim), made.shape, made.sets, context)


def stack(context: "GlobalTensorContext", func: Function, tensors: Any, dim: int = 0) -> Any:
    """Runs ``torch.stack``: joins ``tensors``, global or plain, along a new dim. Each rank joins its shards."""
    dim = positive_dim(dim, tensors[0].ndim + 1)
    return cat(context, func, [tensor.unsqueeze(dim) for tensor in tensors], dim)


def _joined(layouts: list[Layout], dim: int, ranks: int) -> Layout:
    others = [Layout(replaced(own.shape, dim, 1), replaced(own.sets, dim, None)) for own in layouts]
    rest = join_layouts(others)
    index = concatenated([(own.shape[dim], own.sets[dim]) for own in layouts], ranks)
    return checked(replaced(rest.shape, dim, sum(own.shape[dim] for own in layouts)), replaced(rest.sets, dim, index))


def span(x: GlobalTensor, dim: int, taken: slice) -> GlobalTensor | Tensor:
    """Returns the slice ``taken`` of the global tensor ``x`` along ``dim``; each rank slices its shard.

    A slice of at most one index along a sharded dim becomes a plain tensor on all ranks.
    """
    context, index = x.views, x.sets[dim]
    bounds = taken.indices(x.full[dim])
    if bounds[2] < 1:
        raise NoRuleError("a slice on shards needs a positive step.")
    chosen = range(*bounds)
    shape = replaced(x.full, dim, len(chosen))
    if index is None:
        return moved(x, x.local[(slice(None),) * dim + (taken,)], shape, x.sets)
    if len(chosen) == x.full[dim]:
        return moved(x, x.local.view_as(x.local), shape, x.sets)
    if len(chosen) < 2:
        return _sent(x, dim, chosen)
    old, new = context.find(("span", index, bounds), lambda: sliced(index, np.arange(*bounds)))
    local = pick(context, x.local, dim, index, old)
    return moved(x, local, shape, replaced(x.sets, dim, new), copied=not is_view_of(local, x.local))


def _sent(x: GlobalTensor, dim: int, chosen: range) -> Tensor:
    context, index = x.views, x.sets[dim]
    assert index is not None
    held = [np.intersect1d(own, np.array(chosen, dtype=np.int64)) for own in index.ranks]
    local = pick(context, x.local, dim, index, Index(held, index.size))
    new = Index([np.arange(len(own)) for own in held], len(chosen))
    shape = replaced(x.full, dim, len(chosen))
    return full(GlobalTensor(local, shape, replaced(x.sets, dim, new), context), "select")


def narrow(context: "GlobalTensorContext", func: Function, input: Any, dim: int, start: int, length: int) -> Any:
    """Runs ``narrow`` of a global tensor: returns ``length`` indices of ``dim`` from ``start``."""
    dim = positive_dim(dim, input.ndim)
    first = int(start) + (input.full[dim] if start < 0 else 0)
    if not 0 <= first <= first + int(length) <= input.full[dim]:
        raise NoRuleError("the range is outside the dim; torch raises its own error.")
    return span(input, dim, slice(first, first + int(length)))


def select(context: "GlobalTensorContext", func: Function, input: Any, dim: int, index: int) -> Any:
    """Runs ``select`` of a global tensor: returns index ``index`` of ``dim``.

    If ``dim`` is sharded, all ranks get the elements as a plain tensor.
    """
    dim = positive_dim(dim, input.ndim)
    place = positive_dim(int(index), input.full[dim])
    if input.sets[dim] is not None:
        piece = span(input, dim, slice(place, place + 1))
        return piece.select(dim, 0)
    return _without(input, dim, input.local.select(dim, place))


def _without(x: GlobalTensor, dim: int, local: Tensor) -> GlobalTensor:
    return moved(x, local, x.full[:dim] + x.full[dim + 1 :], x.sets[:dim] + x.sets[dim + 1 :])


def unbind(context: "GlobalTensorContext", func: Function, input: Any, dim: int = 0) -> Any:
    """Runs ``unbind`` of a global tensor: returns a tuple with a global tensor for each index of ``dim``.

    Raises:
        NoRuleError: ``dim`` is sharded; the caller then gathers ``input``.
    """
    dim = positive_dim(dim, input.ndim)
    if input.sets[dim] is not None:
        raise NoRuleError("unbind needs a full dim, but the dim is sharded.")
    return tuple(_without(input, dim, local) for local in input.local.unbind(dim))


def split(context: "GlobalTensorContext", func: Function, *args: Any, **kwargs: Any) -> Any:
    """Runs ``split`` of a global tensor into slices; a size in the arguments is a size of the full tensor."""
    x, sizes, dim = _split_arguments(*args, **kwargs)
    length = x.full[dim]
    if (sizes < 1) if isinstance(sizes, int) else (sum(sizes) != length):
        raise NoRuleError("the sizes do not agree; torch raises its own error.")
    if isinstance(sizes, int):
        sizes = [min(sizes, length - start) for start in range(0, length, sizes)]
    return _cut_at(x, dim, np.cumsum([0, *sizes]).tolist())


def _split_arguments(*args: Any, dim: int = 0, **kwargs: Any) -> tuple[GlobalTensor, Any, int]:
    left = [*args, *(kwargs[key] for key in ("tensor", "self", "input") if key in kwargs)]
    x: GlobalTensor = left[0]
    dim = left[2] if len(left) > 2 else dim
    sizes = left[1] if len(left) > 1 else next(value for key, value in kwargs.items() if key.startswith("split_size"))
    return x, sizes, positive_dim(dim, x.ndim)


def _cut_at(x: GlobalTensor, dim: int, borders: list[int]) -> tuple[GlobalTensor | Tensor, ...]:
    return tuple(span(x, dim, slice(a, b)) for a, b in pairwise(borders))


def chunk(context: "GlobalTensorContext", func: Function, input: Any, chunks: int, dim: int = 0) -> Any:
    """Runs ``chunk`` of a global tensor: divides the full dim ``dim`` into at most ``chunks`` slices."""
    if chunks < 1:
        raise NoRuleError("chunk needs at least one slice; torch raises its own error.")
    size = -(-input.full[positive_dim(dim, input.ndim)] // chunks)
    return split(context, func, input, size, dim)


def tensor_split(
    context: "GlobalTensorContext", func: Function, input: Any, indices_or_sections: Any, dim: int = 0
) -> Any:
    """Runs ``tensor_split`` of a global tensor into a number of slices, or at the given indices of the full dim.

    Raises:
        NoRuleError: ``indices_or_sections`` is a tensor, or its indices are unsorted or outside the dim.
    """
    dim = positive_dim(dim, input.ndim)
    length = input.full[dim]
    if isinstance(indices_or_sections, Tensor):
        raise NoRuleError("tensor_split has no rule for borders in a tensor.")
    if isinstance(indices_or_sections, int):
        small, more = divmod(length, indices_or_sections)
        return split(context, func, input, [small + (n < more) for n in range(indices_or_sections)], dim)
    borders = [0, *indices_or_sections, length]
    if borders != sorted(borders):
        raise NoRuleError("tensor_split has a rule for ascending borders only.")
    return _cut_at(input, dim, borders)


def getitem(context: "GlobalTensorContext", func: Function, input: Any, index: Any) -> Any:
    """Runs ``x[index]`` of a global tensor; a single index of a sharded dim makes a plain result.

    ``index`` may have integers, slices, None, an ellipsis, and one tensor of positions along an unsharded dim.

    Raises:
        NoRuleError: ``index`` has other entries, or ``input`` is a plain tensor.
    """
    if type(input) is not GlobalTensor:
        raise NoRuleError("a global tensor cannot index a plain tensor on shards.")
    index = index if isinstance(index, tuple) else (index,)
    if sum(isinstance(item, Tensor | list | np.ndarray) for item in index) > 1:
        raise NoRuleError("indexing has a rule for one tensor of positions, not for several.")
    items = list(_complete(index, input.ndim))
    out: Any = input
    dim = 0
    for place, item in enumerate(items):
        if type(out) is not GlobalTensor:  # span has sent a single element to all ranks
            return out[(slice(None),) * dim + tuple(items[place:])]
        out, dim = _index_one(context, out, dim, item)
    return out


def _complete(index: tuple[Any, ...], dims: int) -> Iterator[Any]:
    """Yields the entries of the index, with full slices in place of the ellipsis."""
    used = sum(item is not None and item is not Ellipsis for item in index)
    if any(isinstance(item, bool) for item in index) or used > dims:
        raise NoRuleError("indexing has no rule for booleans or for more entries than dims.")
    for item in index:
        if item is Ellipsis:
            yield from (slice(None),) * (dims - used)
        else:
            yield item


def _index_one(context: "GlobalTensorContext", x: GlobalTensor, dim: int, item: Any) -> tuple[Any, int]:
    if item is None:
        return unsqueeze(context, unsqueeze, x, dim), dim + 1
    if isinstance(item, slice):
        whole = item.indices(x.full[dim]) == (0, x.full[dim], 1)
        return (x if whole else span(x, dim, item)), dim + 1
    if isinstance(item, int):
        return select(context, select, x, dim, item), dim
    if isinstance(item, list | np.ndarray):
        item = torch.as_tensor(item, device=x.device)
    return _taken(x, dim, item), dim + item.ndim


def index_select(context: "GlobalTensorContext", func: Function, input: Any, dim: int, index: Any) -> Any:
    """Runs ``index_select`` of a global tensor: each rank takes the positions ``index`` of ``dim`` from its shard.

    Raises:
        NoRuleError: ``dim`` is sharded, ``input`` is a plain tensor, or ``index`` does not have one dim.
    """
    if type(input) is not GlobalTensor or (isinstance(index, Tensor) and index.ndim != 1):
        raise NoRuleError("a global tensor cannot index a plain tensor on shards.")
    return _taken(input, positive_dim(dim, input.ndim), index)


def _taken(x: GlobalTensor, dim: int, places: Any) -> GlobalTensor:
    integers = type(places) is Tensor and places.dtype in (torch.int64, torch.int32)
    if not integers or x.sets[dim] is not None:
        raise NoRuleError("indexing with a tensor needs integer positions along a full dim.")
    local = x.local[(slice(None),) * dim + (places,)]
    full = (*x.full[:dim], *places.shape, *x.full[dim + 1 :])
    return GlobalTensor(local, full, (*x.sets[:dim], *(None,) * places.ndim, *x.sets[dim + 1 :]), x.views)
