"""``deepspeed.runtime.engine``: the class of the engine object."""

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    """Returns DeepSpeedEngine; its module imports this package, so it is imported late."""
    if name not in ("DeepSpeedEngine",):
        raise AttributeError(name)
    return getattr(import_module("engine.deepspeed.deepspeed_engine"), name)
