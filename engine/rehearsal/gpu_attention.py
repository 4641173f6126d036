"""Attention of a GPU on shapes that claim the CPU, whose own kernels write all scores in cases where a GPU's do not."""

from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

MOST_WIDTH = 256
"""Of a head, in kernels of a GPU."""
WIDTHS = 8
"""Of which the width of a head is a multiple there."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class AttentionOfGpu(TorchFunctionMode):
    """``scaled_dot_product_attention`` as a GPU's kernels keep it: queries, keys, values, output and a sum for each row.

        dropout                     the flash kernel of the CPU, which refuses dropout, stands for the kernels of a GPU;
                                    of its mask these keep a seed
        values of another width     the memory-efficient kernel of the GPU (DeepSeek: keys of 192, values of 128)
        all else                    what torch chooses on a CPU: flash attention, or all scores

    A model whose own code writes its scores ("eager") never comes here.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        given = _ORDER.bind(*args, **kwargs).arguments
        if not _runs_on_gpu(**given):
            return func(*args, **kwargs)
        if given["query"].shape[-1] == given["value"].shape[-1]:
            return func(**{**given, "dropout_p": 0.0})
        return _efficient(**given)


_ORDER = signature(
    lambda query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False: None
)


def _runs_on_gpu(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **options: Any) -> bool:
    """A kernel of the GPU takes it."""
    widths = {query.shape[-1], key.shape[-1], value.shape[-1]}
    alike = query.dtype == key.dtype == value.dtype and query.dtype in DTYPES
    fits = query.dim() == 4 and max(widths) <= MOST_WIDTH and not any(width % WIDTHS for width in widths)
    learned = attn_mask is not None and attn_mask.requires_grad
    efficient = len(widths) > 1
    cast_or_repeated = torch.is_autocast_enabled("cpu") or options.get("enable_gqa", False)
    return alike and fits and not learned and not (efficient and cast_or_repeated)


def _efficient(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    **options: Any,
) -> Tensor:  # fmt: skip
    bias = attn_mask
    if bias is not None and bias.dtype == torch.bool:
        bias = torch.zeros_like(bias, dtype=query.dtype).masked_fill(~bias, float("-inf"))
    if bias is not None:
        bias = bias.expand(*query.shape[:2], query.shape[-2], key.shape[-2])
    kept = torch.is_grad_enabled() and any(one.requires_grad for one in (query, key, value))
    given = query, key, value, bias, kept, dropout_p, options.get("is_causal", False)
    out: Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(*given, scale=options.get("scale"))[0]
    return out
