"""``functional.multi_head_attention_forward`` in single torch functions, which a mode or a view can follow.

Shape suffixes: L target length, S source length, B rows, H heads, D width of a head, E width.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from engine.errors import PlanError


def multi_head_attention(
    query_LBE: Tensor,
    key_SBE: Tensor,
    value_SBE: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """The same result as torch's function, whose arguments these are.

    Raises:
        PlanError: bias_k, bias_v, add_zero_attn, static keys or values, or a batch without its dim.
    """
    extra = bias_k is not None or bias_v is not None or add_zero_attn or options.get("static_k") is not None
    if extra or options.get("static_v") is not None or query_LBE.dim() != 3:
        raise PlanError(
            "nn.MultiheadAttention with bias_k, add_zero_attn or an input without a batch dim cannot be cut over "
            'tensor ranks; leave them out, or give it the style "replicate".'
        )
    weights = _weights(in_proj_weight, options)
    biases = (None,) * 3 if in_proj_bias is None else in_proj_bias.chunk(3)
    inputs = (query_LBE, key_SBE, value_SBE)
    if query_LBE is key_SBE and key_SBE is value_SBE and in_proj_weight is not None:
        projected = functional.linear(query_LBE, in_proj_weight, in_proj_bias).chunk(3, dim=-1)
    else:
        projected = tuple(functional.linear(x, w, b) for x, w, b in zip(inputs, weights, biases, strict=True))
    q_BHLD, k_BHSD, v_BHSD = (part.reshape(*part.shape[:2], num_heads, -1).permute(1, 2, 0, 3) for part in projected)
    mask = _mask(options, query_LBE.shape[1], num_heads)
    dropout_p = dropout_p if options.get("training", True) else 0.0
    causal = bool(options.get("is_causal")) and mask is None
    attended = None
    if options.get("need_weights", True):
        attended = _attention_weights(q_BHLD, k_BHSD, mask, causal)
        y_BHLD = torch.matmul(functional.dropout(attended, dropout_p), v_BHSD)
        attended = attended.mean(dim=1) if options.get("average_attn_weights", True) else attended
    else:
        y_BHLD = functional.scaled_dot_product_attention(q_BHLD, k_BHSD, v_BHSD, mask, dropout_p, causal)
    return functional.linear(y_BHLD.permute(2, 0, 1, 3).flatten(2), out_proj_weight, out_proj_bias), attended


def _weights(in_proj: Tensor | None, options: dict[str, Any]) -> tuple[Any, Any, Any]:
    if in_proj is not None:
        q, k, v = in_proj.chunk(3)
        return q, k, v
    return options["q_proj_weight"], options["k_proj_weight"], options["v_proj_weight"]


def _mask(options: dict[str, Any], rows: int, heads: int) -> Tensor | None:
    """Both masks as one that is added to the scores, or one of booleans that is true where attention is allowed."""
    mask, padding = options.get("attn_mask"), options.get("key_padding_mask")
    if options.get("is_causal") and padding is None and not options.get("need_weights", True):
        return None
    mask = _additive(mask)
    if mask is not None and mask.dim() == 3:
        mask = mask.view(rows, heads, *mask.shape[1:])
    if padding is None:
        return mask
    padding = _additive(padding)
    assert padding is not None
    padding = padding[:, None, None, :]
    return padding if mask is None else mask + padding


def _additive(mask: Tensor | None) -> Tensor | None:
    """torch's module masks where a boolean is true."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, device=mask.device).masked_fill_(mask, -math.inf)


def _attention_weights(q_BHLD: Tensor, k_BHSD: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    scores = torch.matmul(q_BHLD / math.sqrt(q_BHLD.shape[-1]), k_BHSD.transpose(-1, -2))
    if causal:
        length = scores.shape[-2]
        mask = torch.ones(length, scores.shape[-1], dtype=torch.bool, device=scores.device).triu(1)
        mask = _additive(mask)
    return torch.softmax(scores if mask is None else scores + mask.to(scores.dtype), dim=-1)
