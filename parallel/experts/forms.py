"""Modules that own experts, found by their parameters, and the ranks that hold each expert."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, combinations

import torch
from torch import nn

from engine.parallel.experts.calls import ExpertCall
from engine.parallel.shard_table import Range


@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """Module that owns all experts of a layer and is called with the rows of each."""

    name: str
    """Name of the module."""
    experts: int
    width: int
    """Width H of its rows."""
    call: ExpertCall
    own: Mapping[str, int]
    """Rows of one expert in each of its parameters that stack experts, by the name in the module."""
    common: tuple[str, ...] = ()
    """Names in the module of vectors that all experts use, such as those of a norm, which every rank holds."""
    counts: tuple[str, ...] = ()
    """Attributes that are the number of its experts."""
    added: tuple[str, ...] | None = None
    """Names in the module of parameters that only the first tensor rank adds to its result, if tensor ranks cut experts
    along their width; None: tensor ranks hold whole experts and divide the rows."""

    def named(self, name: str) -> "RoutedExperts":
        """Returns the same for another module of the same kind."""
        return replace(self, name=name)

    @property
    def parameters(self) -> Mapping[str, int]:
        """Rows of one expert in each parameter that stacks experts, by the name in the model."""
        return {f"{self.name}.{own}": rows for own, rows in self.own.items()}


@dataclass(frozen=True, slots=True)
class Stack:
    """Parameters of a module that may be stacks of experts."""

    experts: int
    own: Mapping[str, int]
    """Rows of one expert in each parameter that stacks experts."""
    common: tuple[str, ...]
    """Names of the other parameters."""
    counts: tuple[str, ...] = ()
    """Attributes that are the number of experts."""


@dataclass(frozen=True, slots=True)
class ListedExperts:
    """Block whose own code calls the members of a list of equal expert modules with rows of its choice."""

    block: str
    """Name of the block."""
    names: tuple[str, ...]
    """Names of its experts, in order."""
    width: int
    """Width of the rows that experts are called with."""
    out: int
    """Width of their results."""
    own: tuple[str, ...]
    """Names of the parameters of one expert, in the expert."""
    cut: bool = False
    """Tensor ranks cut each expert along its width; False: they hold and compute whole experts."""

    @property
    def name(self) -> str:
        """Name of the module whose forward communicates."""
        return self.block

    @property
    def experts(self) -> int:
        """Number of experts."""
        return len(self.names)

    def named(self, block: str, names: tuple[str, ...]) -> "ListedExperts":
        """Returns the same for another block of the same kind."""
        return replace(self, block=block, names=names)


def owner_cut(rows: int, rank: int) -> tuple[Range, ...]:
    """Returns the division of a parameter with ``rows`` along its first dim that ``rank`` holds alone."""
    return (Range(0, rows, (rank,)),)


def list_members(members: nn.Module) -> dict[str, nn.Module]:
    """Returns the members of a list that have parameters, by their names in it: not the dropout of a class of lists."""
    return {name: each for name, each in members.named_children() if any(True for _ in each.parameters())}


def alike_lists(model: nn.Module) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Yields (block, name of the list in it, names of its members) of lists of equal modules with parameters."""
    for name, block in model.named_modules():
        for child, given in block.named_children():
            members = list_members(given)
            if not isinstance(given, nn.ModuleList | nn.ModuleDict) or len(members) < 2:
                continue
            every = members.values()
            kinds = {(type(each), tuple((n, p.shape) for n, p in each.named_parameters())) for each in every}
            parameters = [id(p) for each in every for p in each.parameters()]
            if len(kinds) == 1 and len(set(parameters)) == len(parameters):
                inside = f"{name}.{child}" if name else child
                yield name, child, tuple(f"{inside}.{own}" for own in members)


def expert_bounds(experts: int, ranks: int) -> tuple[int, ...]:
    """Returns the first expert of each rank, and the number of experts; the first ranks hold one more if uneven."""
    each, more = divmod(experts, ranks)
    return tuple(accumulate((each + (rank < more) for rank in range(ranks)), initial=0))


def expert_cut(experts: int, ranks: int, rows: int = 1) -> tuple[Range, ...]:
    """Returns the sharding of parameters [experts * rows, ..] over ``ranks``."""
    bounds = [rows * bound for bound in expert_bounds(experts, ranks)]
    return tuple(Range(bounds[rank], bounds[rank + 1], (rank,)) for rank in range(ranks))


def stacked_experts(module: nn.Module) -> int:
    """Returns the number of experts that a module's own parameters stack, [experts, ..]; 0 if they stack none.

    At least one parameter is a matrix for each expert, and everything else with parameters inside has vectors only.
    """
    own = [parameter for parameter in module.parameters(recurse=False) if parameter.dim() >= 2]
    inside = sum(parameter.dim() >= 2 for parameter in module.parameters())
    if type(module).__module__.startswith("torch.nn.") or len(own) != inside:
        return 0
    sizes = {parameter.shape[0] for parameter in own}
    stacked = sum(parameter.dim() == 3 for parameter in own)
    alone = len(own) == sum(1 for _ in module.parameters())  # a weight [out, in, width] with a bias is a convolution
    return sizes.pop() if stacked > (not alone) and len(sizes) == 1 and min(sizes) > 1 else 0


def possible_stacks(module: nn.Module) -> Iterator[Stack]:
    """Yields the ways to take the parameters of a module for stacks of experts, the most frequent one first.

    Matrices [experts, rows, width], with vectors for each expert or for all; or [experts * rows, width], with a number
    of experts that the module has as an attribute.
    """
    named = dict(module.named_parameters())
    matrices = [name for name, parameter in named.items() if parameter.dim() >= 2]
    if experts := stacked_experts(module):
        vectors = [name for name in named if name not in matrices]
        each = [name for name in vectors if named[name].shape == (experts,)]
        for own in ([*matrices, *each], matrices)[: 2 if each else 1]:
            common = tuple(name for name in vectors if name not in own)
            yield Stack(experts, dict.fromkeys(own, 1), common)
    elif len(matrices) > 1 and len(matrices) == len(named) and not _has_layers(module):
        for experts in dict.fromkeys(value for value in vars(module).values() if type(value) is int and value > 1):
            if not any(parameter.shape[0] % experts for parameter in named.values()):
                yield Stack(experts, {name: each.shape[0] // experts for name, each in named.items()}, ())


def _has_layers(module: nn.Module) -> bool:
    """Returns True if a layer of torch inside a module has parameters."""
    return any(
        type(each).__module__.startswith("torch.nn.") and any(True for _ in each.parameters(recurse=False))
        for each in module.modules()
    )


def possible_widths(module: nn.Module) -> Sequence[int]:
    """Returns the widths that rows of a module may have: the sizes of its matrices, most frequent first."""
    sizes = [size for parameter in module.parameters() if parameter.dim() >= 2 for size in parameter.shape[1:]]
    return sorted(set(sizes), key=lambda size: (-sizes.count(size), size))


def possible_counts(module: nn.Module, experts: int) -> Iterator[tuple[str, ...]]:
    """Yields sets of attributes that may count the experts of a module, the largest first; others are equal by chance.

    A module with more than three such attributes has only the largest set.
    """
    names = [name for name, value in vars(module).items() if type(value) is int and value == experts]
    for size in range(len(names), -1 if len(names) <= 3 else len(names) - 1, -1):
        yield from combinations(names, size)


def module_kind(module: nn.Module) -> tuple[object, ...]:
    """Returns a key that is equal for modules of equal code, shapes and settings: a proof of one holds for all."""
    shapes = tuple((name, tuple(parameter.shape)) for name, parameter in module.named_parameters())
    settings = tuple(
        (name, value if isinstance(value, int | float | str | None) else type(value))
        for name, value in sorted(vars(module).items())
        if not name.startswith("_") and name != "training" and not isinstance(value, Mapping | torch.Tensor)
    )
    return type(module), shapes, settings, tuple(type(child) for child in module.modules())
