"""``deepspeed.runtime.zero.partition_parameters``: construction, full parameters, and states of a parameter."""

from enum import Enum
from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    """Init and GatheredParameters, whose module imports this package."""
    if name not in ("Init", "GatheredParameters"):
        raise AttributeError(name)
    return getattr(import_module("engine.deepspeed.zero"), name)


class ZeroParamStatus(Enum):
    """States of a parameter at ZeRO 3. Parameters here have no ``ds_status``: a gather is the engine's own."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3
