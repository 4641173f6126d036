"""``deepspeed.runtime.zero``: the names of ``deepspeed.zero`` under the paths that scripts import."""

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    """Returns Init or GatheredParameters; their module imports this package, so it is imported late."""
    if name not in ("Init", "GatheredParameters"):
        raise AttributeError(name)
    return getattr(import_module("engine.deepspeed.zero"), name)
