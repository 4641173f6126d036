"""Modules that own experts, found by their parameters, and the ranks that hold each expert."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, permutations

import torch
from torch import Tensor, nn

from engine.parallel.shard_table import Range
from engine.parallel.tensor.plan.tensor_plan import ParameterCut


@dataclass(frozen=True, slots=True)
class Arguments:
    """Names of the arguments of a module of routed experts."""

    rows: str
    """Rows of the stream [T, H]."""
    numbers: str
    """Numbers of the experts of each row [T, k], integers."""
    weights: str
    """Weight of each expert of each row [T, k]."""
    order: tuple[int, int, int] = (0, 1, 2)
    """Positions of rows, numbers and weights in a call."""

    @property
    def names(self) -> tuple[str, str, str]:
        """Names of the arguments."""
        return self.rows, self.numbers, self.weights

    def ordered(self, rows: Tensor, numbers: Tensor, weights: Tensor) -> Sequence[Tensor]:
        """Returns positional arguments: code that a forward hands them to may give them other names."""
        given = dict(zip(self.order, (rows, numbers, weights), strict=True))
        return [given[position] for position in range(3)]


@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """Module that owns all experts of a layer and is called with rows, numbers of experts and weights."""

    name: str
    """Name of the module."""
    experts: int
    width: int
    """Width H of its rows."""
    arguments: Arguments
    own: tuple[str, ...]
    """Names of its parameters in the module, each [experts, ..]."""

    def named(self, name: str) -> "RoutedExperts":
        """Returns the same for another module of the same kind."""
        return replace(self, name=name)

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of its parameters in the model."""
        return tuple(f"{self.name}.{own}" for own in self.own)


def expert_bounds(experts: int, ranks: int) -> tuple[int, ...]:
    """Returns the first expert of each rank, and the number of experts; the first ranks hold one more if uneven."""
    each, more = divmod(experts, ranks)
    return tuple(accumulate((each + (rank < more) for rank in range(ranks)), initial=0))


def expert_cut(experts: int, ranks: int) -> ParameterCut:
    """Returns the sharding of parameters [experts, ..] over ``ranks``."""
    bounds = expert_bounds(experts, ranks)
    return ParameterCut(0, tuple(Range(bounds[rank], bounds[rank + 1], (rank,)) for rank in range(ranks)))


def stacked_experts(module: nn.Module) -> int:
    """Returns the number of experts that a module's own parameters stack, [experts, ..]; 0 if they stack none.

    At least one parameter is a matrix for each expert, and no other module inside has parameters.
    """
    own = list(module.parameters(recurse=False))
    if type(module).__module__.startswith("torch.nn.") or not own or len(own) != sum(1 for _ in module.parameters()):
        return 0
    sizes = {parameter.shape[0] for parameter in own if parameter.dim() >= 2}
    stacked = all(parameter.dim() >= 2 for parameter in own) and any(parameter.dim() == 3 for parameter in own)
    return sizes.pop() if stacked and len(sizes) == 1 and min(sizes) > 1 else 0


def possible_arguments(module: nn.Module) -> Iterator[Arguments]:
    """Yields the assignments of a forward's first three arguments to rows, numbers and weights, the usual one first."""
    try:
        given = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return
    names = [each.name for each in given if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    required = [each.name for each in given if each.default is each.empty and each.kind not in (4, 2)]
    if len(names) >= 3 and set(required) <= set(names[:3]):
        for order in permutations(range(3)):
            rows, numbers, weights = (names[position] for position in order)
            yield Arguments(rows, numbers, weights, (order[0], order[1], order[2]))


def possible_widths(module: nn.Module) -> Sequence[int]:
    """Returns the widths that rows of a module may have: the sizes of its matrices, most frequent first."""
    sizes = [size for parameter in module.parameters() if parameter.dim() == 3 for size in parameter.shape[1:]]
    return sorted(set(sizes), key=lambda size: (-sizes.count(size), size))


def count_names(module: nn.Module, experts: int) -> tuple[str, ...]:
    """Returns the attributes of a module that are the number of its experts."""
    return tuple(name for name, value in vars(module).items() if type(value) is int and value == experts)


def kind_of(module: nn.Module) -> tuple[object, ...]:
    """Returns a key that is equal for modules of equal code, shapes and settings: a proof of one holds for all."""
    shapes = tuple((name, tuple(parameter.shape)) for name, parameter in module.named_parameters())
    settings = tuple(
        (name, value if isinstance(value, int | float | str | None) else type(value))
        for name, value in sorted(vars(module).items())
        if not name.startswith("_") and name != "training" and not isinstance(value, Mapping | torch.Tensor)
    )
    return type(module), shapes, settings, tuple(type(child) for child in module.modules())
