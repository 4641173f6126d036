"""``deepspeed.runtime.zero.partition_parameters``: construction, full parameters, and states of a parameter."""

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
    """States of a parameter at ZeRO 3."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


def mark_sharded(model: nn.Module) -> Callable[[], None]:
    """Sets the attributes on each parameter that scripts read at ZeRO 3; returns a function that removes them.

    ``ds_status`` stays NOT_AVAILABLE, so a script that gathers parameters by it always may; gathers can be nested.
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
