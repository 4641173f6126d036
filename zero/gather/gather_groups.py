"""Gather groups: modules with sharded parameters that are gathered together (ZeRO 3).

    before     embed, position        all modules before the first block
    blocks     layers.0 ... layers.7  one group each; modules between two chains of blocks join the block before them
    after      norm, head             all modules after the last block

A model without blocks has one group for each of its modules. Modules are taken in the order of their first calls where
it is known, else in the order of their definition; a module that runs before its turn is gathered twice.

:class:`GatheredModules` intercepts the calls of these modules, to announce to the gatherer the groups that are about to
run.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from engine.parallel.model.blocks import find_units
from engine.parallel.model.forward_patch import ForwardPatches, Interception, PatchLayer
from engine.parallel.model.name_patterns import is_inside
from engine.parallel.tensor.logits.sharded_logits import compute_lazy
from engine.zero.gather.gather_schedule import GatherOrder
from engine.zero.gather.gatherer import ParameterGatherer


@dataclass(frozen=True, slots=True)
class GatherGroups:
    """Division of a model's modules into groups. The sharded parameters of a group are gathered together."""

    modules: tuple[tuple[str, ...], ...]
    """Names of the modules in each group."""
    of_parameter: Mapping[str, tuple[int, ...]]
    """Groups that use each parameter, by its first name; empty if no known module uses it."""


def find_gather_groups(model: nn.Module, calls: Sequence[str] = (), closed: Collection[str] = ()) -> GatherGroups:
    """Divides the modules of ``model`` into gather groups, each gathered as a whole: one for each block, and groups for
    modules before the first block and after the last.

    Args:
        calls: names of modules in the order in which a forward calls them.
        closed: names of modules that are never divided between groups.
    """
    units = find_units(model, deep=True, closed=closed)
    modules = _grouped(_in_order(list(units.modules), calls), set(units.blocks)) if units.modules else [[""]]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    users: dict[str, set[int]] = {name: set() for name in names.values()}
    for index, group in enumerate(modules):
        for module in group:
            for parameter in model.get_submodule(module).parameters():
                users[names[id(parameter)]].add(index)
    of_parameter = {name: tuple(sorted(groups)) for name, groups in users.items()}
    return GatherGroups(tuple(map(tuple, modules)), of_parameter)


def _in_order(units: Sequence[str], calls: Sequence[str]) -> list[str]:
    """Sorts units by the first call of the unit, or of a module in it or around it; other units follow their
    neighbour."""
    places: list[int] = []
    for unit in units:
        related = (place for place, call in enumerate(calls) if is_inside(call, unit) or is_inside(unit, call))
        places.append(next(related, places[-1] if places else 0))
    return [unit for _, unit in sorted(zip(places, units, strict=True), key=lambda pair: pair[0])]


def _grouped(units: Sequence[str], blocks: set[str]) -> list[list[str]]:
    if not blocks:
        return [[unit] for unit in units]
    positions = [index for index, unit in enumerate(units) if unit in blocks]
    first, end = positions[0], positions[-1] + 1
    groups = [list(units[:first])]
    for unit in units[first:end]:
        if unit in blocks:
            groups.append([unit])
        else:
            groups[-1].append(unit)
    return [group for group in (*groups, list(units[end:])) if group]


class GatheredModules:
    """Patches that gather the sharded parameters of this rank's modules before each call of their ``forward``.

    They enclose activation checkpointing, so recomputation in backward does not gather a module's parameters a second
    time.
    """

    def __init__(
        self, model: nn.Module, groups: GatherGroups, order: GatherOrder, gathering: ParameterGatherer,
        patches: ForwardPatches,
    ) -> None:  # fmt: skip
        self._gathering = gathering
        present = sorted({turn.group for turn in order.turns})
        self._group = {module: group for group in present for module in groups.modules[group]}
        interception = Interception(handler=self._call, layer=PatchLayer.GATHER, patches=patches)
        for name, group in self._group.items():
            note = f"gathers its sharded parameters over axis dp, with gather group {group}, and frees them afterwards"
            interception.install(name, model.get_submodule(name), note)
        for name in sorted(_around(self._group), reverse=True):
            interception.install(name, model.get_submodule(name), "gathers for a call outside the engine too")

    def _call(self, unit: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        group = self._group.get(unit)  # None: a module around the groups
        with self._gathering.around(group) as outermost:
            out = forward(*args, **kwargs) if group is None else self._call_gathered(group, forward, args, kwargs)
            if outermost:
                compute_lazy(out)
            return out

    def _call_gathered(
        self, group: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self._gathering.enter(group)
        out = forward(*args, **kwargs)
        tensors = list(_tensors(out))
        self._gathering.keep_views(tensors)
        if torch.is_grad_enabled():
            self._gathering.leave(group, [tensor for tensor in tensors if tensor.grad_fn is not None])
        return out


def _around(units: Collection[str]) -> set[str]:
    """Returns names of the modules that contain units, with the model itself, except units."""
    parts = (unit.split(".") for unit in units)
    return {".".join(path[:count]) for path in parts for count in range(len(path))} - set(units)


def _tensors(output: Any) -> Iterator[Tensor]:
    """Yields all tensors of an output, also tensors in attributes of objects, which may be tensors too (sharded
    logits).

    Attributes may be records again: the shard that cut logits hold, through which gradients pass them by.
    """
    if type(output) is Tensor and not vars(output):  # of most blocks
        yield output
        return
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor):
            yield leaf
        if hasattr(leaf, "__dict__") and not isinstance(leaf, nn.Module | nn.Parameter | type):
            for inner in tree_leaves(vars(leaf)):
                held = (getattr(inner, field.name) for field in fields(inner)) if _is_record(inner) else (inner,)
                yield from (part for part in held if isinstance(part, Tensor))


def _is_record(value: Any) -> bool:
    return is_dataclass(value) and not isinstance(value, type)
