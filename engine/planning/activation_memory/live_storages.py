"""Bytes of the storages that operators make, each storage once, while they live.

    operator     its new storages are added; views share the storage of what they view
    last holder  a storage is taken off when the last tensor, graph or list that holds it lets it go

It counts real tensors and tensors without content (FakeTensors) alike. Storages that existed before are not counted,
so parameters, buffers of the model and optimizer state are left out by being made before. Memory that a kernel takes
and gives back inside one operator is not seen.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveStorages(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts live bytes inside a with statement, which may be entered again.

    Args:
        resized: bytes of older storages that change their size, such as parameters that are gathered (ZeRO 3); they
            count for ``peak`` and not for ``bytes``.
    """

    def __init__(self, resized: Callable[[], int] = int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0
        self.peak = 0
        """Most bytes behind any operator since :meth:`mark`, with those of ``resized``."""
        self._resized = resized
        self._sizes: dict[int, int] = {}
        """By the number of the storage, which is its own while it lives."""

    def mark(self) -> int:
        """Begin a new peak; returns the bytes that live now."""
        self.peak = self.bytes + self._resized()
        return self.bytes

    def leave_out(self, tensor: Tensor) -> None:
        """Count the storage of ``tensor`` no longer."""
        self.bytes -= self._sizes.pop(_number(tensor), 0)

    def take_in(self, tensor: Tensor) -> None:
        """Count the storage of ``tensor``, which was left out, or made before."""
        number, storage = _number(tensor), tensor.untyped_storage()
        if number not in self._sizes:
            self._sizes[number] = storage.nbytes()
            self.bytes += storage.nbytes()
            weakref.finalize(storage, self._forget, number).atexit = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and what would hide the mode from Dynamo runs at each operation

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # asked of a tensor without content for every look at its device
            return func(*args, **(kwargs or {}))
        older = {_number(leaf) for leaf in tree_leaves((args, kwargs)) if _has_storage(leaf)}
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if _has_storage(leaf) and _number(leaf) not in older:
                self.take_in(leaf)
        self.peak = max(self.peak, self.bytes + self._resized())
        return out

    def _forget(self, number: int) -> None:
        self.bytes -= self._sizes.pop(number, 0)


def _number(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _has_storage(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.layout is torch.strided
