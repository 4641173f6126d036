"""``deepspeed.runtime.zero.partition_parameters``: ZeRO attributes of parameters, Init, GatheredParameters."""

from collections.abc import Callable
from enum import Enum
from importlib import import_module
from typing import Any

from torch import nn

_MARKS = ("ds_id", "ds_status", "ds_numel", "ds_shape")


def __getattr__(name: str) -> Any:
    """Returns Init or GatheredParameters; their module imports this package, so it is imported late."""
    if name not in ("Init", "GatheredParameters"):
        raise AttributeError(name)
    return getattr(import_module("engine.deepspeed.zero"), name)


class ZeroParamStatus(Enum):
    """States of a parameter under ZeRO 3: gathered, sharded or being gathered."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


def mark_sharded(model: nn.Module) -> Callable[[], None]:
    """Sets DeepSpeed's ZeRO 3 attributes, such as ``ds_id`` and ``ds_shape``, on each parameter of ``model``.

    ``ds_status`` is always NOT_AVAILABLE. Returns a function that removes the attributes.
    """
    marked = list(model.parameters())
    for number, parameter in enumerate(marked):
        values = (number, ZeroParamStatus.NOT_AVAILABLE, parameter.numel(), parameter.shape)
        vars(parameter).update(zip(_MARKS, values, strict=True))

    def unmark() -> None:
        for parameter in marked:
            for name in _MARKS:
                vars(parameter).pop(name, None)

    return unmark
