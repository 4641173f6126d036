"""Tensors side by side: cat, stack.

cat([k_0, k_1], dim)   cut along another dim: the same in each
                       cut along dim: each rank joins what it holds of every piece
"""

from typing import TYPE_CHECKING, Any

import torch

from engine.parallel.tensor.views.index import Index, Sets
from engine.parallel.tensor.views.layout import Layout, checked, concatenated, counted, join_layouts
from engine.parallel.tensor.views.operands import layout_of, part
from engine.parallel.tensor.views.view import Function, View

if TYPE_CHECKING:
    from engine.parallel.tensor.views.context import Views


def cat(views: "Views", func: Function, tensors: Any, dim: int = 0, **named: Any) -> Any:
    """One behind the other along ``dim``."""
    dim = named.get("axis", dim)
    tensors = [tensor for tensor in tensors if tensor.ndim > 1 or tensor.shape[0] > 0]  # torch skips empty ones
    dim = counted(dim, tensors[0].ndim)
    layouts = [layout_of(tensor) for tensor in tensors]
    made = views.find(("cat", dim, *layouts), lambda: _joined(layouts, dim, views.axis.size))
    locals_ = [part(views, t, _along(made.sets, dim, own.sets[dim])) for t, own in zip(tensors, layouts, strict=True)]
    return View(torch.cat(locals_, dim), made.shape, made.sets, views)


def stack(views: "Views", func: Function, tensors: Any, dim: int = 0) -> Any:
    """One behind the other along a new dim."""
    dim = counted(dim, tensors[0].ndim + 1)
    return cat(views, func, [tensor.unsqueeze(dim) for tensor in tensors], dim)


def _joined(layouts: list[Layout], dim: int, ranks: int) -> Layout:
    others = [Layout(_with(own.shape, dim, 1), _along(own.sets, dim, None)) for own in layouts]
    rest = join_layouts(others)
    index = concatenated([(own.shape[dim], own.sets[dim]) for own in layouts], ranks)
    return checked(_with(rest.shape, dim, sum(own.shape[dim] for own in layouts)), _along(rest.sets, dim, index))


def _with(shape: tuple[int, ...], dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], size, *shape[dim + 1 :])


def _along(sets: Sets, dim: int, index: Index | None) -> Sets:
    return (*sets[:dim], index, *sets[dim + 1 :])
