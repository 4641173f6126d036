"""Replacing the ``forward`` of a module, and putting the original back.

``put_on`` installs another forward (a kernel, recomputation); ``Interception`` passes every call of a unit to a
handler. Both set only the instance attribute ``forward`` (``_compiled_call_impl`` of a compiled module).

Class, other attributes, ``isinstance`` and the module's position in lists stay as they are, and forward hooks run
around the replacement. The previous value of the attribute (activation checkpointing sets a ``forward`` of its own) is
what the replacement calls, and is restored at the end.
"""

from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any, Protocol

from torch import nn


def put_on(module: nn.Module, forward: Callable[..., Any]) -> Callable[[], None]:
    """Replace the module's ``forward``; returns a function that restores the previous one.

    The replacement is a bound method, so that a copy of the module has its own.
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
    """A copy of ``function`` in which the global ``name`` has another value; the original keeps its own."""
    scope = {**function.__globals__, name: value}
    scope.pop("__name__", None)  # torch.compile would use it to look globals up in the original module
    code = function.__code__.replace()  # a copy, since torch.compile caches its result with the code object
    made = FunctionType(code, scope, function.__name__, function.__defaults__, function.__closure__)
    made.__kwdefaults__ = function.__kwdefaults__
    made.__module__ = function.__module__
    made.__dict__.update(function.__dict__)
    return made


_FORWARD, _COMPILED = "forward", "_compiled_call_impl"


_NOTHING = object()


class Handler(Protocol):
    """Takes the name of the unit, its original forward and the arguments; returns the result of the call."""

    def __call__(
        self, unit: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any: ...


class Interception:
    """Passes the calls of one unit to ``handler``.

    ``skips(unit)`` tells whether the handler will answer the coming call without running the unit. A compiled unit then
    runs its hooks eagerly around that answer, since they are part of the compiled code.
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
        """Restore the previous value of the slot, unless something else has replaced it since."""
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
