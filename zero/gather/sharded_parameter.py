"""Class of a sharded parameter while it is not gathered: it has shape, dtype and name, and answers reads clearly.

The object stays the user's. Only its class changes, to :class:`ShardedParameter` and back, so that nothing stands
between torch and a parameter while the model runs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

Read = Callable[[], None]
"""Called when code reads a parameter that is not gathered; it gathers the parameter or raises."""


@dataclass(slots=True)
class Guard:
    """State that a concealed parameter carries."""

    own_class: type[nn.Parameter]
    read: Read


class ShardedParameter(nn.Parameter):
    """Parameter of which this rank holds its shard at most."""

    _guard: Guard

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _WITHOUT_CONTENT:
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, ShardedParameter):
                    leaf._guard.read()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Parameter of shape {tuple(self.shape)} and {self.dtype}, sharded over the data ranks (ZeRO 3)"


def conceal(parameter: nn.Parameter, read: Read) -> None:
    """Change the class to :class:`ShardedParameter`, so that ``read`` is called when code needs the values."""
    if isinstance(parameter, ShardedParameter):
        return
    untyped: Any = parameter
    untyped._guard = Guard(type(parameter), read)
    untyped.__class__ = ShardedParameter


def reveal(parameter: nn.Parameter) -> None:
    """Restore the parameter's own class: the inverse of :func:`conceal`."""
    if isinstance(parameter, ShardedParameter):
        untyped: Any = parameter
        untyped.__class__ = untyped._guard.own_class
        del untyped._guard


def _getters(*names: str) -> tuple[Any, ...]:
    return tuple(getattr(Tensor, name).__get__ for name in names)


def _own(*names: str) -> tuple[Any, ...]:
    return tuple(getattr(Tensor, name) for name in names)


_untyped: Any = Tensor
_WITHOUT_CONTENT = frozenset(
    (
        *_getters(
            "shape", "dtype", "device", "layout", "ndim", "requires_grad", "grad", "grad_fn", "is_leaf", "is_meta",
            "is_cuda", "is_cpu", "is_sparse", "is_quantized", "is_mkldnn", "is_nested", "itemsize", "nbytes",
            "_version", "_backward_hooks", "_post_accumulate_grad_hooks", "is_xpu", "is_mps", "output_nr",
        ),
        *_own(
            "size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "storage_offset",
            "untyped_storage", "is_contiguous", "is_floating_point", "is_complex", "is_signed", "get_device", "__len__",
            "requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "is_inference", "is_shared",
        ),
        torch.is_floating_point, torch.is_complex, torch.numel, torch.is_tensor, torch.is_same_size,
        _untyped.requires_grad.__set__, _untyped.grad.__set__, _untyped.grad.__delete__,
    )
)  # fmt: skip
"""Functions of torch that need no values."""
