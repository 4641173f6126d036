"""Which numbers of its modules the code of a block reads, while a plan is tried on it.

A number that was not read can have any value: dividing it gives the same result, and need not be tried.
"""

from collections.abc import Callable, Collection
from copy import copy
from typing import Any

from torch import nn

from engine.parallel.tensor.auto.strategies import Number

_CONFIG = "config."


class AttributeReads:
    """Notes in ``seen`` which of ``numbers`` are read."""

    def __init__(self, numbers: Collection[Number]) -> None:
        self._numbers = frozenset(numbers)
        self.seen: set[Number] = set(numbers)
        """All of them until a block is watched."""
        self._watching = False

    def watch(self, block: nn.Module) -> None:
        """Note what is read of a block that nobody else uses: its modules get classes that tell it."""
        if not self._watching:
            self._watching = True
            self.seen.clear()
        for path in sorted({number.module for number in self._numbers}):
            module = block.get_submodule(path)
            mine = {number.attribute for number in self._numbers if number.module == path}
            if any(name.startswith(_CONFIG) for name in mine):
                self._watch_config(module, path)
            module.__class__ = _asked(type(module), lambda name, path=path: self._note(path, name))  # type: ignore[misc]

    def _watch_config(self, module: nn.Module, path: str) -> None:
        config: Any = copy(module.config)
        aliases: dict[str, str] = getattr(config, "attribute_map", None) or {}

        def note(name: str) -> None:
            same = {name, aliases.get(name, name), *(alias for alias, own in aliases.items() if own == name)}
            for known in same:
                self._note(path, f"{_CONFIG}{known}")

        try:
            config.__class__ = _asked(type(config), note)
        except TypeError:  # a class with slots: as if all of it were read
            self.seen |= {n for n in self._numbers if n.module == path and n.attribute.startswith(_CONFIG)}
            return
        module.config = config

    def _note(self, path: str, name: str) -> None:
        if (number := Number(path, name)) in self._numbers:
            self.seen.add(number)


def _asked(own: type, note: Callable[[str], None]) -> type:
    def read(self: Any, name: str) -> Any:
        note(name)
        return own.__getattribute__(self, name)  # type: ignore[call-arg]

    return type(own.__name__, (own,), {"__getattribute__": read, "__module__": own.__module__})
