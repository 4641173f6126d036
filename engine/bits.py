"""Sums of bit patterns, to compare what ranks hold without sending it."""

import torch
from torch import Tensor

_WORDS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))


def bit_sum(tensor: Tensor) -> Tensor:
    """int64, 0-dim: exact, and independent of the device's order of addition; 0 for what has no memory."""
    if tensor.is_meta or not tensor.numel():
        return torch.zeros((), dtype=torch.int64, device="cpu" if tensor.is_meta else tensor.device)
    flat = tensor.detach().contiguous().reshape(-1)
    word = next(word for size, word in _WORDS if flat.element_size() % size == 0)
    return flat.view(word).sum(dtype=torch.int64)
