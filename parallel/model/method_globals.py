"""Replacement of global names in methods of a model: the methods of this model's modules call other functions.

The functions themselves are unchanged, because other models call them. A method is copied with other globals, also the
functions of a user that it calls, and the ones its decorators wrap.
"""

from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import nn

from engine.parallel.model.forward_patch import ForwardPatches, PatchLayer, with_globals

Choice = Callable[[Any], Any]
"""Function that returns the replacement of a global value, or the value itself."""
_DEEPEST = 16
"""Maximum number of functions on the way from a method to a replaced global."""


def replace_in_methods(
    model: nn.Module, patches: ForwardPatches, layer: PatchLayer, note: str, choose: Choice, libraries: bool = True
) -> None:
    """Makes methods of the modules of ``model`` read other values of global variables.

    ``choose(value)`` returns the replacement of a global's value, or ``value`` itself. ``libraries``: True to patch
    also methods of libraries such as transformers. ``layer``, ``note``: position and effect of the patches.
    """
    found = _Copies(choose)
    by_class: dict[type, dict[str, FunctionType]] = {}
    for module in model.modules():
        owner = type(module)
        if owner not in by_class:
            methods = class_values(owner)
            by_class[owner] = {
                name: method
                for name, method in methods
                if isinstance(method, FunctionType) and (libraries or not _is_library(method))
            }
        made = dict(_changed(module, by_class[owner], found))
        if made:
            with patches.changing(module, layer, note):
                for name, method in made.items():
                    object.__setattr__(module, name, MethodType(method, module))


def class_values(owner: type) -> Iterator[tuple[str, Any]]:
    """Yields (name, value) for each attribute of the class ``owner`` and of its base classes outside torch."""
    seen = set[str]()
    for base in owner.__mro__:
        if base is not object and not (base.__module__ or "").startswith("torch."):
            yield from ((name, value) for name, value in vars(base).items() if name not in seen)
            seen.update(vars(base))


def _changed(
    module: nn.Module, methods: dict[str, FunctionType], found: "_Copies"
) -> Iterator[tuple[str, FunctionType]]:
    for name, method in methods.items():
        own = vars(module).get(name)
        if own is not None and not (isinstance(own, MethodType) and isinstance(own.__func__, FunctionType)):
            continue
        given: Any = method if own is None else own.__func__
        made = found.of(given)
        if made is not given:
            yield name, made


class _Copies:
    """Copies of functions with replaced globals, one for each function."""

    def __init__(self, choose: Choice) -> None:
        self._choose = choose
        self._made: dict[FunctionType, FunctionType] = {}

    def of(self, function: FunctionType, depth: int = 0) -> FunctionType:
        """Returns ``function``, or a copy of it, and of a function that it wraps, with replaced globals.

        ``depth``: number of functions on the way from a method; a library may call thousands.
        """
        if depth > _DEEPEST:
            return function
        if function not in self._made:
            self._made[function] = function  # a function that calls itself
            self._made[function] = self._copied(function, depth)
        return self._made[function]

    def _copied(self, function: FunctionType, depth: int) -> FunctionType:
        replaced = {}
        for name in _names(function.__code__):
            given = function.__globals__.get(name)
            if given is not None and (made := self._replaced(given, depth)) is not given:
                replaced[name] = made
        wrapped, inner = vars(function).get("__wrapped__"), {}
        if isinstance(wrapped, FunctionType) and (made := self.of(wrapped, depth + 1)) is not wrapped:
            cells = function.__closure__ or ()
            inner = {place: made for place, cell in enumerate(cells) if cell.cell_contents is wrapped}
        return with_globals(function, replaced, inner) if replaced or inner else function

    def _replaced(self, given: Any, depth: int) -> Any:
        made = self._choose(given)
        if made is given and isinstance(given, FunctionType) and not _is_library(given):
            return self.of(given, depth + 1)
        return made


def _is_library(function: FunctionType) -> bool:
    return (function.__module__ or "").split(".")[0] in ("builtins", "engine", "numpy", "torch", "transformers")


def _names(code: CodeType) -> Iterator[str]:
    """Yields the global names of a function, and of the functions inside it."""
    yield from code.co_names
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from _names(value)
