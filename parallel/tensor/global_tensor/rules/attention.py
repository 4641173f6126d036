"""Attention on shards: scaled dot product attention, nn.MultiheadAttention in steps that have rules, and rotary.

Queries, keys and values [.., heads, length, head size] may be sharded along all dims but the last two.
"""

import inspect
from collections.abc import Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from engine.kernels.ops.rotary import rotary_reference
from engine.parallel.tensor.global_tensor.global_tensor import Function, GlobalTensor, like
from engine.parallel.tensor.global_tensor.index_sets import NoRuleError, Sets
from engine.parallel.tensor.global_tensor.layout import repeated
from engine.parallel.tensor.global_tensor.operands import broadcast_operands, fit, layout_of
from engine.parallel.tensor.global_tensor.rules.elementwise import draws_alone

if TYPE_CHECKING:
    from engine.parallel.tensor.global_tensor.context import GlobalTensorContext


_ATTENTION_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


def attention_arguments(args: Any, options: Mapping[str, Any]) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
    """Returns (query, key, value, mask, other options) from the arguments of ``F.scaled_dot_product_attention``."""
    named = dict(zip(_ATTENTION_NAMES, args, strict=False)) | dict(options)
    query, key, value, mask = (named.pop(name, None) for name in _ATTENTION_NAMES[:4])
    return query, key, value, mask, named


def attention_rule(context: "GlobalTensorContext", func: Function, *args: Any, **options: Any) -> Any:
    """Runs ``F.scaled_dot_product_attention`` on this rank's batch entries or heads, without communication in forward.

    Raises:
        NoRuleError: positions or the head size are sharded.
    """
    query, key, value, mask, options = attention_arguments(args, options)
    tensors = [tensor for tensor in (query, key, value, mask) if tensor is not None]
    if any(index is not None for tensor in tensors for index in layout_of(tensor).sets[-2:]):
        raise NoRuleError("attention needs full positions and a full head size, but one of them is sharded.")
    if options.get("enable_gqa") and query.shape[-3] != key.shape[-3]:
        return _grouped(context, func, (query, key, value, mask), options)
    options.pop("enable_gqa", None)
    joined = broadcast_operands(context, tensors, tail=2)
    parts = [fit(context, tensor, own) for tensor, own in zip(tensors, joined.operands, strict=True)]
    local = _attend(context, func, parts, options, joined.sets)
    shape = (*joined.shape[:-2], query.shape[-2], value.shape[-1])
    return GlobalTensor(local, shape, joined.sets, context)


def _attend(
    context: "GlobalTensorContext", func: Function, parts: list[Tensor], options: dict[str, Any], sets: Sets
) -> Tensor:
    attend: Any = func
    if draws_alone(sets, options.get("dropout_p", 0.0)):
        with context.own_draws(parts[0].device):
            return attend(*parts, **options)  # type: ignore[no-any-return]
    return attend(*parts, **options)  # type: ignore[no-any-return]


def _grouped(context: "GlobalTensorContext", func: Function, tensors: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Runs attention with several query heads per key and value head."""
    query, key, value, mask = tensors
    times = query.shape[-3] // key.shape[-3]
    parts = matching_groups(context, (query, key, value), times)
    if parts is None:
        key, value = (torch.repeat_interleave(tensor, times, dim=-3) for tensor in (key, value))
        return attention_rule(context, func, query, key, value, mask, **(options | {"enable_gqa": False}))
    sets = query.sets[:-2]
    if mask is not None:
        parts.append(fit(context, mask, broadcast_operands(context, [query, mask], tail=2).operands[1]))
    local = _attend(context, func, parts, options, sets)
    return GlobalTensor(local, (*query.full[:-1], value.full[-1]), query.sets, context)


def matching_groups(context: "GlobalTensorContext", tensors: tuple[Any, ...], times: int) -> list[Tensor] | None:
    """Returns this rank's shards of query, key and value for grouped-query attention.

    Returns None unless heads are sharded and each rank stores exactly the key heads that its query heads use.
    ``tensors``: (query, key, value); ``times``: query heads per key head.
    """
    if any(type(tensor) is not GlobalTensor for tensor in tensors):
        return None
    query, key, value = tensors
    shared = key.sets[-3]
    if shared is None or key.sets != value.sets or (query.full[:-3], query.sets[:-3]) != (key.full[:-3], key.sets[:-3]):
        return None
    heads = context.find(("repeat", shared, times), lambda: repeated(shared, times, interleaved=True))
    return [query.local, key.local, value.local] if heads == query.sets[-3] else None


_MULTI_HEAD = inspect.signature(functional.multi_head_attention_forward)


def multi_head(context: "GlobalTensorContext", func: Function, *args: Any, **kwargs: Any) -> Any:
    """Runs ``F.multi_head_attention_forward`` on global tensors by :func:`multi_head_in_steps`."""
    return multi_head_in_steps(*args, **kwargs)


def multi_head_in_steps(*args: Any, **kwargs: Any) -> Any:
    """Computes ``F.multi_head_attention_forward`` by a sequence of simpler torch functions.

    Takes torch's arguments and returns (output, attention weights or None).

    Raises:
        NoRuleError: ``bias_k``, ``bias_v``, ``static_k``, ``static_v`` or ``add_zero_attn`` is set.
    """
    bound = _MULTI_HEAD.bind(*args, **kwargs)
    bound.apply_defaults()
    a = SimpleNamespace(**bound.arguments)
    if any(given is not None for given in (a.bias_k, a.bias_v, a.static_k, a.static_v)) or a.add_zero_attn:
        raise NoRuleError("attention on shards takes keys from the input only: no bias_k, static_k or add_zero_attn.")
    batched = a.query.ndim == 3
    inputs = [a.query, a.key, a.value]
    if not batched:
        inputs = [x.unsqueeze(1) for x in inputs]
        a.key_padding_mask = None if a.key_padding_mask is None else a.key_padding_mask.unsqueeze(0)
    query, key, value = (
        projected.view(*projected.shape[:2], a.num_heads, -1).permute(1, 2, 0, 3) for projected in _project(a, inputs)
    )
    mask = _mask(a, query)
    dropout = a.dropout_p if a.training else 0.0
    if a.need_weights:
        out, weights = _with_weights(a, (query, key, value, mask), dropout)
    else:
        causal = bool(a.is_causal and a.key_padding_mask is None)
        out = functional.scaled_dot_product_attention(query, key, value, None if causal else mask, dropout, causal)
        weights = None
    # rows in the order batch, length, so that the sum may stay sharded along the length
    out = functional.linear(out.transpose(1, 2).flatten(2), a.out_proj_weight, a.out_proj_bias).transpose(0, 1)
    if not batched:
        out, weights = out.squeeze(1), None if weights is None else weights.squeeze(0)
    return out, weights


def _project(a: SimpleNamespace, inputs: list[Tensor]) -> list[Tensor]:
    """Returns queries, keys and values [length, batch, width]; one product computes all three from one input."""
    biases = (None,) * 3 if a.in_proj_bias is None else a.in_proj_bias.chunk(3)
    if a.use_separate_proj_weight:
        weights = (a.q_proj_weight, a.k_proj_weight, a.v_proj_weight)
    elif a.query is a.key and a.key is a.value:
        return list(functional.linear(inputs[0], a.in_proj_weight, a.in_proj_bias).chunk(3, dim=-1))
    else:
        weights = a.in_proj_weight.chunk(3)
        if a.key is a.value:
            inputs[2] = inputs[1]
    return [functional.linear(x, weight, bias) for x, weight, bias in zip(inputs, weights, biases, strict=True)]


def _mask(a: SimpleNamespace, query: Tensor) -> Any:
    """Returns the mask that is added to the scores [batch, heads, queries, keys]."""
    mask = _additive(a.attn_mask, query.dtype)
    if mask is not None and mask.ndim == 3:
        mask = mask.view(-1, a.num_heads, *mask.shape[1:])
    padding = _additive(a.key_padding_mask, query.dtype)
    if padding is None:
        return mask
    padding = padding[:, None, None, :]
    return padding if mask is None else mask + padding


def _additive(mask: Any, dtype: torch.dtype) -> Any:
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))


def _with_weights(a: SimpleNamespace, tensors: tuple[Any, ...], dropout: float) -> tuple[Any, Any]:
    query, key, value, mask = tensors
    scores = (query * query.shape[-1] ** -0.5) @ key.transpose(-1, -2)
    scores = scores if mask is None else scores + mask
    weights: Any = torch.softmax(scores, dim=-1)
    weights = functional.dropout(weights, dropout) if dropout else weights
    return weights @ value, weights.mean(dim=1) if a.average_attn_weights else weights


def rotary_rule(context: "GlobalTensorContext", func: Function, q: Tensor, k: Tensor, *angles_and_form: Any) -> Any:
    """Applies rotary embeddings to this rank's shards of ``q`` and ``k`` and returns both.

    ``angles_and_form``: cos, sin, feature layout, and the choice between Triton and PyTorch. The fused operator runs
    if ``q`` and ``k`` have the same batch and position sharding and unsharded features, and cos and sin are plain
    tensors without gradient; otherwise the reference implementation runs.
    """
    cos, sin, form, kernels = angles_and_form
    length = 3 - form.heads_dim
    cuts = [layout_of(x).sets for x in (q, k)]
    shared = {(sets[0], sets[length]) for sets in cuts}
    plain = not any(type(angle) is GlobalTensor or angle.requires_grad for angle in (cos, sin))
    if len(shared) != 1 or any(sets[3] for sets in cuts) or not plain:
        return rotary_reference(q, k, cos, sin, form)
    ((batch, positions),) = shared
    wanted = (batch if cos.shape[0] != 1 else None, positions, None)
    angles = (fit(context, angle, wanted) for angle in (cos, sin))
    made = func(*(x.local if type(x) is GlobalTensor else x for x in (q, k)), *angles, form, kernels)
    return tuple(like(x, local) if type(x) is GlobalTensor else local for x, local in zip((q, k), made, strict=True))
