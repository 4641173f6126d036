"""Units and blocks of a model: modules that the engine treats as black boxes.

A *chain* is a ModuleList or Sequential; its children with parameters share one class, or several in a *hybrid* chain.
Its children are *blocks*. In a hybrid chain, blocks are the children that contain modules (attention and state-space
blocks alternately), and single layers among them are ordinary units. A *unit* is a block, or any other outermost module
with parameters. Code that runs outside units is *glue*.

    model ---- embed            unit
          +--- layers           chain
          |      +--- 0, 1, 2   units, and blocks: where a stage may start
          +--- norm, head       units
          +--- scale            a bare parameter: glue reads it
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from torch import nn

from engine.parallel.model.name_patterns import is_inside


@dataclass(frozen=True)
class Units:
    """Units of a model: its blocks, and outside the blocks the outermost modules with parameters.

    A block is an element of a chain: a ModuleList or Sequential of modules of equal or alternating classes.
    ``modules``: units by name.
    """

    modules: Mapping[str, nn.Module]
    blocks: tuple[str, ...]
    whole_blocks: tuple[str, ...]
    """Names of all blocks, including the blocks that :func:`open_units` has replaced by their children."""


def find_units(model: nn.Module, deep: bool = False, mixed: bool = False, closed: Collection[str] = ()) -> Units:
    """Finds the units of ``model``: elements of its ModuleLists and Sequentials, and other modules with parameters.

    Args:
        deep: True divides an element that contains a ModuleList or Sequential into the inner elements.
        mixed: True accepts a ModuleList or Sequential of modules of different classes.
        closed: names of modules; lists inside them, such as lists of experts, are not divided.
    """
    inside = {id(module) for name in closed for module in model.get_submodule(name).modules()}
    walk = _Walk(deep, mixed, inside)
    walk.visit(model, "")
    blocks = tuple(walk.blocks)
    return Units(MappingProxyType(walk.modules), blocks, blocks)


def open_units(units: Units, names: Iterable[str]) -> Units:
    """Returns ``units`` with each unit in ``names`` replaced by its children, so that a trace records each child."""
    opened = set(names)
    modules: dict[str, nn.Module] = {}
    blocks: list[str] = []
    for name, unit in units.modules.items():
        parts = {f"{name}.{key}": child for key, child in weighty_children(unit)} if name in opened else {name: unit}
        modules.update(parts)
        if name in units.blocks:
            blocks.extend(parts)
    return replace(units, modules=MappingProxyType(modules), blocks=tuple(blocks))


def open_around(units: Units, names: Iterable[str]) -> Units:
    """Returns ``units`` with entries replaced by their children until each module in ``names`` is itself a unit.

    Ignores names without a module or without parameters.
    """
    for name in names:
        around = _unit_around(units, name)
        while around is not None:
            units = open_units(units, [around])
            around = _unit_around(units, name)
    return units


def _unit_around(units: Units, name: str) -> str | None:
    """Returns the unit around the module ``name``, if that module has parameters, or None."""
    for unit, module in units.modules.items():
        if name.startswith(f"{unit}."):
            named = dict(module.named_modules(remove_duplicate=False))
            inner = named.get(name[len(unit) + 1 :])
            return unit if inner is not None and _weighty(inner) else None
    return None


def weighty_children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Returns (name, child) for each child of ``module`` that has parameters.

    A child with several names appears once per name.
    """
    return [(key, child) for key, child in module._modules.items() if child is not None and _weighty(child)]


def has_compiled_code(module: nn.Module) -> bool:
    """Returns True if ``torch.compile`` has compiled ``module``, in place or in a wrapper."""
    return module._compiled_call_impl is not None or isinstance(getattr(module, "_orig_mod", None), nn.Module)


def compiled_around(model: nn.Module, units: Collection[str]) -> dict[str, nn.Module]:
    """Returns compiled modules (``torch.compile``) of ``model`` that contain a module in ``units``, by name.

    Compiled modules in ``units`` are left out.
    """
    compiled = {name: module for name, module in model.named_modules() if has_compiled_code(module)}
    return {
        name: module
        for name, module in compiled.items()
        if name not in units and any(is_inside(unit, name) for unit in units)
    }


class _Walk:
    def __init__(self, deep: bool, mixed: bool, closed: Collection[int]) -> None:
        self.modules: dict[str, nn.Module] = {}
        self.blocks: list[str] = []
        self._deep, self._mixed, self._closed = deep, mixed, closed
        self._seen: set[int] = set()
        self._in_block = False

    def visit(self, module: nn.Module, name: str) -> None:
        """Adds ``module`` as a unit, or visits its children."""
        if id(module) in self._seen or not _weighty(module):
            return
        self._seen.add(id(module))
        prefix = f"{name}." if name else ""
        if self._is_chain(module):
            hybrid = self._is_hybrid(weighty_children(module))
            for key, child in weighty_children(module):
                if hybrid and not weighty_children(child):
                    self.visit(child, prefix + key)
                else:
                    self._visit_block(child, prefix + key)
        elif name and not any(self._is_chain(inner) for inner in module.modules()):
            self.modules[name] = module
        else:
            for key, child in weighty_children(module):
                self.visit(child, prefix + key)

    def _visit_block(self, block: nn.Module, name: str) -> None:
        outside, self._in_block = self._in_block, True
        if self._deep and any(self._is_chain(inner) and len(weighty_children(inner)) > 1 for inner in block.modules()):
            self.visit(block, name)
        elif id(block) not in self._seen:
            self._seen.add(id(block))
            self.modules[name] = block
            self.blocks.append(name)
        self._in_block = outside

    def _is_chain(self, module: nn.Module) -> bool:
        """Returns True for a chain. A ModuleList of one element is a chain: forward may call it many times (ALBERT)."""
        if not isinstance(module, nn.ModuleList | nn.Sequential) or id(module) in self._closed:
            return False
        children = weighty_children(module)
        if self._mixed and len(children) > 1:
            return True
        same = len({type(child) for _, child in children}) == 1
        if same:
            return len(children) > 1 or isinstance(module, nn.ModuleList)
        return self._is_hybrid(children)

    def _is_hybrid(self, children: Sequence[tuple[str, nn.Module]]) -> bool:
        """Returns True for several classes with blocks among them.

        Children that contain chains (experts) are blocks only if there are several of their class: an encoder between
        two adapters is not a block, but contains blocks. A bare container is no block either. Children of a block are
        no hybrid chain: a T5 block is a list of attention and perceptron, and stages skip it as a whole.
        """
        blocks = [child for _, child in children if weighty_children(child)]
        if self._mixed or self._in_block or len({type(child) for _, child in children}) == 1 or len(blocks) < 2:
            return False
        count = Counter(map(type, blocks))
        around = {type(block) for block in blocks if any(map(self._is_chain, block.modules()))}
        return all(count[kind] > 1 and kind not in _CONTAINERS for kind in around)


_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def _weighty(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
