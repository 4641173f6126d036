"""Plan of the experts: the modules whose experts data ranks share, and the sharding of their parameters."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from engine.config import Config
from engine.errors import PlanError
from engine.parallel.experts.forms import RoutedExperts, expert_cut, kind_of, possible_stacks, stacked_experts
from engine.parallel.experts.proof import Unproven, prove_routed
from engine.parallel.tensor.plan.tensor_plan import ParameterCut


@dataclass(frozen=True, slots=True)
class ExpertPlan:
    """Modules whose experts are shared among the ranks of the axis "ep"."""

    ranks: int
    routed: tuple[RoutedExperts, ...]
    unproven: tuple[Unproven, ...] = ()
    """Modules that stack experts, and hold all of them on every rank."""

    @property
    def cuts(self) -> Mapping[str, ParameterCut]:
        """Sharding of the parameters of experts, by name."""
        return {
            name: expert_cut(each.experts, self.ranks, rows)
            for each in self.routed
            for name, rows in each.parameters.items()
        }

    @property
    def divided(self) -> tuple[str, ...]:
        """Parameters that have a part of the gradient on each tensor rank: tensor ranks divide the rows of experts."""
        common = [f"{each.name}.{own}" for each in self.routed for own in each.common]
        return (*self.cuts, *common)

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
    proven: dict[object, RoutedExperts | Unproven] = {}
    routed, unproven = list[RoutedExperts](), list[Unproven]()
    for name, module in model.named_modules():
        if next(possible_stacks(module), None) is None:
            continue
        kind = kind_of(module)
        if kind not in proven:
            proven[kind] = prove_routed(name, module)
        found = proven[kind].named(name)
        if isinstance(found, RoutedExperts):
            routed.append(found)
        elif stacked_experts(module):
            unproven.append(found)
    if not routed:
        raise PlanError(f"parallel.expert is {ranks}, but {_missing(unproven)}; leave parallel.expert out.")
    fewest = min(routed, key=lambda each: each.experts)
    if fewest.experts < ranks:
        raise PlanError(
            f"parallel.expert is {ranks}, but {fewest.name} has {fewest.experts} experts, and every rank needs at "
            f"least one; give a size from 1 to {fewest.experts}."
        )
    return ExpertPlan(ranks, tuple(routed), tuple(unproven))


def _missing(unproven: list[Unproven]) -> str:
    if not unproven:
        return (
            "the model has no experts: no module owns parameters [experts, ..] and is called with rows, numbers of "
            "experts and weights"
        )
    return f"the experts of {unproven[0].name} cannot be shared, because {unproven[0].reason}"
