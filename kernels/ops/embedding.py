"""Embedding with a weight gradient that is added to the main gradient.

    apart    dW: zeros [V, H] plus the rows of dy; main += dW                    three passes over all rows
    added    main[ids] += dy                                                     rows of the batch alone

Rows with equal ids are summed first, in a fixed order, so that every row of the main gradient is written once. Equal
inputs result in equal bits, also on GPUs, which add to one address in any order.

Shape suffixes: N ids of all dims together, V rows of the weight, H width.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import handle_torch_function, has_torch_function

from engine.kernels.dispatch import Kernels, MainGradient, eager_apply, open_sum


def look_up_rows(weight_VH: Tensor, ids: Tensor, padding: int | None, kernels: Kernels) -> Tensor:
    """Returns the rows of ``weight_VH`` [V, H] at the indices ``ids`` [..] (int64 or int32): [.., H]. Differentiable.

    The row ``padding`` gets no gradient. If ``kernels.main`` has a main gradient for the weight (Megatron-LM:
    ``main_grad``), the backward may add to it in place; autograd then gets no gradient of the weight.
    """
    if has_torch_function((weight_VH, ids)):
        return handle_torch_function(look_up_rows, (weight_VH, ids), weight_VH, ids, padding, kernels)
    wanted = torch.is_grad_enabled() and 0 < ids.numel() <= len(weight_VH)
    main = kernels.main.use(weight_VH) if wanted else None
    if main is None:
        return functional.embedding(ids, weight_VH, padding)
    y: Tensor = _look_up(weight_VH, ids, padding, main)
    return y


class _Added(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight_VH: Tensor, ids: Tensor, padding: int | None, main: MainGradient) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.rows, ctx.main, ctx.padding = len(weight_VH), main, -1 if padding is None else padding
        return functional.embedding(ids, weight_VH, padding)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (ids,) = ctx.saved_tensors
        node = ctx.next_functions[0][0]
        opened = open_sum(ctx.main, node)
        if opened is None:
            return torch.ops.aten.embedding_dense_backward(dy, ids, ctx.rows, ctx.padding, False), None, None, None
        into_VH = opened.into if opened.holds else opened.into.zero_()
        add_rows_(into_VH, ids.reshape(-1), dy.reshape(-1, dy.shape[-1]), ctx.padding)
        ctx.main.end(node)
        return None, None, None, None


_look_up = eager_apply(_Added)


def add_rows_(into_VH: Tensor, ids_N: Tensor, rows_NH: Tensor, padding: int = -1) -> None:
    """Adds row n of ``rows_NH`` to row ``ids_N[n]`` of ``into_VH`` in place, for all n; the host does not wait.

    Rows with the id ``padding`` are left out. Rows with the same id are summed in a fixed order.
    """
    sorted_N, order_N = ids_N.sort()
    first_N = torch.ones_like(sorted_N, dtype=torch.bool)
    torch.ne(sorted_N[1:], sorted_N[:-1], out=first_N[1:])
    place_N = first_N.cumsum(0).sub_(1)  # number of an id among the distinct ones
    distinct_N = torch.zeros_like(sorted_N).scatter_(0, place_N, sorted_N)  # the rest: id 0 with sum 0
    rows_NH = rows_NH.to(into_VH.dtype)[order_N]
    if padding >= 0:
        rows_NH.masked_fill_((sorted_N == padding).unsqueeze(1), 0)
    sums_NH = torch.ops.aten.embedding_dense_backward(rows_NH, place_N, len(place_N), -1, False)
    into_VH.index_add_(0, distinct_N, sums_NH)
