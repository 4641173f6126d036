"""Operators whose vendor kernels are the best: fp8 matrix products (cuBLASLt) and attention (Flash, cuDNN).

They are wrapped here so that models and layers call every operator in the same way.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import handle_torch_function, has_torch_function

from engine.kernels.device import cuda_capability, is_host

_SIZES = 16
"""Inputs and outputs of an fp8 product must be multiples of this."""
_SCALED_FROM = (8, 9)
"""First compute capability whose tensor cores support fp8."""


def scaled_matmul(x: Tensor, weight: Tensor, scale_x: Tensor, scale_weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute (scale_x x) (scale_weight weight)' in ``dtype``, accumulated in fp32; not differentiable.

    x [.., I] and weight [O, I] are both float8_e4m3fn, or one of them is float8_e5m2. The scales are fp32, either one
    number each or one for each row: [.., 1] and [O, 1].
    """
    given = (x, weight, scale_x, scale_weight)
    if has_torch_function(given):
        return handle_torch_function(scaled_matmul, given, *given, dtype)
    by_rows = scale_x.numel() > 1 or scale_weight.numel() > 1
    if not _is_in_library(x, weight, by_rows, dtype):
        return scaled_matmul_reference(x, weight, scale_x, scale_weight, dtype)
    x_MI = x.reshape(-1, x.shape[-1])
    scales = scale_x, scale_weight
    if by_rows:
        rows_M1 = scale_x.expand(*x.shape[:-1], 1).reshape(-1, 1).contiguous()
        scales = rows_M1, scale_weight.expand(weight.shape[0], 1).reshape(1, -1).contiguous()
    y_MO: Tensor = torch._scaled_mm(x_MI, weight.t(), *scales, out_dtype=dtype)
    return y_MO.view(*x.shape[:-1], weight.shape[0])


def scaled_matmul_reference(
    x: Tensor, weight: Tensor, scale_x: Tensor, scale_weight: Tensor, dtype: torch.dtype
) -> Tensor:
    """PyTorch reference of :func:`scaled_matmul`, in fp32."""
    return functional.linear(x.float() * scale_x, weight.float() * scale_weight).to(dtype)


def _is_in_library(x: Tensor, weight: Tensor, by_rows: bool, dtype: torch.dtype) -> bool:
    sizes = *weight.shape, x.shape[-1]
    if any(size % _SIZES or not size for size in sizes) or not x.numel() or not weight.is_contiguous():
        return False
    if is_host(x.device):
        return not by_rows  # row scales on CPU depend on the version of torch
    return cuda_capability(x.device) >= _SCALED_FROM and (not by_rows or dtype == torch.bfloat16)


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """Parameters of an attention."""

    causal: bool = False
    scale: float | None = None
    """Scale of the scores; None for 1 / sqrt(head width)."""
    dropout: float = 0.0


def attention(query: Tensor, key: Tensor, value: Tensor, form: AttentionOptions, mask: Tensor | None = None) -> Tensor:
    """Compute softmax(scale query key' + mask) value (Dao et al. 2022). Differentiable.

    query [.., H, S, D], key and value [.., G, T, D], where G divides H. mask [.., S, T] is added to the scores, or, if
    bool, is True at the scores that count.
    """
    given = tuple(t for t in (query, key, value, mask) if t is not None)
    if has_torch_function(given):
        return handle_torch_function(attention, given, query, key, value, form, mask)
    return attend(query, key, value, form, mask)


def attend(query: Tensor, key: Tensor, value: Tensor, form: AttentionOptions, mask: Tensor | None = None) -> Tensor:
    """Call torch's attention; :func:`attention` without the dispatch to tensor subclasses."""
    grouped = query.ndim > 2 and query.shape[-3] != key.shape[-3]
    return functional.scaled_dot_product_attention(
        query, key, value, mask, form.dropout, form.causal, scale=form.scale, enable_gqa=grouped
    )
