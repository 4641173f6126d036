"""A forward that leaves no trace: random streams, buffers and attributes of the model are put back afterwards.

What may turn the forward of a model another way between two steps: plain attributes of its modules.

``model.gate = True`` makes a forward call or add something else, though its input looks as before. So what the
attributes say is part of what a forward is remembered by:

    bool, None or not None, string, number     of modules, and of plain objects that they hold (``model.config``)

A number or string that changes while the forward stays the same (a counter) is not looked at any more. What is
kept elsewhere, in globals or closures, is not seen.
"""

import random
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, NoneType
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def restoring_state(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Put back, at the end: the generators of torch, Python and numpy, every buffer's content, and what the
    attributes of the modules name, with the items of plain dicts and lists among them."""
    undo = [_undo_python_random(), *(_undo_module(module) for module in model.modules())]
    undo += [_undo_buffer(buffer) for buffer in model.buffers() if not buffer.is_meta]
    devices = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices), _uncompiled():
            yield
    finally:
        for step in undo:
            step()


def _uncompiled() -> Any:
    """A compiled module cannot be looked into; nothing is compiled unless dynamo has been loaded."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def _undo_python_random() -> Callable[[], None]:
    state = random.getstate()
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy else None

    def undo() -> None:
        random.setstate(state)
        if numpy:
            numpy.random.set_state(numpy_state)

    return undo


def _undo_buffer(buffer: Tensor) -> Callable[[], None]:
    content, version = buffer.detach().clone(), buffer._version

    def undo() -> None:
        if buffer._version != version:
            with torch.no_grad():
                buffer.copy_(content)

    return undo


def _undo_module(module: nn.Module) -> Callable[[], None]:
    attributes = dict(vars(module))
    plain = (dict, OrderedDict, list, set)
    holders = [(holder, holder.copy()) for holder in attributes.values() if type(holder) in plain]

    def undo() -> None:
        for holder, items in holders:
            if _differ(holder, items):
                holder.clear()
                holder.extend(items) if isinstance(holder, list) else holder.update(items)
        if _differ(vars(module), attributes):
            vars(module).clear()
            vars(module).update(attributes)

    return undo


def _differ(now: Any, before: Any) -> bool:
    """By identity: equality of tensors is a tensor."""
    return [*map(id, _items(now))] != [*map(id, _items(before))]


def _items(holder: Any) -> list[Any]:
    return [*holder.keys(), *holder.values()] if isinstance(holder, dict) else list(holder)


Place = tuple[str, str]
"""Module and attribute."""
State = Mapping[Place, Any]
_NOTHING = object()
_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}
_PLAIN = (bool, int, float, str, NoneType)
_CLOSED = (
    Tensor, nn.Module, type, ModuleType, FunctionType, MethodType, BuiltinFunctionType, dict, list, tuple,
)  # fmt: skip


class AttributeState:
    """Reads the plain attributes of one model."""

    def __init__(self, model: nn.Module) -> None:
        self._named = tuple(model.named_modules())
        self._idle: set[Place] = set()
        self._last: State = {}

    def read(self) -> State:
        """What every attribute says now, those found idle left out; the same object as long as nothing changes."""
        now = {place: value for place, value in self._plain() if place not in self._idle}
        if now != self._last:
            self._last = now
        return self._last

    def same(self, one: State, other: State) -> bool:
        """Whether two readings agree in all that counts."""
        return one is other or self._idle.issuperset(_changed(one, other))

    def settle(self, one: State, other: State) -> None:
        """The forwards under two readings were alike: numbers and strings that differ do not matter.

        A bool counts for ever: it cannot change in every step without coming back to what is remembered.
        """
        for place in _changed(one, other):
            values = one.get(place), other.get(place)
            if not all(isinstance(value, bool | None) for value in values):
                self._idle.add(place)

    def _plain(self) -> Iterator[tuple[Place, Any]]:
        seen: set[int] = set()
        for path, module in self._named:
            for name, value in vars(module).items():
                if name in _OF_TORCH:
                    continue
                if isinstance(value, _PLAIN):
                    yield (path, name), value
                elif not isinstance(value, _CLOSED) and id(value) not in seen:
                    seen.add(id(value))
                    for inner, held in getattr(value, "__dict__", {}).items():
                        if isinstance(held, _PLAIN):
                            yield (path, f"{name}.{inner}"), held


def _changed(one: State, other: State) -> Iterator[Place]:
    return (place for place in {**one, **other} if one.get(place, _NOTHING) != other.get(place, _NOTHING))
