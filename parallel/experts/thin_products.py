"""Products with matrices of equal rows, or columns, that share memory: none of these matrices is written out."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_ATEN = torch.ops.aten


class ThinProducts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Torch dispatch mode that computes products with expanded matrices (stride 0) without a copy in full size."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = _PRODUCTS.get(func)
        found = made(*args, **(kwargs or {})) if made is not None else None
        return func(*args, **(kwargs or {})) if found is None else found


def _product(a: Tensor, b: Tensor) -> Tensor | None:
    """Returns the product of [.., n, k] and [.., k, m]; None if neither is expanded along n, k or m."""
    if b.stride(-1) == 0 and b.shape[-1] > 1:
        return (a * b[..., :1].mT).sum(-1, keepdim=True).expand(*a.shape[:-1], b.shape[-1]).clone()
    if b.stride(-2) == 0 and b.shape[-2] > 1:
        return a.sum(-1, keepdim=True) * b[..., :1, :]
    if any(a.stride(dim) == 0 and a.shape[dim] > 1 for dim in (-1, -2)):
        found = _product(b.mT, a.mT)
        return None if found is None else found.mT
    return None


def _chosen(table: Tensor, indices: Sequence[Tensor | None]) -> Tensor | None:
    """Returns matrices that are chosen from a table [experts, n, m], expanded as the table is."""
    where = indices[0] if len(indices) == 1 else None
    if table.dim() != 3 or where is None or where.dtype == torch.bool or 0 not in table.stride()[1:]:
        return None
    thin = table[(slice(None), *(slice(0, 1) if stride == 0 else slice(None) for stride in table.stride()[1:]))]
    return thin[where].expand(*where.shape, *table.shape[1:])


def _added(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor | None:
    found = _product(a, b)
    return None if found is None else beta * bias + alpha * found


def _grouped(a: Tensor, b: Tensor, offs: Tensor | None = None, *more: Any, **named: Any) -> Tensor | None:
    """Returns the products of groups of rows [n, k] with a matrix each, [groups, k, m]."""
    if offs is None or a.dim() != 2 or b.dim() != 3 or 0 not in b.stride()[1:]:
        return None
    made, start = a.new_zeros(len(a), b.shape[-1]), 0
    for group, stop in enumerate(offs.tolist()):
        rows = a[start:stop]
        found = _product(rows, b[group])
        made[start:stop] = rows @ b[group] if found is None else found
        start = stop
    return made


_PRODUCTS: Mapping[Any, Callable[..., Tensor | None]] = {
    _ATEN.index.Tensor: _chosen,
    _ATEN.mm.default: _product,
    _ATEN.bmm.default: _product,
    _ATEN.addmm.default: _added,
    _ATEN.baddbmm.default: _added,
    _ATEN._grouped_mm.default: _grouped,
}
