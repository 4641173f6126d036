"""Units and blocks of a model: the modules that are treated as black boxes.

A *chain* is a ModuleList or Sequential whose children with parameters share one class; its children are *blocks*.
A *unit* is a block, or any other outermost module with parameters. Code that runs outside units is *glue*.

    model ---- embed            unit
          +--- layers           chain
          |      +--- 0, 1, 2   units, and blocks: where a stage may start
          +--- norm, head       units
          +--- scale            a bare parameter: glue reads it
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from torch import nn


@dataclass(frozen=True)
class Units:
    """The units of a model by name, in the order of the model, and the names of the blocks among them."""

    modules: Mapping[str, nn.Module]
    blocks: tuple[str, ...]


def find_units(model: nn.Module, deep: bool = False, mixed: bool = False) -> Units:
    """The units of ``model``.

    Args:
        deep: chains inside the elements of a chain give the blocks (Swin).
        mixed: a Sequential whose children have several classes is a chain too (VGG: convolutions and norms).
    """
    walk = _Walk(deep, mixed)
    walk.visit(model, "")
    return Units(MappingProxyType(walk.modules), tuple(walk.blocks))


def open_units(units: Units, names: Iterable[str]) -> Units:
    """The same units with those in ``names`` replaced by their children, so that values between these are seen."""
    opened = set(names)
    modules: dict[str, nn.Module] = {}
    blocks: list[str] = []
    for name, unit in units.modules.items():
        parts = {f"{name}.{key}": child for key, child in weighty_children(unit)} if name in opened else {name: unit}
        modules.update(parts)
        if name in units.blocks:
            blocks.extend(parts)
    return Units(MappingProxyType(modules), tuple(blocks))


def weighty_children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The children with parameters, including repeated ones, which ``named_children`` omits."""
    return [(key, child) for key, child in module._modules.items() if child is not None and _weighty(child)]


class _Walk:
    def __init__(self, deep: bool, mixed: bool) -> None:
        self.modules: dict[str, nn.Module] = {}
        self.blocks: list[str] = []
        self._deep, self._mixed = deep, mixed
        self._seen: set[int] = set()

    def visit(self, module: nn.Module, name: str) -> None:
        """Add ``module`` as a unit, or look inside it."""
        if id(module) in self._seen or not _weighty(module):
            return
        self._seen.add(id(module))
        prefix = f"{name}." if name else ""
        if self._is_chain(module):
            for key, child in weighty_children(module):
                self._visit_block(child, prefix + key)
        elif name and not any(self._is_chain(inner) for inner in module.modules()):
            self.modules[name] = module
        else:
            for key, child in weighty_children(module):
                self.visit(child, prefix + key)

    def _visit_block(self, block: nn.Module, name: str) -> None:
        if self._deep and any(self._is_chain(inner) and len(weighty_children(inner)) > 1 for inner in block.modules()):
            self.visit(block, name)
        elif id(block) not in self._seen:
            self._seen.add(id(block))
            self.modules[name] = block
            self.blocks.append(name)

    def _is_chain(self, module: nn.Module) -> bool:
        """True for a chain. A ModuleList of one element counts: it may be called many times (ALBERT)."""
        if not isinstance(module, nn.ModuleList | nn.Sequential):
            return False
        children = weighty_children(module)
        if self._mixed and isinstance(module, nn.Sequential):
            return len(children) > 1
        same = len({type(child) for _, child in children}) == 1
        return same and (len(children) > 1 or isinstance(module, nn.ModuleList))


def _weighty(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
