"""Side effects of a forward: their restoration after a trial run, and attributes that may change the forward's path.

``restoring_state`` restores random streams, buffers and attributes of the model after a forward.

``AttributeState`` reads the plain attributes of the modules. ``model.gate = True`` may change the calls of a forward
with unchanged inputs, so the values of attributes are part of a traced forward's cache key:

    bool, None or not None, string, number     of modules, and of their plain objects (``model.config``)

A number or string that changes without a change of the forward (a counter) is ignored from then on. Values in globals
or closures are not read.
"""

import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from threading import Lock
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, NoneType
from typing import Any

import torch
from torch import Tensor, nn

from engine.kernels.device import device_generator
from engine.parallel.model.placeholders import is_without_content
from engine.parallel.model.rng_streams import HostState


@contextmanager
def restoring_state(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Restores ``model`` and the random generators at the end of the context.

    This includes the generators of torch, Python and NumPy, all buffers and all attributes of modules, but no values or
    gradients of parameters.
    """
    undo = [HostState.take().put, *(_undo_module(module) for module in model.modules())]
    undo += [_undo_buffer(buffer) for buffer in model.buffers() if not buffer.is_meta]
    has_own = device_generator(device) is not None
    own: dict[str, Any] = {"devices": [device], "device_type": device.type} if has_own else {"devices": []}
    try:
        with torch.random.fork_rng(**own), _EAGER:
            yield
    finally:
        for step in undo:
            step()


def forward_settings(module: nn.Module) -> tuple[object, ...]:
    """Returns a hashable key of the attributes and buffers of ``module`` and its submodules.

    A result of a trial of one module holds for all modules of the same code, parameter shapes and settings. Objects
    other than numbers, strings, dtypes and devices are equal if they are the same object.
    """
    return tuple(
        (path, type(each), *sorted((name, _comparable(value)) for name, value in _settings_of(each)))
        for path, each in module.named_modules()
    )


def _settings_of(module: nn.Module) -> Iterator[tuple[str, Any]]:
    yield from module._buffers.items()
    yield from ((name, value) for name, value in vars(module).items() if name not in _OF_TORCH and name != "training")


def _comparable(value: Any) -> str:
    if type(value) is Tensor and (value.is_meta or value.numel() <= _FEW):
        return repr((tuple(value.shape), value.dtype, None if value.is_meta else value.tolist()))
    plain = all(isinstance(one, _COMPARED) for one in (value if isinstance(value, list | tuple) else (value,)))
    return repr(value) if plain else f"{type(value)} {id(value)}"


class _EagerForwards:
    """Context of eager runs of compiled modules, which cannot be observed; without effect before dynamo is loaded.

    The compiler has one stance for all threads. Ranks that are threads exit in any order, so the first thread to enter
    sets the stance and the last one to exit restores it.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._inside = 0
        self._stance: AbstractContextManager[None] | None = None

    def __enter__(self) -> None:
        with self._lock:
            self._inside += 1
            if self._stance is None and "torch._dynamo" in sys.modules:
                self._stance = torch.compiler.set_stance("force_eager")

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._stance is not None and not self._inside:
                self._stance.__exit__(None, None, None)
                self._stance = None


_EAGER = _EagerForwards()


def overwrite(target: Tensor, values: Tensor) -> None:
    """Copies ``values`` into ``target``, a tensor of the same shape that may be expanded: such dims have one element in
    memory.
    """
    once = tuple(slice(None) if stride else slice(1) for stride in target.stride())
    target[once].copy_(values[once])


def _undo_buffer(buffer: Tensor) -> Callable[[], None]:
    content, version = buffer.detach().clone(), buffer._version

    def undo() -> None:
        # batch normalisation writes its running mean without counting it
        if buffer._version != version or not (is_without_content(buffer) or torch.equal(buffer, content)):
            with torch.no_grad():
                overwrite(buffer, content)

    return undo


def _undo_module(module: nn.Module) -> Callable[[], None]:
    attributes = dict(vars(module))
    holders = [(holder, holder.copy()) for holder in _holders(attributes.values())]

    def undo() -> None:
        for holder, items in holders:
            if _differ(holder, items):
                holder.clear()
                holder.extend(items) if isinstance(holder, list | deque) else holder.update(items)
        if _differ(vars(module), attributes):
            vars(module).clear()
            vars(module).update(attributes)

    return undo


def _holders(values: Iterable[Any], depth: int = 0) -> Iterator[Any]:
    """Yields the holders among ``values``, and those inside them, from outside to inside."""
    for value in values:
        if type(value) in _HOLDERS:
            yield value
        if depth < _DEPTH and type(value) in (*_HOLDERS, tuple):
            yield from _holders(value.values() if isinstance(value, dict) else value, depth + 1)


_HOLDERS = (dict, OrderedDict, defaultdict, Counter, list, set, deque)
_DEPTH = 3
"""Holders are followed so deep into holders."""


def _differ(now: Any, before: Any) -> bool:
    """Compares by identity, because ``==`` of tensors returns a tensor."""
    return [*map(id, _items(now))] != [*map(id, _items(before))]


def _items(holder: Any) -> list[Any]:
    return [*holder.keys(), *holder.values()] if isinstance(holder, dict) else list(holder)


Place = tuple[str, str]
"""Pair (module path, attribute name)."""
State = Mapping[Place, Any]
_NOTHING = object()
_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}
_PLAIN = (bool, int, float, str, NoneType)
_COMPARED = (*_PLAIN, torch.dtype, torch.device)
_FEW = 1 << 10
"""Elements up to which two tensors are compared by content."""
_CLOSED = (
    Tensor, nn.Module, type, ModuleType, FunctionType, MethodType, BuiltinFunctionType, dict, list, tuple,
)  # fmt: skip


class AttributeState:
    """Reader of the plain attributes (bools, numbers, strings, None) of all modules of ``model``."""

    def __init__(self, model: nn.Module) -> None:
        self._named = tuple(model.named_modules())
        self._idle: set[Place] = set()
        self._last: State = {}

    def read(self) -> State:
        """Returns all values except the ones that :meth:`settle` excludes; the same object until a value changes."""
        now = {place: value for place, value in self._plain() if place not in self._idle}
        if now != self._last:
            self._last = now
        return self._last

    def same(self, one: State, other: State) -> bool:
        """Returns True if ``one`` and ``other``, results of :meth:`read`, differ only in attributes excluded by
        :meth:`settle`.
        """
        return one is other or self._idle.issuperset(_changed(one, other))

    def settle(self, one: State, other: State) -> None:
        """Excludes from :meth:`read` the attributes with different numbers or strings in ``one`` and ``other``.

        Call it if the forwards in both states had the same trace, which shows that these attributes do not matter.
        Bools are never excluded.
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
                elif not isinstance(value, _CLOSED) and not _is_ours(value) and id(value) not in seen:
                    seen.add(id(value))
                    for inner, held in getattr(value, "__dict__", {}).items():
                        if isinstance(held, _PLAIN):
                            yield (path, f"{name}.{inner}"), held


def _is_ours(value: object) -> bool:
    """Returns True for the engine's objects on modules; changes of them do not change a forward."""
    return type(value).__module__.partition(".")[0] == __name__.partition(".")[0]


def _changed(one: State, other: State) -> Iterator[Place]:
    return (place for place in {**one, **other} if one.get(place, _NOTHING) != other.get(place, _NOTHING))
