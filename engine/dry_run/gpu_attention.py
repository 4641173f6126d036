"""Attention in a dry run: FakeTensors that claim the CPU store the tensors that GPU kernels store, not all scores."""

from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from engine.parallel.model.placeholders import is_plain

MOST_WIDTH = 256
"""Largest head width of GPU attention kernels."""
WIDTHS = 8
"""Head widths of GPU attention kernels are multiples of this."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@contextmanager
def attention_of_gpu() -> Iterator[None]:
    """Returns a context manager in which ``scaled_dot_product_attention`` on CPU FakeTensors saves the same tensors for
    its backward as a GPU kernel: inputs, output and row sums, not all scores.

    Models that compute scores in their own code ("eager") are not affected.
    """
    own, module = functional.scaled_dot_product_attention, cast(Any, functional)

    def attend(*args: Any, **kwargs: Any) -> Any:
        given = _ORDER.bind(*args, **kwargs).arguments
        if not _runs_on_gpu(**given):
            return own(*args, **kwargs)
        if given["query"].shape[-1] == given["value"].shape[-1]:
            return own(**{**given, "dropout_p": 0.0})
        return _efficient(**given)

    module.scaled_dot_product_attention = attend
    try:
        yield
    finally:
        module.scaled_dot_product_attention = own


_ORDER = signature(
    lambda query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False: None
)


def _runs_on_gpu(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **options: Any) -> bool:
    """Returns True if a kernel of the GPU accepts these arguments."""
    widths = {query.shape[-1], key.shape[-1], value.shape[-1]}
    one_dtype = query.dtype == key.dtype == value.dtype and query.dtype in DTYPES
    fits = query.dim() == 4 and max(widths) <= MOST_WIDTH and not any(width % WIDTHS for width in widths)
    learned = attn_mask is not None and attn_mask.requires_grad
    if len(widths) > 1:  # the kernel is called by name, so torch neither casts, repeats heads nor handles shards
        plain = is_plain(query) and not torch.is_autocast_enabled("cpu") and not options.get("enable_gqa", False)
        return one_dtype and fits and not learned and plain
    return one_dtype and fits and not learned


def _efficient(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    **options: Any,
) -> Tensor:  # fmt: skip
    bias = attn_mask
    if bias is not None and bias.dtype == torch.bool:
        bias = torch.zeros_like(bias, dtype=query.dtype).masked_fill(~bias, float("-inf"))
    if bias is not None:
        bias = bias.expand(*query.shape[:2], query.shape[-2], key.shape[-2])
    differentiates = torch.is_grad_enabled() and any(one.requires_grad for one in (query, key, value))
    given = query, key, value, bias, differentiates, dropout_p, options.get("is_causal", False)
    out: Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(*given, scale=options.get("scale"))[0]
    return out
