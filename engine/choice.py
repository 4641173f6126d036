"""Cut and schedule of a pipeline from what its calls cost."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.config import Config
from engine.errors import PlanError
from engine.measure import Costs
from engine.parallel.pipeline.choose import PLAIN_FIRST, Decision, Machine, StageCost, choose
from engine.parallel.pipeline.cost import stage_costs
from engine.parallel.pipeline.cut import Cut, make_cut
from engine.parallel.pipeline.timeline import Timeline

VIRTUAL_STAGES = (1, 2, 4)
"""Stages a rank that are tried where the configuration does not say."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What ``parallel.schedule: "auto"`` came to."""

    decision: Decision
    cut: Cut
    """Into the stages of the chosen schedule."""


def cut_by(config: Config, timeline: Timeline, costs: Costs, stages: int) -> Cut:
    """The timeline in ``stages``, even in what ``parallel.balance`` says, or where ``parallel.split`` says.

    Raises:
        PlanError: it cannot be cut so, or the costs are of another model.
    """
    costs.check(timeline)
    split = None if config.parallel.split == "auto" else config.parallel.split
    seconds = [cost.seconds for cost in costs.calls] if config.parallel.balance == "time" else None
    return make_cut(timeline, stages, split, seconds)


def choose_schedule(config: Config, timeline: Timeline, costs: Costs, kinds: Sequence[str] = PLAIN_FIRST) -> Choice:
    """Cut for each number of stages a rank, lay out each kind, take the best; alike on every rank.

    Raises:
        PlanError: the model cannot be cut for any of them; says why for the fewest stages.
        ScheduleError: no kind stays within ``parallel.activation_limit_bytes``.
    """
    cuts: dict[int, Cut] = {}
    problems: dict[int, PlanError] = {}
    for virtual in _virtual_stages(config):
        try:
            cuts[virtual] = cut_by(config, timeline, costs, config.pp * virtual)
        except PlanError as problem:
            problems[virtual] = problem
    if not cuts:
        raise next(iter(problems.values()))
    tried: dict[int, Sequence[StageCost] | str] = {
        virtual: stage_costs(cut.stage_of_call, costs.calls) for virtual, cut in cuts.items()
    }
    tried |= {virtual: f"the model does not cut into {config.pp * virtual} stages" for virtual in problems}
    fewest = next(iter(cuts.values()))
    crossing = fewest.crossing_bytes / max(len(fewest.stages) - 1, 1)
    limit = config.parallel.activation_limit_bytes
    machine = Machine(config.pp, config.accumulation, costs.transfer_seconds(crossing), limit)
    decision = choose(tried, machine, kinds)
    return Choice(decision, cuts[decision.virtual_stages])


def _virtual_stages(config: Config) -> tuple[int, ...]:
    """Stages a rank that are tried, ascending."""
    given = config.parallel.virtual_stages
    if config.pp == 1:
        return (1,)
    return (1, given) if given > 1 else VIRTUAL_STAGES
