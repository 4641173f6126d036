"""Calls of units pass through our hands: the instance attribute ``forward`` is replaced, and nothing else.

Class, attributes, hooks, ``isinstance`` and the places of the module in lists stay as they are, and forward hooks run
around whatever takes the place of the call. What was in the slot before (activation checkpointing puts its own
``forward`` there) is what the call runs, and is put back at the end.
"""

from collections.abc import Callable
from typing import Any, Protocol

from torch import nn

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
