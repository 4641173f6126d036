"""What lists of launches are made of."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Launch = Callable[[], Any]
BF16, FP32 = torch.bfloat16, torch.float32


def meta(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    """A tensor without content."""
    return torch.empty(shape, dtype=dtype, device="meta")
