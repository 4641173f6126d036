"""Memory for messages that arrive, used again and again: fresh memory costs page faults and fragments.

A buffer goes back to the shelf only when nobody holds a tensor over it. Model code may keep what it was given
(``output_hidden_states``), and autograd may hand a gradient on as it came: such memory is left to its holder.
"""

import torch
from torch import Tensor


class Buffers:
    """A shelf of tensors by shape and dtype."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lent: dict[int, Tensor] = {}
        """By the address of their memory."""
        self._free: dict[tuple[tuple[int, ...], torch.dtype], list[Tensor]] = {}

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor with any content. Hand on other names for its memory (``detach``), and not itself."""
        shelf = self._free.get((shape, dtype))
        tensor = shelf.pop() if shelf else torch.empty(shape, dtype=dtype, device=self._device)
        if tensor.numel():
            self._lent[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def give(self, tensor: Tensor) -> None:
        """The holder of ``tensor``, which may be anybody's, is done with it and keeps no other name for its memory."""
        own = self._lent.pop(tensor.untyped_storage().data_ptr(), None)
        if own is not None and _names(own) <= _OURS:
            self._free.setdefault((tuple(own.shape), own.dtype), []).append(own)

    def forget(self) -> None:
        """What is lent now belongs to its holders."""
        self._lent.clear()


_OURS = 2
"""The buffer itself, and the tensor that is given back."""


def _names(tensor: Tensor) -> int:
    """How many tensors share this memory."""
    storage = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1  # `storage` is one more
