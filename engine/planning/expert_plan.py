"""Plan of the experts: the modules whose experts data ranks share, and the sharding of their parameters."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from engine.config import Config
from engine.errors import PlanError
from engine.parallel.experts.forms import (
    ExpertCut,
    ListedExperts,
    RoutedExperts,
    alike_lists,
    expert_bounds,
    expert_cut,
    kind_of,
    owner_cut,
    stacked_experts,
)
from engine.parallel.experts.proof import Unproven, prove_listed, prove_routed
from engine.parallel.model.rng_streams import HostState


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
    def modules(self) -> tuple[str, ...]:
        """Names of the modules that own experts."""
        return (*(each.name for each in self.routed), *(name for each in self.listed for name in each.names))

    @property
    def blocks(self) -> tuple[str, ...]:
        """Names of the modules whose forwards communicate."""
        return (*(each.name for each in self.routed), *(each.block for each in self.listed))

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
        routed, refused = _routed(model)
        listed, others = _listed(model)
    drawn.put()
    unproven = (*refused, *others)
    if not routed and not listed:
        raise PlanError(f"parallel.expert is {ranks}, but {_missing(unproven)}; leave parallel.expert out.")
    fewest = min(
        (each.experts, each.block if isinstance(each, ListedExperts) else each.name) for each in (*routed, *listed)
    )
    if fewest[0] < ranks:
        raise PlanError(
            f"parallel.expert is {ranks}, but {fewest[1]} has {fewest[0]} experts, and every rank needs at least one; "
            f"give a size from 1 to {fewest[0]}."
        )
    return ExpertPlan(ranks, routed, listed, _cuts(model, ranks, routed, listed), unproven)


def _routed(model: nn.Module) -> tuple[tuple[RoutedExperts, ...], tuple[Unproven, ...]]:
    proven: dict[object, RoutedExperts | Unproven] = {}
    found = list[RoutedExperts | Unproven]()
    for name, module in model.named_modules():
        if stacked_experts(module):
            kind = kind_of(module)
            if kind not in proven:
                proven[kind] = prove_routed(name, module)
            found.append(proven[kind].named(name))
    routed = tuple(each for each in found if isinstance(each, RoutedExperts))
    return routed, tuple(each for each in found if isinstance(each, Unproven))


def _listed(model: nn.Module) -> tuple[tuple[ListedExperts, ...], tuple[Unproven, ...]]:
    proven: dict[object, tuple[int, int] | str] = {}
    found, refused = list[ListedExperts](), list[Unproven]()
    for name, child, members in alike_lists(model):
        block = model.get_submodule(name)
        kind = (kind_of(block), child)
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
    cuts = {name: expert_cut(each.experts, ranks) for each in routed for name in each.parameters}
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
