"""Reader of pickles that does not execute them.

The opcodes are interpreted here; nothing is imported, called or looked up. Plain values become themselves. An import
becomes a :class:`PickledName`; a call or an object becomes a :class:`PickledObject` with its name, arguments and state.
``torch_file`` turns the few calls in torch's files (an ordered dict, a size, a tensor) into values.
"""

import pickletools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.errors import COPY_AGAIN, CheckpointError

LIMIT = 1 << 28
"""Largest bytes of a pickle; enough for about 1,000,000 tensors."""
NODES = 1 << 20
"""Most values that ``plain`` copies: a small pickle may repeat one list so often that a copy exceeds memory."""


@dataclass(frozen=True, slots=True)
class PickledName:
    """Module and name of a class or function that a pickle refers to. It is not imported."""

    module: str
    attribute: str

    def __str__(self) -> str:
        return f"{self.module}.{self.attribute}"


@dataclass(eq=False, repr=False, slots=True)
class PickledObject:
    """Description of an object in a pickle: class, constructor arguments and state. The object is not constructed."""

    name: PickledName
    arguments: tuple[Any, ...] = ()
    state: Any = None
    items: dict[Any, Any] = field(default_factory=dict)
    """Dict entries that the pickle adds to the object."""
    elements: list[Any] = field(default_factory=list)
    """List elements that the pickle adds to the object."""

    def get(self, attribute: str) -> Any:
        """Returns an attribute from the object's pickled state; None if the state lacks it."""
        state = self.state[0] if isinstance(self.state, tuple) and self.state else self.state
        return state.get(attribute) if isinstance(state, dict) else None


Call = Callable[[PickledName, tuple[Any, ...]], Any]
"""Function from a pickled call to its value, or to a :class:`PickledObject` if it is unknown."""


def read_pickle(
    data: bytes | bytearray, what: str, call: Call = PickledObject, persistent: Callable[[Any], Any] = id
) -> Any:
    """Decodes a pickle without importing or calling anything that it names; returns its value.

    Args:
        what: name of the file, for messages.
        call: function ``(name, arguments)`` that returns the value of a call in the pickle; by default, a
            ``PickledObject``.
        persistent: function that returns the value of a persistent id. Files of torch refer to storages by such ids.
            The default is for pickles without them.

    Raises:
        CheckpointError: the pickle is damaged, or has opcodes that torch does not write.
    """
    if len(data) > LIMIT:
        raise CheckpointError(
            f"{what} is damaged: its pickle has {len(data):,} bytes, but at most {LIMIT:,} are read; {COPY_AGAIN}"
        )
    try:
        return _Machine(what, call, persistent).run(bytes(data))
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError, OverflowError) as error:
        raise CheckpointError(
            f"{what} is damaged: its pickle cannot be read ({type(error).__name__}); {COPY_AGAIN}"
        ) from error


def plain(value: Any, dropped: list[str], path: str = "") -> Any:
    """Returns a copy of ``value`` in JSON types. Other values are left out of dicts and become None in lists.

    Their paths, such as "args.lr" or "items[2]", are added to ``dropped``. ``path``: path of ``value`` itself.

    Raises:
        CheckpointError: the value has more than 2^20 entries, or more than 100 levels.
    """
    count = 0

    def copy(value: Any, path: str, depth: int) -> Any:
        nonlocal count
        count += 1
        if count > NODES or depth > 100:
            raise CheckpointError(f"{path[:60]!r} has too many values for a state: the file is damaged; {COPY_AGAIN}")
        if isinstance(value, dict):
            found = {str(key): copy(item, f"{path}.{key}"[:200], depth + 1) for key, item in value.items()}
            return {key: item for key, item in found.items() if item is not _DROPPED}
        if isinstance(value, list | tuple):
            items = [copy(item, f"{path}[{index}]"[:200], depth + 1) for index, item in enumerate(value)]
            return [None if item is _DROPPED else item for item in items]
        if value is None or isinstance(value, bool | int | str):
            return value
        if isinstance(value, float) and value - value == 0:
            return value
        dropped.append(path.removeprefix("."))
        return _DROPPED

    found = copy(value, path, 0)
    return None if found is _DROPPED else found


_DROPPED = object()
_SCALARS = (str, int, float, bool, bytes, type(None), PickledName, PickledObject)
_CONSTANTS: Mapping[str, Callable[[], Any]] = {
    "NONE": lambda: None, "NEWTRUE": lambda: True, "NEWFALSE": lambda: False, "EMPTY_DICT": dict, "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple, "EMPTY_SET": list,
}  # fmt: skip
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_NOTHING = frozenset({"PROTO", "FRAME", "STOP"})
_LITERALS = frozenset({
    "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT", "UNICODE", "BINUNICODE",
    "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8", "STRING", "BINSTRING",
    "SHORT_BINSTRING",
})  # fmt: skip


class _Machine:
    """Stack and memo of a pickle."""

    def __init__(self, what: str, call: Call, persistent: Callable[[Any], Any]) -> None:
        self._what, self._call, self._persistent = what, call, persistent
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []
        """Stacks below each mark."""
        self._memo: dict[int, Any] = {}

    def run(self, data: bytes) -> Any:
        for opcode, argument, _ in pickletools.genops(data):
            name = opcode.name
            if name in _LITERALS:
                self._stack.append(argument)
            elif name in _CONSTANTS:
                self._stack.append(_CONSTANTS[name]())
            elif name in _TUPLES:
                count = _TUPLES[name]
                self._stack.append(tuple(self._pop() for _ in range(count))[::-1])
            elif name not in _NOTHING:
                step = getattr(self, f"on_{name.lower()}", None)
                if step is None:
                    raise CheckpointError(
                        f"{self._what} has the pickle opcode {name}, which torch.save does not write; save the "
                        "checkpoint again with torch.save."
                    )
                step(argument)
        (value,) = self._stack
        return value

    def _pop(self) -> Any:
        return self._stack.pop()

    def on_mark(self, _: Any) -> None:
        self._below.append(self._stack)
        self._stack = []

    def _popped(self) -> list[Any]:
        """Returns everything above the last mark."""
        found, self._stack = self._stack, self._below.pop()
        return found

    def _top(self) -> Any:
        return self._stack[-1]

    # ------------------------------------------------------------------ memo

    def on_memoize(self, _: Any) -> None:
        self._memo[len(self._memo)] = self._top()

    def on_put(self, index: Any) -> None:
        self._memo[int(index)] = self._top()

    def on_get(self, index: Any) -> None:
        self._stack.append(self._memo[int(index)])

    on_binput = on_long_binput = on_put
    on_binget = on_long_binget = on_get

    # ------------------------------------------------------------------ containers

    def on_tuple(self, _: Any) -> None:
        values = self._popped()
        self._stack.append(tuple(values))

    def on_list(self, _: Any) -> None:
        values = self._popped()
        self._stack.append(values)

    on_frozenset = on_list

    def on_dict(self, _: Any) -> None:
        target: dict[Any, Any] = {}
        _fill(target, self._popped())
        self._stack.append(target)

    def on_append(self, _: Any) -> None:
        value = self._pop()
        _elements(self._top()).append(value)

    def on_appends(self, _: Any) -> None:
        values = self._popped()
        _elements(self._top()).extend(values)

    on_additems = on_appends

    def on_setitem(self, _: Any) -> None:
        value, key = self._pop(), self._pop()
        _fill(_items(self._top()), [key, value])

    def on_setitems(self, _: Any) -> None:
        values = self._popped()
        _fill(_items(self._top()), values)

    def on_pop_mark(self, _: Any) -> None:
        self._popped()

    # ------------------------------------------------------------------ names and calls

    def on_global(self, argument: Any) -> None:
        self._stack.append(PickledName(*str(argument).split(" ", 1)))

    def on_stack_global(self, _: Any) -> None:
        attribute, module = self._pop(), self._pop()
        if not isinstance(module, str) or not isinstance(attribute, str):
            raise TypeError("a name that is no text")
        self._stack.append(PickledName(module, attribute))

    def on_reduce(self, _: Any) -> None:
        arguments, callee = self._pop(), self._pop()
        self._stack.append(self._called(callee, arguments))

    on_newobj = on_reduce

    def on_newobj_ex(self, _: Any) -> None:
        options, arguments, callee = self._pop(), self._pop(), self._pop()
        if options:
            raise TypeError("options of a call")
        self._stack.append(self._called(callee, arguments))

    def _called(self, callee: Any, arguments: Any) -> Any:
        if not isinstance(arguments, tuple):
            raise TypeError("arguments that are no tuple")
        if not isinstance(callee, PickledName):  # the result of a call is called again
            return PickledObject(PickledName("", "?"), (callee, *arguments))
        return self._call(callee, arguments)

    def on_build(self, _: Any) -> None:
        state, target = self._pop(), self._top()
        if isinstance(target, PickledObject):
            target.state = state

    def on_persid(self, argument: Any) -> None:
        self._stack.append(self._persistent(argument))

    def on_binpersid(self, _: Any) -> None:
        self._stack.append(self._persistent(self._pop()))


def _items(target: Any) -> dict[Any, Any]:
    found: Any = target.items if isinstance(target, PickledObject) else target
    if not isinstance(found, dict):
        raise TypeError("items of what is no dict")
    return found


def _elements(target: Any) -> list[Any]:
    found: Any = target.elements if isinstance(target, PickledObject) else target
    if not isinstance(found, list):
        raise TypeError("elements of what is no list")
    return found


def _fill(target: dict[Any, Any], values: list[Any]) -> None:
    for key, value in zip(_keys(values), values[1::2], strict=True):
        target[key] = value


def _keys(values: list[Any]) -> Iterator[Any]:
    """Yields keys of one level; hashing a deeper tuple may exhaust the interpreter's stack."""
    for key in values[::2]:
        if not isinstance(key, _SCALARS) and not (
            isinstance(key, tuple) and all(isinstance(item, _SCALARS) for item in key)
        ):
            raise TypeError("a key that is no scalar")
        yield key
