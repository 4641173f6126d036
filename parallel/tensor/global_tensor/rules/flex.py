"""Rule of flex attention on shards of rows and heads, whose places the functions of scores and masks read in full."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from engine.kernels.ops.flex_attention import FlexCall
from engine.parallel.tensor.global_tensor.flex_parts import FlexPart
from engine.parallel.tensor.global_tensor.global_tensor import Function, GlobalTensor
from engine.parallel.tensor.global_tensor.index_sets import NoRuleError, Sets
from engine.parallel.tensor.global_tensor.layout import Shape
from engine.parallel.tensor.global_tensor.operands import broadcast_operands, fit, layout_of
from engine.parallel.tensor.global_tensor.rules.attention import matching_groups

if TYPE_CHECKING:
    from engine.parallel.tensor.global_tensor.context import GlobalTensorContext


def flex_rule(context: "GlobalTensorContext", func: Function, q: Tensor, k: Tensor, v: Tensor, call: FlexCall) -> Any:
    """Runs flex attention on this rank's batch entries and heads of ``q``, ``k`` and ``v`` [B, heads, S, D].

    ``call``: score function, block mask and options.

    Raises:
        NoRuleError: positions or the head size are sharded.
    """
    if any(index is not None for tensor in (q, k, v) for index in layout_of(tensor).sets[-2:]):
        raise NoRuleError("flex attention needs full positions and a full head size, but one of them is sharded.")
    times = q.shape[1] // k.shape[1]
    if times > 1:
        parts, sets = matching_groups(context, (q, k, v), times), layout_of(q).sets
        if parts is None:
            k, v = (torch.repeat_interleave(tensor, times, dim=1) for tensor in (k, v))
            return flex_rule(context, func, q, k, v, replace(call, enable_gqa=False))
    else:
        joined = broadcast_operands(context, [q, k, v], tail=2)
        parts = [fit(context, tensor, own) for tensor, own in zip((q, k, v), joined.operands, strict=True)]
        sets = (*joined.sets, *(None,) * (4 - len(joined.sets)))
    part = context.find(("flex part", sets[:2], q.device), lambda: _part(context, sets, q.device))
    made = func(*parts, part.call(call, part.mask(call.block_mask)))
    return on_ranks(context, made, (*layout_of(q).shape[:-1], v.shape[-1]), sets)


def _part(context: "GlobalTensorContext", sets: Sets, device: torch.device) -> FlexPart:
    rows, heads = (None if index is None else index.runs[context.axis.index] for index in sets[:2])
    return FlexPart.of(device, rows, heads)


def on_ranks(context: "GlobalTensorContext", made: Any, shape: Shape, sets: Sets) -> Any:
    """Wraps ``made``, this rank's results of flex attention, as global tensors sharded as ``sets``.

    ``shape``: full shape of the output.
    """

    def wrapped(one: Tensor) -> GlobalTensor:
        return GlobalTensor(one, tuple(shape[: one.ndim]), sets[: one.ndim], context)

    return pytree.tree_map_only(Tensor, wrapped, made, is_leaf=lambda one: isinstance(one, Tensor))
