"""Plan of the experts: the modules whose experts data ranks share, and the sharding of their parameters."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from engine.config import Config
from engine.errors import PlanError
from engine.parallel.data_digits import expert_sizes
from engine.parallel.experts.forms import (
    ExpertCut,
    ListedExperts,
    RoutedExperts,
    alike_lists,
    expert_bounds,
    expert_cut,
    module_kind,
    owner_cut,
    possible_stacks,
    stacked_experts,
    stacks_differ,
)
from engine.parallel.experts.proof import Unproven, prove_adapted, prove_listed, prove_routed
from engine.parallel.experts.router_bias import RouterBias, find_router_bias
from engine.parallel.model.parametrized_weights import adapter_chain, outermost_adapters
from engine.parallel.model.rng_streams import HostState
from engine.program.expert_load import find_experts


@dataclass(frozen=True, slots=True)
class ExpertPlan:
    """Modules whose experts are shared among the ranks of the axis "ep"."""

    ranks: int
    routed: tuple[RoutedExperts, ...]
    listed: tuple[ListedExperts, ...]
    cuts: Mapping[str, ExpertCut]
    """Division of the parameters of experts, by name."""
    unproven: tuple[Unproven, ...] = ()
    """Modules that stack experts, and hold all of them on every rank."""

    @property
    def shared(self) -> tuple[RoutedExperts | ListedExperts, ...]:
        """All modules whose experts are shared."""
        return (*self.routed, *self.listed)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The different numbers of experts of its layers."""
        return tuple(dict.fromkeys(each.experts for each in self.shared))

    @property
    def modules(self) -> tuple[str, ...]:
        """Names of the modules that own experts."""
        return (*(each.name for each in self.routed), *(name for each in self.listed for name in each.names))

    @property
    def blocks(self) -> tuple[str, ...]:
        """Names of the modules whose forwards communicate."""
        return tuple(each.name for each in self.shared)

    @property
    def divided(self) -> tuple[str, ...]:
        """Parameters that have a part of the gradient on each tensor rank: tensor ranks divide the rows of experts."""
        common = (f"{each.name}.{own}" for each in self.routed for own in each.common)
        return (*(name for each in self.routed for name in each.parameters), *common)

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines for the banner: modules whose experts stay on every rank, with the reason."""
        return tuple(
            f"parallel.expert: every rank holds all experts of {each.name}: {each.reason}" for each in self.unproven
        )


def find_expert_plan(model: nn.Module, config: Config) -> ExpertPlan | None:
    """Finds the experts of ``model`` by structure and proves each kind by trial; None without ``parallel.expert``.

    Raises:
        PlanError: the model has no experts that can be shared, or fewer than ranks.
    """
    ranks = config.parallel.expert
    if ranks == 1:
        return None
    drawn = HostState.take()
    with torch.random.fork_rng([]):  # trials may draw
        routed, refused = _routed(model, ranks)
        listed, others = _listed(model)
    drawn.put()
    unproven = (*refused, *others)
    if not routed and not listed:
        raise PlanError(f"parallel.expert is {ranks}, but {_missing(unproven)}; leave parallel.expert out.")
    shared: tuple[RoutedExperts | ListedExperts, ...] = (*routed, *listed)
    fewest = min(shared, key=lambda each: each.experts)
    if fewest.experts < ranks:
        fitting = expert_sizes(config.dp, config.cp, config.zero_optimization.shard_size)
        raise PlanError(
            f"parallel.expert is {ranks}, but {fewest.name} has {fewest.experts} experts, and every rank needs at "
            f"least one; give one of {', '.join(str(size) for size in fitting if size <= fewest.experts)}."
        )
    return ExpertPlan(ranks, routed, listed, _cuts(model, ranks, routed, listed), unproven)


def find_router_biases(model: nn.Module, config: Config) -> tuple[RouterBias, ...]:
    """Finds the biases by which the routers of ``model`` choose experts; none without ``router_bias_update_rate``.

    Raises:
        PlanError: no router has one.
    """
    if not config.router_bias_update_rate:
        return ()
    found = (find_router_bias(model, stack.name, stack.experts) for stack in find_experts(model))
    biases = tuple(each for each in found if each is not None)
    if not biases:
        raise PlanError(
            f"router_bias_update_rate is {config.router_bias_update_rate:g}, but no router of the model has a buffer "
            "[experts] that is added to the scores only to choose experts; leave router_bias_update_rate out."
        )
    return biases


def _routed(model: nn.Module, ranks: int) -> tuple[tuple[RoutedExperts, ...], tuple[Unproven, ...]]:
    proven: dict[object, RoutedExperts | Unproven] = {}
    found = list[RoutedExperts | Unproven]()
    adapters = outermost_adapters(model)
    for own, module in model.named_modules():
        if next(possible_stacks(module), None) is None:
            if "expert" in own.lower() and stacks_differ(module):
                found.append(Unproven(own, "its matrices stack different numbers of experts"))
            continue
        name = adapters.get(module, own)
        called = model.get_submodule(name)
        kind = tuple(module_kind(each) for _, each in adapter_chain(called))
        if kind not in proven:
            proven[kind] = prove_routed(name, module) if called is module else prove_adapted(name, called, ranks)
        if isinstance(proven[kind], RoutedExperts) or stacked_experts(module):
            found.append(proven[kind].named(name))
    routed = tuple(each for each in found if isinstance(each, RoutedExperts))
    return routed, tuple(each for each in found if isinstance(each, Unproven))


def _listed(model: nn.Module) -> tuple[tuple[ListedExperts, ...], tuple[Unproven, ...]]:
    proven: dict[object, tuple[int, int] | str] = {}
    found, refused = list[ListedExperts](), list[Unproven]()
    for name, child, members in alike_lists(model):
        block = model.get_submodule(name)
        kind = (module_kind(block), child)
        if kind not in proven:
            proven[kind] = prove_listed(block, child)
        widths = proven[kind]
        if not isinstance(widths, str):
            own = tuple(own for own, _ in model.get_submodule(members[0]).named_parameters())
            found.append(ListedExperts(name, members, *widths, own))
        elif "expert" in child.lower():
            refused.append(Unproven(f"{name}.{child}" if name else child, widths))
    return tuple(found), tuple(refused)


def _cuts(
    model: nn.Module, ranks: int, routed: tuple[RoutedExperts, ...], listed: tuple[ListedExperts, ...]
) -> dict[str, ExpertCut]:
    cuts = {name: expert_cut(each.experts, ranks, own) for each in routed for name, own in each.parameters.items()}
    for each in listed:
        bounds = expert_bounds(each.experts, ranks)
        for rank in range(ranks):
            for name in each.names[bounds[rank] : bounds[rank + 1]]:
                for own, parameter in model.get_submodule(name).named_parameters():
                    cuts[f"{name}.{own}"] = owner_cut(parameter.shape[0] if parameter.dim() else 1, rank)
    return cuts


def _missing(unproven: tuple[Unproven, ...]) -> str:
    if not unproven:
        return (
            "the model has no experts: no module owns parameters [experts, ..] and is called with the rows of each, "
            "and no block calls a list of equal modules with rows"
        )
    return f"the experts of {unproven[0].name} cannot be shared, because {unproven[0].reason}"
