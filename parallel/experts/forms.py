"""Modules that own experts, found by their parameters, and the ranks that hold each expert."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, combinations, product

from torch import Tensor, nn

from engine.parallel.experts.calls import ExpertCall
from engine.parallel.model.parametrized_weights import adapter_chain
from engine.parallel.model.side_effects import forward_settings
from engine.parallel.shard_table import Range


@dataclass(frozen=True, slots=True)
class ExpertPacking:
    """Memory order of a parameter that stacks the weights of all experts of a layer along one dim, the expert dim."""

    rows: int = 1
    """Rows of one expert along the dim."""
    dim: int = 0
    alternate: bool = False
    """True: row i of all experts precedes row i + 1. False: the rows of an expert are consecutive."""

    def shape(self, shape: Sequence[int], experts: int) -> tuple[int, ...]:
        """Returns ``shape`` with its expert dim resized to ``experts`` experts."""
        return (*shape[: self.dim], experts * self.rows, *shape[self.dim + 1 :])

    def apart(self, stack: Tensor, experts: int) -> Tensor:
        """Returns a view [experts, ..] of the parameter ``stack``; entry i has the weights of expert i."""
        sizes = (self.rows, experts) if self.alternate else (experts, self.rows)
        split = stack.view(*stack.shape[: self.dim], *sizes, *stack.shape[self.dim + 1 :])
        return split.movedim(self.dim + self.alternate, 0)

    def chosen(self, stack: Tensor, experts: int, own: Sequence[int]) -> Tensor:
        """Returns the part of the parameter ``stack`` for the consecutive experts ``own``, in the same memory order.

        ``experts``: number of experts in ``stack``.
        """
        apart = self.apart(stack, experts)[own[0] : own[-1] + 1]
        return apart.movedim(0, self.dim + self.alternate).flatten(self.dim, self.dim + 1)

    def ranges(self, bounds: Sequence[int]) -> tuple[Range, ...]:
        """Returns the ranges of indices along the expert dim that each rank stores.

        Rank r has the experts ``bounds[r]`` to ``bounds[r + 1]`` - 1; an expert may take several indices.
        """
        experts, ranks = bounds[-1], range(len(bounds) - 1)
        if self.alternate:
            starts = range(0, self.rows * experts, experts)
            return tuple(Range(at + bounds[rank], at + bounds[rank + 1], (rank,)) for at in starts for rank in ranks)
        return tuple(Range(self.rows * bounds[rank], self.rows * bounds[rank + 1], (rank,)) for rank in ranks)


@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """Description of a module that owns all experts of a layer and receives token rows with the experts of each row."""

    name: str
    """Name of the module."""
    experts: int
    width: int
    """Width H of its rows."""
    call: ExpertCall
    own: Mapping[str, ExpertPacking]
    """Packing of each parameter that stacks experts, by its name in the module."""
    common: tuple[str, ...] = ()
    """Names, in the module, of vectors that all experts use, such as a norm's weight; every rank stores them."""
    counts: tuple[str, ...] = ()
    """Names, in the module, of the attributes that store the number of experts."""
    added: tuple[str, ...] | None = None
    """Names in the module of parameters that only the first tensor rank adds to its result, if tensor ranks cut experts
    along their width; None: tensor ranks hold whole experts and divide the rows."""

    def named(self, name: str) -> "RoutedExperts":
        """Returns a copy of this description for another module, ``name``, with the same code, shapes and settings."""
        return replace(self, name=name)

    @property
    def parameters(self) -> Mapping[str, ExpertPacking]:
        """Memory order of each parameter that stacks experts, by the parameter's full name in the model."""
        return {f"{self.name}.{own}": packing for own, packing in self.own.items()}


@dataclass(frozen=True, slots=True)
class Stack:
    """Possible interpretation of a module's parameters as stacks of experts, to be tested numerically."""

    experts: int
    own: Mapping[str, ExpertPacking]
    """Packing of each parameter that stacks experts, by name."""
    common: tuple[str, ...]
    """Names of the other parameters."""
    counts: tuple[str, ...] = ()
    """Names of the attributes that store the number of experts."""


@dataclass(frozen=True, slots=True)
class ListedExperts:
    """Description of a block that calls a list of expert modules of the same class and parameter shapes."""

    block: str
    """Name of the block."""
    names: tuple[str, ...]
    """Full names of the block's experts, in order."""
    width: int
    """Width of the experts' input rows."""
    out: int
    """Width of the experts' results."""
    own: tuple[str, ...]
    """Names of one expert's parameters, relative to the expert."""
    cut: bool = False
    """Tensor ranks cut each expert along its width; False: they hold and compute whole experts."""

    @property
    def name(self) -> str:
        """Name of the block in the model."""
        return self.block

    @property
    def experts(self) -> int:
        """Number of experts."""
        return len(self.names)

    def named(self, block: str, names: tuple[str, ...]) -> "ListedExperts":
        """Returns a copy of this description for another block, ``block``, with the same code and shapes; its experts
        are called ``names``.
        """
        return replace(self, block=block, names=names)


def owner_cut(rows: int, rank: int) -> tuple[Range, ...]:
    """Returns the sharding of a parameter that only rank ``rank`` stores. ``rows``: size of its first dim."""
    return (Range(0, rows, (rank,)),)


def list_members(members: nn.Module) -> dict[str, nn.Module]:
    """Returns the submodules in the module list ``members`` that have parameters, by their names in it."""
    return {name: each for name, each in members.named_children() if any(True for _ in each.parameters())}


def lists_of_equal_experts(model: nn.Module) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Yields (name of a block, name of a list in it, full names of its members) for each list that may contain experts.

    Lists are module lists or dicts. All members with parameters have the same class and parameter shapes, and share no
    parameter.
    """
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
    """Returns the index of the first expert of each of ``ranks`` ranks, followed by ``experts``.

    If ``experts`` does not divide evenly, the first ranks own one more.
    """
    each, more = divmod(experts, ranks)
    return tuple(accumulate((each + (rank < more) for rank in range(ranks)), initial=0))


def expert_cut(experts: int, ranks: int, packing: ExpertPacking = ExpertPacking()) -> tuple[Range, ...]:
    """Returns the sharding over ``ranks`` ranks of a parameter that stacks ``experts`` experts: ranges along the expert
    dim, one or several for each rank.

    ``packing``: memory order of the parameter.
    """
    return packing.ranges(expert_bounds(experts, ranks))


def stacked_experts(module: nn.Module) -> int:
    """Returns the number of experts if ``module``'s own parameters, except vectors, all are [experts, ..]; otherwise 0.

    Also returns 0 for torch's own layers, if a submodule has parameters with several dims, or if none is
    [experts, rows, width]; if there are vectors, at least two must be.
    """
    own = [parameter for parameter in module.parameters(recurse=False) if parameter.dim() >= 2]
    inside = sum(parameter.dim() >= 2 for parameter in module.parameters())
    if type(module).__module__.startswith("torch.nn.") or len(own) != inside:
        return 0
    sizes = {parameter.shape[0] for parameter in own}
    stacked = sum(parameter.dim() == 3 for parameter in own)
    alone = len(own) == sum(1 for _ in module.parameters())  # a weight [out, in, width] with a bias is a convolution
    return sizes.pop() if stacked > (not alone) and len(sizes) == 1 and min(sizes) > 1 else 0


def stacks_differ(module: nn.Module) -> bool:
    """Returns True if a module has parameters [n, rows, width] with different sizes n."""
    own = {parameter.shape[0] for parameter in module.parameters(recurse=False) if parameter.dim() == 3}
    return len(own) > 1 and not type(module).__module__.startswith("torch.nn.")


def possible_stacks(module: nn.Module) -> Iterator[Stack]:
    """Yields possible interpretations of a module's parameters as stacks of experts, in the order in which to test
    them.

    Matrices may be [experts, rows, width]; then vectors [experts] are one number for each expert, or are vectors that
    all experts share. Or matrices are [experts * rows, width], and an integer attribute has the number of experts.
    """
    named = dict(module.named_parameters())
    matrices = [name for name, parameter in named.items() if parameter.dim() >= 2]
    if experts := stacked_experts(module):
        vectors = [name for name in named if name not in matrices]
        each = [name for name in vectors if named[name].shape == (experts,)]
        for own in ([*matrices, *each], matrices)[: 2 if each else 1]:
            common = tuple(name for name in vectors if name not in own)
            yield Stack(experts, dict.fromkeys(own, ExpertPacking()), common)
    elif len(matrices) > 1 and len(matrices) == len(named) and not _has_layers(module):
        for experts in dict.fromkeys(value for value in vars(module).values() if type(value) is int and value > 1):
            if not any(parameter.shape[0] % experts for parameter in named.values()):
                yield Stack(
                    experts, {name: ExpertPacking(each.shape[0] // experts) for name, each in named.items()}, ()
                )


def adapted_stacks(found: RoutedExperts, adapter: nn.Module) -> Iterator[Stack]:
    """Yields possible interpretations of adapters' parameters, such as LoRA's, as stacks of experts, in the order in
    which to test them.

    ``found``: the adapted module. ``adapter``: outermost adapter module. Each interpretation assumes that parameters of
    the same name in several adapters have the same memory order. All experts share the parameters that are not stacked.
    """
    *adapters, (inside, base) = adapter_chain(adapter)
    theirs = {id(each) for each in base.parameters()}
    groups: dict[str, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in adapter.named_parameters():
        if id(parameter) not in theirs:
            own = max((prefix for prefix, _ in adapters if name.startswith(prefix)), key=len)
            groups.setdefault(name.removeprefix(own), []).append((name, parameter))
    named = [pair for group in groups.values() for pair in group]
    attributes = [f"{prefix}{own}" for prefix, each in adapters for own in _counting_attributes(each, found.experts)]
    stacked = {f"{inside}{name}": packing for name, packing in found.own.items()}
    counts = (*attributes, *(f"{inside}{name}" for name in found.counts))
    for ways in product(*(_packings(found.experts, [each for _, each in group]) for group in groups.values())):
        chosen = [packing for packings in ways for packing in packings]
        cut = {name: packing for (name, _), packing in zip(named, chosen, strict=True) if packing is not None}
        common = (*(f"{inside}{name}" for name in found.common), *(name for name, _ in named if name not in cut))
        yield Stack(found.experts, stacked | cut, common, counts)


def _packings(experts: int, group: Sequence[Tensor]) -> Iterator[tuple[ExpertPacking | None, ...]]:
    """Yields the ways to stack experts in parameters of one role; None: they stack none."""
    for dim, alternate in ((0, False), (1, True), (0, True), (1, False)):
        if all(each.dim() > dim and each.shape[dim] % experts == 0 for each in group):
            yield tuple(ExpertPacking(each.shape[dim] // experts, dim, alternate) for each in group)
    yield tuple(None for _ in group)


def _has_layers(module: nn.Module) -> bool:
    """Returns True if a layer of torch inside a module has parameters."""
    return any(
        type(each).__module__.startswith("torch.nn.") and any(True for _ in each.parameters(recurse=False))
        for each in module.modules()
    )


def possible_widths(module: nn.Module) -> Sequence[int]:
    """Returns possible widths of a module's input rows: the sizes of its matrices, the most frequent first."""
    sizes = [size for parameter in module.parameters() if parameter.dim() >= 2 for size in parameter.shape[1:]]
    return sorted(set(sizes), key=lambda size: (-sizes.count(size), size))


def _counting_attributes(module: nn.Module, experts: int) -> list[str]:
    return [name for name, value in vars(module).items() if type(value) is int and value == experts]


def set_counts(module: nn.Module, names: Sequence[str], experts: int) -> None:
    """Sets each attribute in ``names``, such as ``mlp.num_experts``, of ``module`` or its submodules to ``experts``."""
    for name in names:
        owner, _, attribute = name.rpartition(".")
        object.__setattr__(module.get_submodule(owner), attribute, experts)


def possible_counts(module: nn.Module, experts: int) -> Iterator[tuple[str, ...]]:
    """Yields possible sets of the attributes that store the module's number of experts, the largest set first.

    All are integer attributes with the value ``experts``. If there are more than three such attributes, only the set of
    all of them is yielded.
    """
    names = _counting_attributes(module, experts)
    for size in range(len(names), -1 if len(names) <= 3 else len(names) - 1, -1):
        yield from combinations(names, size)


def module_kind(module: nn.Module) -> tuple[object, ...]:
    """Returns a hashable key of a module's class, parameter shapes and settings. Modules with equal keys share results
    of expert-parallelism tests.
    """
    shapes = tuple((name, tuple(parameter.shape)) for name, parameter in module.named_parameters())
    return type(module), shapes, forward_settings(module)
