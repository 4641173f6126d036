"""A forward that is put on a module and taken off again.

Calls of units pass through our hands: the instance attribute ``forward`` is replaced, and nothing else.

Class, attributes, hooks, ``isinstance`` and the places of the module in lists stay as they are, and forward hooks run
around whatever takes the place of the call. What was in the slot before (activation checkpointing puts its own
``forward`` there) is what the call runs, and is put back at the end.
"""

from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any, Protocol

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


_FORWARD, _COMPILED = "forward", "_compiled_call_impl"
_NOTHING = object()


class Handler(Protocol):
    """Gets the name of the unit, what it would run, and the arguments; returns what the call returns."""

    def __call__(
        self, unit: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any: ...


class Interception:
    """One unit whose calls go to ``handler``.

    ``skips(unit)`` says whether the call to come is one that the handler answers without running the unit: a
    compiled unit then runs its hooks around the handler's answer uncompiled, since its hooks lie inside what was
    compiled.
    """

    def __init__(self, unit: str, module: nn.Module, handler: Handler, skips: Callable[[str], bool]) -> None:
        self._unit, self._module = unit, module
        self._handler, self._skips = handler, skips
        self._compiled = getattr(module, _COMPILED, None)
        self._slot = _FORWARD if self._compiled is None else _COMPILED
        self._original: Callable[..., Any] = getattr(module, self._slot)
        self._before = vars(module).get(self._slot, _NOTHING)
        self._installed = self._call if self._compiled is None else self._call_compiled
        object.__setattr__(module, self._slot, self._installed)

    def remove(self) -> None:
        """Put back what was there, unless somebody has put something else over it."""
        if vars(self._module).get(self._slot) != self._installed:
            return
        if self._before is _NOTHING:
            object.__delattr__(self._module, self._slot)
        else:
            object.__setattr__(self._module, self._slot, self._before)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        return self._handler(self._unit, self._original, args, kwargs)

    def _call_compiled(self, *args: Any, **kwargs: Any) -> Any:
        if not self._skips(self._unit):
            return self._call(*args, **kwargs)
        before = vars(self._module).get(_FORWARD, _NOTHING)
        object.__setattr__(self._module, _FORWARD, self._call)
        try:
            return self._module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
        finally:
            if before is _NOTHING:
                object.__delattr__(self._module, _FORWARD)
            else:
                object.__setattr__(self._module, _FORWARD, before)
