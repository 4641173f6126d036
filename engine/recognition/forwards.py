"""A forward that is put on a module and taken off again."""

from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

from torch import nn


def put_on(module: nn.Module, forward: Callable[..., Any]) -> Callable[[], None]:
    """Let ``forward`` run in place of the module's own; what is returned takes it off.

    It is a bound method, so that it belongs to the copy in a copied module.
    """
    before = vars(module).get("forward")
    object.__setattr__(module, "forward", MethodType(forward, module))

    def take_off() -> None:
        if before is None:
            vars(module).pop("forward", None)
        else:
            object.__setattr__(module, "forward", before)

    return take_off


def with_global(function: FunctionType, name: str, value: Any) -> FunctionType:
    """``function`` with another global of this name; its module keeps its own."""
    scope = {**function.__globals__, name: value}
    scope.pop("__name__", None)  # by which torch.compile would look globals up in the module
    code = function.__code__.replace()  # what torch.compile has made of the other is kept with its code
    made = FunctionType(code, scope, function.__name__, function.__defaults__, function.__closure__)
    made.__kwdefaults__ = function.__kwdefaults__
    made.__module__ = function.__module__
    made.__dict__.update(function.__dict__)
    return made
