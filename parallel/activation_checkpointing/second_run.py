"""The state of a recomputed block: its second run sees what the first one saw, and leaves behind what it found.

    first run     counter 3 -> 4, list of 5 -> 6, running mean m -> m'
    ...           the state goes on: other microbatches, other blocks
    second run    on counter 3, the list of 5 and a copy of m; then everything is as it was before this run

State is what a forward reaches from the block or from its arguments: attributes of modules and of plain objects that
they hold, dicts, lists, sets and deques among these, and buffers, also those that are written in place. State
elsewhere, in globals or closures, is not seen. Generators of random numbers are seeded by whoever recomputes.
"""

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from operator import is_
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

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
    """What the forwards of one block read and write beside their parameters."""

    def __init__(self, block: nn.Module) -> None:
        self._modules = tuple(block.modules())
        self._modes: set[tuple[bool, ...]] = set()
        """Training flags of the modules in the forwards so far."""
        self._written: set[_Key] = set()
        """Tensors that a first run has written in place."""
        self._known: dict[int, _Space] = {}
        """What the forward before has found, by id of the attributes: most of it is found again."""

    def keeping(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """``forward`` for one call of the block: later calls run in the state that the first one has found."""
        found: list[_Found] = []

        def run(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return forward(*args, **kwargs)
            if found:
                with found[0].again():
                    return forward(*args, **kwargs)
            state, out = self._first(forward, args, kwargs)
            found.append(state)
            return out

        return run

    def _first(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> "tuple[_Found, Any]":
        mode = tuple(module.training for module in self._modules)
        new = mode not in self._modes
        self._modes.add(mode)
        state = _Found(self._modules, (*args, *kwargs.values()), self._known)
        self._known = {id(space.live): space for space in state.spaces if not space.has_graph}
        state.copy(self._written, everything=new)
        out = forward(*args, **kwargs)
        self._written |= state.settle(self._written, everything=new)
        return state, out


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

    @property
    def has_graph(self) -> bool:
        """Whether a value holds activations."""
        return any(tensor.requires_grad for _, tensor in self.tensors)


@dataclass(slots=True)
class _Copied:
    """A tensor that forwards may write in place."""

    key: _Key
    tensor: Tensor
    version: int
    content: Tensor | None = None
    """A copy of what the first run has found."""

    def written(self, exactly: bool) -> bool:
        """Whether it has been written since; ``exactly`` compares the content.

        The version alone is not enough: torch's batch normalisation writes its running mean without counting it.
        """
        if self.tensor._version != self.version:
            return True
        return exactly and self.content is not None and not torch.equal(self.content, self.tensor)


class _Found:
    """The state that a first run has found."""

    def __init__(self, modules: tuple[nn.Module, ...], arguments: tuple[Any, ...], known: dict[int, _Space]) -> None:
        self.spaces: list[_Space] = []
        self._known = known
        self._holders: list[tuple[Any, Any]] = []
        self._seen: set[int] = set()
        self._tensors: list[_Copied] = []
        for module in modules:
            self._add_space(vars(module), _LEFT, of_module=True)
            if isinstance(module._buffers, dict):  # not those of a scripted module
                self._add_space(module._buffers, frozenset(), of_module=True)
        self._add_values(arguments, 0, objects=True)

    def _add_space(self, live: dict[str, Any], left: frozenset[str], of_module: bool) -> None:
        if id(live) in self._seen:
            return
        self._seen.add(id(live))
        space = self._known.get(id(live))
        if space is None or not _same(live, space.values):
            space = _read(live, left, of_module)
        self.spaces.append(space)
        for name, tensor in space.tensors:
            if not (tensor.requires_grad or tensor.is_meta):
                self._tensors.append(_Copied((id(live), name), tensor, tensor._version))
        self._add_values(space.others, 0, objects=of_module)

    def _add_values(self, values: Iterable[Any], depth: int, objects: bool) -> None:
        """Note the holders among ``values``, those in them, and with ``objects`` the attributes of plain objects."""
        for value in values:
            kind = type(value)
            if kind in _CLOSED or isinstance(value, Tensor | nn.Module) or id(value) in self._seen:
                continue
            if kind in _HOLDERS:
                self._seen.add(id(value))
                self._holders.append((value, value.copy()))
            if kind in _HOLDERS or isinstance(value, tuple):
                if depth < _DEPTH:
                    self._add_values(value.values() if isinstance(value, dict) else value, depth + 1, objects)
            elif objects and _is_plain(kind) and isinstance(getattr(value, "__dict__", None), dict):
                self._add_space(vars(value), frozenset(), of_module=False)

    def copy(self, written: set[_Key], everything: bool) -> None:
        """Copy the tensors that are small or known to be written, or ``everything``."""
        wanted = [t for t in self._tensors if everything or t.tensor.numel() <= _SMALL or t.key in written]
        _copy(wanted)

    def settle(self, written: set[_Key], everything: bool) -> set[_Key]:
        """End the first run: drop what a second run does not need, and return the tensors that were written."""
        with _aside() if self._tensors else nullcontext():
            found = {copied.key for copied in self._tensors if copied.written(everything)}
        # written for the first time: a second run writes into a copy all the same
        _copy([copied for copied in self._tensors if copied.key in found and copied.content is None])
        needed = found | written
        self._tensors = [
            t for t in self._tensors if t.content is not None and (t.tensor.numel() <= _SMALL or t.key in needed)
        ]
        # other threads may write objects that are no modules, so they are left alone unless this run has changed them
        self.spaces = [space for space in self.spaces if space.of_module or not _same(space.live, space.values)]
        self._known = {}
        return found

    @contextmanager
    def again(self) -> Iterator[None]:
        """Context of a second run: the state is what was found, and afterwards what it was before."""
        now = [space.values if _same(space.live, space.values) else space.live.copy() for space in self.spaces]
        held = [(holder, holder.copy()) for holder, _ in self._holders]
        with _aside() if self._tensors else nullcontext():
            # the second run writes into tensors of its own, because backward may have saved those of the first run
            own = {id(t.tensor): t.content.clone() for t in self._tensors if t.content is not None}
        for space in self.spaces:
            _write(
                space,
                {name: own.get(id(value), value) for name, value in space.values.items()} if own else space.values,
            )
        _refill(self._holders)
        try:
            yield
        finally:
            for space, values in zip(self.spaces, now, strict=True):
                _write(space, values)
            _refill(held)


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
    """Whether both have the same objects; by identity, because ``==`` of tensors gives a tensor."""
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


@contextmanager
def _aside() -> Iterator[None]:
    """Context of operations that are not the model's: no mode sees them."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


def _is_plain(kind: type) -> bool:
    """Whether the state of such objects is the user's: not torch's, and not the engine's."""
    return kind.__module__.partition(".")[0] not in ("torch", "engine")


def _refill(holders: list[tuple[Any, Any]]) -> None:
    """Give each holder its items again."""
    for holder, items in holders:
        same = len(holder) == len(items) and all(map(is_, holder, items))
        if not (same and (not isinstance(holder, dict) or all(map(is_, holder.values(), items.values())))):
            holder.clear()
            holder.extend(items) if isinstance(holder, list | deque) else holder.update(items)
