"""Which modules gather their parameters together (ZeRO 3).

    before     embed, position        all that comes before the first block
    blocks     layers.0 ... layers.7  one group each; what runs between two chains of blocks goes with the block before
    after      norm, head             all that comes behind the last block

A model without blocks has one group for each of its modules.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from engine.parallel.pipeline.units import find_units
from engine.zero.gather_order import EVERYWHERE


@dataclass(frozen=True, slots=True)
class GatherGroups:
    """The groups of a whole model."""

    modules: tuple[tuple[str, ...], ...]
    """Of each group: the modules whose calls use its parameters."""
    of_parameter: Mapping[str, tuple[int, ...]]
    """First name of a parameter -> groups that use it; EVERYWHERE if no module is known to."""


def find_gather_groups(model: nn.Module) -> GatherGroups:
    """The groups of ``model``, in the order in which its modules are defined."""
    units = find_units(model, deep=True)
    modules = _grouped(list(units.modules), set(units.blocks)) if units.modules else [[""]]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    users: dict[str, set[int]] = {name: set() for name in names.values()}
    for index, group in enumerate(modules):
        for module in group:
            for parameter in model.get_submodule(module).parameters():
                users[names[id(parameter)]].add(index)
    of_parameter = {name: tuple(sorted(groups)) or (EVERYWHERE,) for name, groups in users.items()}
    return GatherGroups(tuple(map(tuple, modules)), of_parameter)


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
