"""``deepspeed.runtime.zero``: what ``deepspeed.zero`` has, under the paths that scripts import."""

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    """Init and GatheredParameters, whose module imports this package."""
    if name not in ("Init", "GatheredParameters"):
        raise AttributeError(name)
    return getattr(import_module("engine.deepspeed.zero"), name)
