"""Random and module state of a recomputed block: the second run reads the state of the first, then restores it.

    first run     counter 3 -> 4, list of 5 -> 6, running mean m -> m'
    ...           the state goes on: other microbatches, other blocks
    second run    on counter 3, the list of 5 and a copy of m; then everything is as it was before this run

A forward reaches state from the block or from its arguments: attributes of modules and of plain objects that they hold,
dicts, lists, sets and deques among these, and buffers, also those that are written in place. State elsewhere, in
globals or closures, is not seen. Generators of random numbers are seeded by whoever recomputes.
"""

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from operator import is_, itemgetter
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, NoneType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

Result = TypeVar("Result")
_LEFT = frozenset((*vars(nn.Module()), "forward")) - {"training"}
"""Attributes of modules that are torch's, or the slot of the engine's patches."""
_CLOSED = frozenset((
    bool, int, float, complex, str, bytes, NoneType, type, torch.dtype, torch.device, torch.Size, ModuleType,
    FunctionType, MethodType, BuiltinFunctionType,
))  # fmt: skip
_HOLDERS = frozenset((dict, OrderedDict, defaultdict, Counter, list, set, deque))
_DEPTH = 3
"""Holders are followed so deep into holders."""
_SMALL = 4096
"""Tensors of at most so many elements are copied whether forwards are known to write them or not."""
_NOTHING = object()


class BlockState:
    """Buffers and Python attributes of a block that its forward may read and change."""

    def __init__(self, block: nn.Module) -> None:
        self._modules = tuple(block.modules())
        self._modes: set[tuple[bool, ...]] = set()
        """Training flags of the modules in the forwards so far."""
        self._written: set[_Key] = set()
        """Tensors that a first run has written in place."""
        self._reach: _Reach | None = None
        """State that the forward before has found in the modules: most of it, or all, is found again."""

    def keeping(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a wrapper of ``forward`` for one call of the block and its recomputations.

        The first call is the normal forward. Each later call is a recomputation: it sets the state that the block had
        before the first call, runs, and then restores the state from before the recomputation.
        """
        found: list[_Found] = []

        def run(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return forward(*args, **kwargs)
            if not found:
                state = self._begin((*args, *kwargs.values()))
                out = forward(*args, **kwargs)
                self._end(state)
                found.append(state)
                return out
            state = found[0]
            before = state.enter()
            try:
                return forward(*args, **kwargs)
            finally:
                state.leave(before)

        return run

    def run_twice(self, first: Callable[[], Any], second: Callable[[], Result], arguments: tuple[Any, ...]) -> Result:
        """Runs ``first`` and undoes its changes to the block's state; then runs ``second`` and returns its result.

        ``arguments``: arguments of the block; changes by ``first`` to objects in them are undone too.
        """
        state = self._begin(arguments)
        before = state.enter()
        try:
            first()
        finally:
            state.leave(before)
        result = second()
        self._end(state)
        return result

    def _begin(self, arguments: tuple[Any, ...]) -> "_Found":
        """Note the state that a first run finds."""
        before = self._reach
        reach = before if before is not None and before.every.holds() else _Reach(self._modules, before)
        self._reach = None if reach.has_graph else reach
        state = _Found(reach, arguments)
        if state.has_tensors:
            mode = tuple(module.training for module in self._modules)
            state.copy(self._written, everything=mode not in self._modes)
            self._modes.add(mode)
        return state

    def _end(self, state: "_Found") -> None:
        """Drops state that a second run does not need."""
        if state.has_tensors:
            self._written |= state.settle(self._written)
        state.leave_unchanged()


_Before = tuple[list[dict[str, Any]], list[tuple[Any, Any]]]
"""Attributes of each space, and holders with their items."""
_Key = tuple[int, str]
"""Id of the attributes that hold a tensor, and its name."""


class _Space(NamedTuple):
    """Attributes of a module or of a plain object, or the buffers of a module."""

    live: dict[str, Any]
    values: dict[str, Any]
    """The values that the first run has found."""
    left: frozenset[str]
    """Names that are left alone."""
    of_module: bool
    tensors: list[tuple[str, Tensor]]
    others: list[Any]
    """Values that may have a state of their own."""


class _Contents:
    """The objects in dicts and other holders at one moment, compared later in one pass, since most never change."""

    def __init__(
        self, spaces: Iterable[_Space], holders: Iterable[Any], constant: Sequence[dict[str, Any]] = ()
    ) -> None:
        self._constant = constant
        """Attributes that nobody writes; another one may come."""
        self._views: list[Any] = []
        self._chosen: list[tuple[Callable[[Any], tuple[Any, ...]], dict[str, Any]]] = []
        """Of attributes some of which are left alone: the others, two and more."""
        for space in spaces:
            names = [name for name in space.live if name not in space.left]
            if len(names) > 1 and space.left:
                self._chosen.append((itemgetter(*names), space.live))
            else:
                self._views.append(space.live.values())
        for holder in holders:
            self._views += [holder, holder.values()] if isinstance(holder, dict) else [holder]
        self.items, self._sizes = tuple(self._items()), self._lengths()

    def holds(self) -> bool:
        """Returns True if all still have the same objects."""
        try:
            return self._lengths() == self._sizes and all(map(is_, self._items(), self.items))
        except KeyError:  # an attribute was deleted, and another one added
            return False

    def _items(self) -> Iterator[Any]:
        return chain(chain.from_iterable(self._views), *[chosen(live) for chosen, live in self._chosen])

    def _lengths(self) -> list[int]:
        return [*map(len, self._views), *[len(live) for _, live in self._chosen], *map(len, self._constant)]


@dataclass(slots=True)
class _Copied:
    """A tensor that forwards may write in place."""

    key: _Key
    tensor: Tensor
    version: int
    content: Tensor | None = None
    """A copy of the content before the first run."""

    def written(self, exactly: bool) -> bool:
        """Returns True if the tensor has been written since; ``exactly`` compares the content.

        The version alone is not enough: torch's batch normalisation writes its running mean without counting it.
        """
        if self.tensor._version != self.version:
            return True
        if not exactly or self.content is None or isinstance(self.tensor, FakeTensor):  # which has no content
            return False
        return not torch.equal(self.content, self.tensor)


class _Walk:
    """Spaces, holders and tensors that are reached from modules or arguments, each once."""

    def __init__(self, before: "_Walk | None") -> None:
        self.spaces: list[_Space] = []
        self.holders: list[tuple[Any, Any]] = []
        """Each with its items."""
        self.tensors: list[tuple[_Key, Tensor]] = []
        self.seen: set[int] = set()
        self._known = {id(space.live): space for space in before.spaces} if before is not None else {}

    def add_space(self, live: dict[str, Any], left: frozenset[str], of_module: bool) -> None:
        """Notes attributes and their contents."""
        if self._has_seen(live):
            return
        self.seen.add(id(live))
        space = self._known.get(id(live))
        if space is None or not _same(live, space.values):
            space = _read(live, left, of_module)
        self.spaces.append(space)
        for name, tensor in space.tensors:
            if not (tensor.requires_grad or tensor.is_meta):
                self.tensors.append(((id(live), name), tensor))
        self.add_values(space.others, 0, objects=of_module)

    def add_values(self, values: Iterable[Any], depth: int, objects: bool) -> None:
        """Note the holders among ``values``, those in them, and with ``objects`` the attributes of plain objects."""
        for value in values:
            kind = type(value)
            if kind in _CLOSED or isinstance(value, Tensor | nn.Module) or self._has_seen(value):
                continue
            if kind in _HOLDERS:
                self.seen.add(id(value))
                self.holders.append((value, value.copy()))
            if kind in _HOLDERS or isinstance(value, tuple):
                if depth < _DEPTH:
                    self.add_values(value.values() if isinstance(value, dict) else value, depth + 1, objects)
            elif objects and _is_plain(kind) and isinstance(getattr(value, "__dict__", None), dict):
                self.add_space(vars(value), frozenset(), of_module=False)

    def _has_seen(self, value: Any) -> bool:
        return id(value) in self.seen


class _Reach(_Walk):
    """State that a forward reaches from the modules of the block, whatever its arguments are."""

    def __init__(self, modules: tuple[nn.Module, ...], before: "_Reach | None") -> None:
        super().__init__(before)
        constant: list[dict[str, Any]] = []
        for module in modules:
            if _is_constant(module):
                constant.append(vars(module))
                continue
            self.add_space(vars(module), _LEFT, of_module=True)
            if isinstance(module._buffers, dict):  # not those of a scripted module
                self.add_space(module._buffers, frozenset(), of_module=True)
        self._known = {}
        holders = [holder for holder, _ in self.holders]
        self.own = [space for space in self.spaces if space.of_module]
        self.every = _Contents(self.spaces, holders, constant)
        self.kept = _Contents(self.own, holders)
        """Without the attributes of plain objects."""
        plain = [space for space in self.spaces if not space.of_module]
        self.plain = _Contents(plain, ()) if plain else None
        self.has_graph = any(isinstance(item, Tensor) and item.requires_grad for item in self.every.items)
        """Whether something holds activations."""


class _Found(_Walk):
    """The state that a first run has found: what its modules reach, and beside it what its arguments do."""

    def __init__(self, reach: _Reach, arguments: tuple[Any, ...]) -> None:
        super().__init__(None)
        self._reach = reach
        self.add_values(arguments, 0, objects=True)
        self._alone = not (self.spaces or self.holders or self.tensors)
        """The arguments have no state."""
        self.spaces = [*reach.spaces, *self.spaces]
        self.holders = [*reach.holders, *self.holders]
        self._tensors = [_Copied(key, tensor, tensor._version) for key, tensor in (*reach.tensors, *self.tensors)]
        self._exactly = False

    def _has_seen(self, value: Any) -> bool:
        return id(value) in self.seen or id(value) in self._reach.seen

    @property
    def has_tensors(self) -> bool:
        """True if forwards may write tensors in place."""
        return bool(self._tensors)

    def copy(self, written: set[_Key], everything: bool) -> None:
        """Copy the tensors that are small or known to be written, or ``everything``."""
        self._exactly = everything
        wanted = [t for t in self._tensors if everything or t.tensor.numel() <= _SMALL or t.key in written]
        _copy(wanted)

    def settle(self, written: set[_Key]) -> set[_Key]:
        """Drop the copies that a second run does not need, and return the tensors that the first run has written."""
        with _aside():
            found = {copied.key for copied in self._tensors if copied.written(self._exactly)}
        # written for the first time: a second run writes into a copy all the same
        _copy([copied for copied in self._tensors if copied.key in found and copied.content is None])
        needed = found | written
        self._tensors = [
            t for t in self._tensors if t.content is not None and (t.tensor.numel() <= _SMALL or t.key in needed)
        ]
        return found

    def leave_unchanged(self) -> None:
        """Leave plain objects alone that the first run has not changed, because other threads may write them."""
        if self._alone and (self._reach.plain is None or self._reach.plain.holds()):
            self.spaces = self._reach.own
        else:
            self.spaces = [space for space in self.spaces if space.of_module or not _same(space.live, space.values)]
            self._alone = False

    def enter(self) -> "_Before | None":
        """Restores the found state; returns the state before, None if it was the same."""
        if self._alone and not self._tensors and self._reach.kept.holds():
            return None
        now = [space.values if _same(space.live, space.values) else space.live.copy() for space in self.spaces]
        held = [(holder, holder.copy()) for holder, _ in self.holders]
        with _aside() if self._tensors else nullcontext():
            # the second run writes into tensors of its own, because backward may have saved those of the first run
            own = {id(t.tensor): t.content.clone() for t in self._tensors if t.content is not None}
        first = [space.values for space in self.spaces]
        if own:
            first = [{name: own.get(id(value), value) for name, value in values.items()} for values in first]
        self._write_back(first, self.holders)
        return now, held

    def leave(self, before: "_Before | None") -> None:
        """Ends the second run: restores the state ``before``."""
        if before is not None:
            self._write_back(*before)
        elif not self._reach.kept.holds():
            self._write_back([space.values for space in self.spaces], self.holders)

    def _write_back(self, values: list[dict[str, Any]], holders: list[tuple[Any, Any]]) -> None:
        for space, found in zip(self.spaces, values, strict=True):
            _write(space, found)
        _refill(holders)


def _copy(tensors: list[_Copied]) -> None:
    with _aside() if tensors else nullcontext():
        for copied in tensors:
            copied.content = copied.tensor.detach().clone()


def _read(live: dict[str, Any], left: frozenset[str], of_module: bool) -> _Space:
    values = [(name, value) for name, value in live.items() if type(value) not in _CLOSED and name not in left]
    tensors = [(name, value) for name, value in values if isinstance(value, Tensor)]
    others = [value for _, value in values if not isinstance(value, Tensor)]
    return _Space(live, live.copy(), left, of_module, tensors, others)


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Returns True if both have the same objects, by identity: ``==`` of tensors returns a tensor."""
    return len(one) == len(other) and all(map(is_, one.values(), other.values()))


def _write(space: _Space, values: dict[str, Any]) -> None:
    """Make ``values`` the attributes."""
    live, left = space.live, space.left
    if _same(live, values):
        return
    for name in [name for name in live if name not in values and name not in left]:
        del live[name]
    for name, value in values.items():
        if name not in left and live.get(name, _NOTHING) is not value:
            live[name] = value


def _is_constant(module: nn.Module) -> bool:
    """Returns True for a module of torch that writes nothing in forward and reads nothing that another one writes.

    All of its own attributes are constants that torch declares; it has no buffer and reads no training flag.
    """
    kind = type(module)
    return (
        kind.__module__.startswith("torch.nn.")
        and not module._buffers
        and vars(module).keys() - _LEFT - {"training"} <= set(getattr(kind, "__constants__", ()))
        and not _reads_mode(kind)
    )


def _reads_mode(kind: type[nn.Module]) -> bool:
    code = getattr(kind.forward, "__code__", None)
    return code is None or "training" in code.co_names


@contextmanager
def _aside() -> Iterator[None]:
    """Context of operations that are not the model's: no mode sees them."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


def _is_plain(kind: type) -> bool:
    """Returns True if the state of such objects is the user's: not torch's, and not the engine's."""
    return kind.__module__.partition(".")[0] not in ("torch", "engine")


def _refill(holders: list[tuple[Any, Any]]) -> None:
    """Give each holder its items again."""
    for holder, items in holders:
        same = len(holder) == len(items) and all(map(is_, holder, items))
        if not (same and (not isinstance(holder, dict) or all(map(is_, holder.values(), items.values())))):
            holder.clear()
            holder.extend(items) if isinstance(holder, list | deque) else holder.update(items)
