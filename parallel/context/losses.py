"""Losses over positions that context ranks share."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engine.parallel.tensor.collectives import LOSS, sum_parts
from engine.parallel.tensor.global_tensor.global_tensor import Function, GlobalTensor
from engine.parallel.tensor.global_tensor.index_sets import NoRuleError
from engine.parallel.tensor.global_tensor.operands import fit

if TYPE_CHECKING:
    from engine.parallel.tensor.global_tensor.context import GlobalTensorContext


def context_cross_entropy(
    context: "GlobalTensorContext",
    func: Function,
    input: Any,
    target: Any,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """Runs ``F.cross_entropy`` on logits [N, V] or [N, V, ..] that are sharded along rows.

    Two numbers, the sum of losses and the number of rows, are all-reduced over "cp": a mean is that of all rows.

    Raises:
        NoRuleError: classes are sharded or weighted, or the target is a distribution.
    """
    classes = 1 if input.ndim > 1 else 0
    plain_form = weight is None and size_average is None and reduce is None and target.ndim == input.ndim - classes
    if type(input) is not GlobalTensor or not plain_form or input.sets[classes] is not None:
        raise NoRuleError("cross-entropy has a rule for rows of unweighted classes only.")
    rows = (*input.sets[:1], *input.sets[2:])
    local = fit(context, target, rows)
    named = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    if reduction == "none" or not any(rows):
        out = func(input.local, local, reduction=reduction, **named)
        return GlobalTensor(out, *((target.shape, rows) if reduction == "none" else ((), ())), context)
    total = func(input.local, local, reduction="sum", **named)
    if reduction == "sum":
        return sum_parts(total, context.axis, LOSS)
    count = (local != ignore_index).sum().to(total.dtype)
    total, count = sum_parts(torch.stack((total, count)), context.axis, LOSS).unbind(0)
    return total / count
