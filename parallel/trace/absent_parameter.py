"""Class of a parameter without values on this rank: it has shape, dtype and name, and refuses reads clearly.

    sharded (ZeRO 3)     guarded while it is not gathered
    of another stage     guarded while the engine does not run the model; in its forward it is a placeholder

The object stays the user's. Only its class changes, to :class:`AbsentParameter` and back, so that nothing stands
between torch and a parameter while the model runs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from engine.parallel.model.whole_sizes import WholeSizes
from engine.parallel.trace.torch_function import METADATA, getter

Read = Callable[[], None]
"""Function called when code reads the data of an absent parameter; it raises, or makes the data available."""


@dataclass(slots=True)
class Guard:
    """State of a parameter without values on this rank: its original class, and the callback that runs before each
    read.
    """

    own_class: type[nn.Parameter]
    read: Read
    where: str
    """Location of the parameter's data, for error messages."""


class AbsentParameter(nn.Parameter):
    """Parameter without its values on this rank, for example because ZeRO 3 shards them. A read of the values first
    calls a callback.
    """

    _guard: Guard

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _WITHOUT_CONTENT:
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, AbsentParameter):
                    leaf._guard.read()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Parameter of shape {tuple(self.shape)} and {self.dtype}, {self._guard.where}"


class GuardedShape(AbsentParameter, FakeTensor):
    """Absent parameter (without its values on this rank) that is a ``FakeTensor``: it has a shape and no data."""


class GuardedPart(WholeSizes, AbsentParameter):
    """Absent parameter (without its values on this rank) that is sharded over tensor ranks. User code sees the sizes of
    the full parameter.
    """


def conceal(parameter: nn.Parameter, read: Read, where: str) -> None:
    """Changes the class of ``parameter``, so that every read of its values calls ``read`` first. ``where``: location of
    the values, for error messages.
    """
    own = type(parameter)
    if issubclass(own, AbsentParameter):
        return
    untyped: Any = parameter
    untyped._guard = Guard(own, read, where)
    untyped.__class__ = _guarded_class(own)


def _guarded_class(own: type[nn.Parameter]) -> type[AbsentParameter]:
    # asked of classes: isinstance would run code of torch's Parameter, for every parameter of a block
    if issubclass(own, WholeSizes):
        return GuardedPart
    return GuardedShape if issubclass(own, FakeTensor) else AbsentParameter


def reveal(parameter: nn.Parameter) -> None:
    """Restores the original class of ``parameter``. This is the inverse of :func:`conceal`."""
    if issubclass(type(parameter), AbsentParameter):
        untyped: Any = parameter
        untyped.__class__ = untyped._guard.own_class
        del untyped._guard


_untyped: Any = Tensor
_WITHOUT_CONTENT = METADATA | {
    *map(getter, ("is_mkldnn", "_backward_hooks", "_post_accumulate_grad_hooks")),
    *(getattr(Tensor, name) for name in (
        "storage_offset", "untyped_storage", "is_shared", "requires_grad_", "register_hook",
        "register_post_accumulate_grad_hook",
    )),
    torch.is_same_size, _untyped.requires_grad.__set__, _untyped.grad.__set__, _untyped.grad.__delete__,
}  # fmt: skip
"""Functions that need no values, including functions that return the storage, register hooks or set the gradient."""
