"""Rules of attention and cross-entropy over positions that context ranks share.

Attention with dropout, or with a mask that has a gradient, runs torch's function on keys and values that are gathered
over the axis "cp" in one all-gather, with gradients that are reduce-scattered in backward. Under a causal mask a run of
neighbouring queries reads only the keys up to its end, so that a zig-zag sharding divides the work evenly.
"""

import inspect
from collections.abc import Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from engine.parallel.context.recipe import TensorRecipe
from engine.parallel.tensor.collectives import LOSS, sum_parts
from engine.parallel.tensor.global_tensor.global_tensor import Function, GlobalTensor
from engine.parallel.tensor.global_tensor.index_runs import Runs, indices_of
from engine.parallel.tensor.global_tensor.index_sets import Index, NoRuleError, held_once
from engine.parallel.tensor.global_tensor.operands import fit, pick
from engine.parallel.tensor.global_tensor.redistribute import gather_global

if TYPE_CHECKING:
    from engine.parallel.tensor.global_tensor.context import GlobalTensorContext


def attend_gathered(context: "GlobalTensorContext", func: Function, given: "GivenAttention") -> GlobalTensor:
    """Computes ``func``, torch's attention, for this rank's queries over keys and values gathered from all ranks.

    Returns a global tensor, sharded as the queries. Autograd stores the gathered keys and values for backward.
    """
    query, (keys, values) = given.query, gathered_pair(given.key, given.value)
    shape, options = (*query.full[:-1], given.value.shape[-1]), dict(given.options)
    positions = query.sets[-2]
    if positions is None:  # a few queries that all ranks have, such as those of a pooled output
        out = func(query.local, keys, values, given.mask, is_causal=given.causal, **options)
        return GlobalTensor(out, shape, query.sets, context)
    with context.own_draws(query.device):
        if given.causal:
            out = _causal(func, query.local, keys, values, positions.runs[context.axis.index], options)
        else:
            rows = None if given.mask is None else mask_rows(context, given.mask, positions)
            out = func(query.local, keys, values, attn_mask=rows, **options)
    return GlobalTensor(out, shape, query.sets, context)


class GivenAttention(NamedTuple):
    """Arguments of one attention call; ``query`` [.., G, S, D] is a global tensor of G heads and S positions."""

    query: GlobalTensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    causal: bool
    options: Mapping[str, Any]
    """Other options of torch's function."""


def gathered_pair(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Returns keys and values gathered over axis cp as plain tensors; returns both unchanged if one is not a global
    tensor.

    Uses one all-gather for equal shapes, otherwise two.
    """
    if type(key) is not GlobalTensor or type(value) is not GlobalTensor:
        return key, value
    if key.full != value.full:
        return gather_global(key).local, gather_global(value).local
    both = GlobalTensor(torch.stack((key.local, value.local)), (2, *key.full), (None, *key.sets), key.views)
    keys, values = gather_global(both).local.unbind(0)
    return keys, values


def _causal(func: Function, query: Tensor, keys: Tensor, values: Tensor, held: Runs, options: dict[str, Any]) -> Tensor:
    outs = []
    start = 0
    for first, last in held.tolist():
        stop = start + last - first
        rows = torch.arange(first, last, device=query.device)
        end = min(last, keys.shape[-2])
        seen = rows[:, None] >= torch.arange(end, device=query.device)
        part = query[..., start:stop, :], keys[..., :end, :], values[..., :end, :]
        outs.append(func(*part, attn_mask=seen, **options))
        start = stop
    return torch.cat(outs, -2) if len(outs) > 1 else outs[0] if outs else query[..., :0, : values.shape[-1]]


def mask_rows(context: "GlobalTensorContext", mask: Tensor, positions: Index) -> Tensor:
    """Returns the rows of ``mask`` [.., S or 1, keys] for this rank's queries; a single row is returned as it is.

    ``positions``: positions of the queries of each rank.
    """
    wanted: list[Index | None] = [None] * mask.ndim
    if mask.shape[-2] != 1:
        wanted[-2] = positions
    if type(mask) is TensorRecipe and mask.shape[-2] != 1:  # joined slices would be computed
        rows: Tensor = mask.index_select(
            -2, torch.as_tensor(indices_of(positions.runs[context.axis.index]), device=mask.device)
        )
        return rows
    if type(mask) is GlobalTensor and mask.sets[-1] is not None:
        mask = gather_global(mask)
    return fit(context, mask, tuple(wanted))


def context_cross_entropy(context: "GlobalTensorContext", func: Function, *args: Any, **kwargs: Any) -> Any:
    """Computes ``F.cross_entropy`` on logits [N, V] or [N, V, ..] that are sharded along the N rows; V: classes.

    A mean or a sum is over the rows of all ranks. The mean all-reduces two numbers over axis cp.

    Raises:
        NoRuleError: classes are sharded or weighted, the target is a distribution, or several dims of rows are sharded
            and ranks share some rows.
    """
    bound = _CROSS_ENTROPY.bind(*args, **kwargs)
    bound.apply_defaults()
    a = SimpleNamespace(**bound.arguments)
    logits, target, classes = a.input, a.target, 1 if a.input.ndim > 1 else 0
    unweighted = a.weight is None and a.size_average is None and a.reduce is None
    if type(logits) is not GlobalTensor or not unweighted or target.ndim != logits.ndim - classes:
        raise NoRuleError("cross-entropy has a rule for indices of unweighted classes only.")
    if logits.sets[classes] is not None:
        raise NoRuleError("cross-entropy needs full classes.")
    rows = (*logits.sets[:classes], *logits.sets[classes + 1 :])
    own = fit(context, target, rows)
    named = {"ignore_index": a.ignore_index, "label_smoothing": a.label_smoothing}
    if a.reduction == "none" or not any(rows):
        out = func(logits.local, own, reduction=a.reduction, **named)
        shape, sets = (tuple(target.shape), rows) if a.reduction == "none" else ((), ())
        return GlobalTensor(out, shape, sets, context)
    local = logits.local
    if not held_once(
        rows
    ):  # a row on several ranks, such as the first one of cat([x[:, :1], x[:, 1:]], 1), counts once
        (cut, *more) = [dim for dim, index in enumerate(rows) if index is not None]
        index = rows[cut]
        if more or index is None:
            raise NoRuleError("cross-entropy counts shared rows once along one sharded dim only.")
        local = pick(context, local, cut + (cut >= classes), index, index.owned)
        own = pick(context, own, cut, index, index.owned)
    total = func(local, own, reduction="sum", **named)
    if a.reduction == "sum":
        return sum_parts(total, context.axis, LOSS)
    # half types round a count from 257 rows on
    wide = torch.promote_types(total.dtype, torch.float32)
    count = (own != a.ignore_index).sum().to(wide)
    whole, count = sum_parts(torch.stack((total.to(wide), count)), context.axis, LOSS).unbind(0)
    return (whole / count).to(total.dtype)


_CROSS_ENTROPY = inspect.signature(functional.cross_entropy)
