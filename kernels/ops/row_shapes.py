"""Views of tensors as rows of a matrix, the form that the kernels read."""

import torch
from torch import Tensor


def is_narrow(x: Tensor) -> bool:
    """Return whether the kernels support ``x``: fp32, fp16 or bf16, with a last dim."""
    return x.dtype in (torch.float32, torch.bfloat16, torch.float16) and x.dim() > 0 and x.shape[-1] > 0


def rows_of(x: Tensor) -> Tensor:
    """View [.., H] as [N, H] with contiguous rows; copies only where the leading dims cannot be merged."""
    x_NH = x.reshape(-1, x.shape[-1])
    return x_NH if x_NH.stride(1) == 1 or x_NH.shape[1] == 1 else x_NH.contiguous()
