"""Traffic of shared experts in a plan: it depends on the routing, so that it is no part of the exact budgets."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from engine.parallel.experts.calls import RoutedCall
from engine.parallel.experts.forms import ListedExperts, RoutedExperts, expert_bounds
from engine.parallel.grid import Coord
from engine.planning.cost_model.expert_exchange import ExpertExchange
from engine.planning.cost_model.workload import Workload
from engine.planning.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertTraffic:
    """Bytes that a rank exchanges in a step with the ranks that share its experts (axis "ep")."""

    expected: float
    """Bytes that it sends in a step, on average, if routing is even."""
    most: float
    """Bytes that it sends in a step at most, for any routing."""
    round: float
    """Bytes of the largest round of exchanged rows."""
    placement: tuple[tuple[int, tuple[int, ...]], ...]
    """(number of experts, first expert of each rank) of each kind of layer."""


def expert_traffic(plan: Plan, work: Workload, coord: Coord) -> ExpertTraffic | None:
    """Returns the traffic of token rows at the grid position ``coord``; None if experts are not divided."""
    if plan.shared_experts is None or work.experts is None:
        return None
    config, shared = plan.config, plan.shared_experts
    rank = plan.grid(plan.grid(0).rank_at(pp=coord.pp, dp=coord.dp, tp=coord.tp)).index("ep")
    forwards = 1 if config.activation_checkpointing.mode == "none" else 2
    here = list(_exchanges(plan, work, coord.pp))
    return ExpertTraffic(
        expected=config.accumulation * sum(each.sent_bytes(each.even(rank), forwards) for each in here),
        most=config.accumulation * sum(each.sent_bytes(each.most(), forwards + each.rounds_repeat) for each in here),
        round=max((each.round_bytes for each in here), default=0.0),
        placement=tuple((count, expert_bounds(count, shared.ranks)) for count in shared.sizes),
    )


def _exchanges(plan: Plan, work: Workload, pp: int) -> Iterator[ExpertExchange]:
    """Yields the exchanges of the layers of a pipeline rank, for one microbatch."""
    assert plan.shared_experts is not None and work.experts is not None
    owners = {row.name: row.owners for row in plan.table}
    for each in plan.shared_experts.shared:
        first = next(iter(each.parameters)) if isinstance(each, RoutedExperts) else f"{each.names[0]}.{each.own[0]}"
        if pp in owners[first]:
            tokens = -(-plan.config.micro * work.context // plan.config.cp)
            yield ExpertExchange(
                experts=each.experts,
                chosen=min(work.experts.chosen, each.experts),
                ranks=plan.shared_experts.ranks,
                tokens=tokens if isinstance(each, ListedExperts) else -(-tokens // plan.config.tp),
                width=each.width,
                itemsize=plan.precision.itemsize,
                form=_form(each),
            )


def _form(each: RoutedExperts | ListedExperts) -> Literal["token", "row", "list"]:
    if isinstance(each, ListedExperts):
        return "list"
    return "token" if isinstance(each.call, RoutedCall) else "row"
