"""A schedule simulated in time: start and end of each action, idle time, live activations."""

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from engine.errors import ScheduleError
from engine.parallel.pipeline.schedule.actions import Action, Op, Schedule
from engine.parallel.pipeline.schedule.dependencies import DependencyGraph
from engine.parallel.pipeline.schedule.validate import complete_rules


class Span(NamedTuple):
    """An action with its start and end."""

    action: Action
    start: float
    end: float


class StageTimes(NamedTuple):
    """Times of the parts of one stage; a whole backward takes both of its parts."""

    forward: float
    backward_input: float
    backward_weight: float


@dataclass(frozen=True, slots=True)
class Cost:
    """Times of operations and transfers, in any one unit. Integers stay exact."""

    forward: float = 1
    backward: float = 2
    backward_input: float = 1
    backward_weight: float = 1
    transfer: float = 0
    """Time from the end of an action to the earliest start of an action on another rank that needs its result."""
    stages: tuple[float, ...] = ()
    """A factor for each stage; empty: all stages are equal."""
    times: tuple[StageTimes, ...] = ()
    """Times of each stage, which replace everything above except ``transfer``; empty: nothing is replaced."""

    def of(self, op: Op) -> float:
        """Time of an operation, before the factor of its stage."""
        return (self.forward, self.backward, self.backward_input, self.backward_weight)["FBIW".index(op)]

    def at(self, op: Op, stage: int) -> float:
        """Time of an operation of a stage."""
        if not self.times:
            return self.of(op) * (self.stages[stage] if self.stages else 1)
        forward, for_inputs, for_weights = self.times[stage]
        return (forward, for_inputs + for_weights, for_inputs, for_weights)["FBIW".index(op)]

    @classmethod
    def of_parts(cls, forward: float, backward_input: float, backward_weight: float, transfer: float = 0) -> "Cost":
        """Costs whose whole backward takes both of its parts."""
        return cls(forward, backward_input + backward_weight, backward_input, backward_weight, transfer)

    def shared(self, ranks: int, stages: int) -> "Cost":
        """Costs of stages, from these of a rank's whole slice; a transfer keeps its time."""
        return replace(self, stages=(ranks / stages,) * stages) if stages != ranks else self


@dataclass(frozen=True)
class StepTimeline:
    """One step of a schedule in time: the spans of each rank, in order."""

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]

    @cached_property
    def makespan(self) -> float:
        """End of the last action."""
        return max(row[-1].end for row in self.spans if row)

    @cached_property
    def idle(self) -> float:
        """Time in which ranks are idle, summed over ranks."""
        busy = sum(span.end - span.start for row in self.spans for span in row)
        return self.makespan * len(self.spans) - busy

    @property
    def bubble(self) -> float:
        """Idle share of the ranks' time; (p-1)/(m+p-1) for GPipe and 1F1B of equal stages."""
        return self.idle / (self.makespan * len(self.spans)) if self.makespan else 0.0


def simulate(schedule: Schedule, cost: Cost | None = None) -> StepTimeline:
    """Start every action as soon as its rank is free and its needs have arrived; sends take no time of a rank.

    Raises:
        ScheduleError: the schedule is incomplete or stuck, or ``cost`` is for another number of stages.
    """
    cost = cost or Cost()
    for name, noun, given in (("stages", "factors", cost.stages), ("times", "entries", cost.times)):
        if given and len(given) != schedule.stages:
            raise ScheduleError(
                f"cost.{name} has {len(given)} {noun} for the {schedule.stages} stages of schedule "
                f"{schedule.name}; give one for each stage, or none."
            )
    rules = complete_rules(schedule)
    begins, ends = action_times(rules, cost)
    spans = list(map(Span, rules.actions, begins, ends))
    return StepTimeline(schedule, tuple(tuple(spans[row.start : row.stop]) for row in rules.rows))


def action_times(rules: DependencyGraph, cost: Cost) -> tuple[list[float], list[float]]:
    """Start and end of each action, by its number, if each starts as early as possible.

    Raises:
        ScheduleError: the schedule is stuck.
    """
    lasts = {(op, stage): cost.at(op, stage) for op in Op for stage in range(rules.schedule.stages)}
    free: list[float] = [0] * len(rules.rows)
    begins: list[float] = [0] * len(rules.actions)
    ends: list[float] = [0] * len(rules.actions)
    other, ranks = rules.needs[1], rules.rank
    for number in rules.needs_order:
        op, stage, _ = rules.actions[number]
        rank, need = ranks[number], other[number]
        start = free[rank]
        if need >= 0 and ranks[need] != rank:  # needs on its own rank ended before the rank was free
            start = max(start, ends[need] + cost.transfer)
        begins[number] = start
        free[rank] = ends[number] = start + lasts[op, stage]
    return begins, ends


def peak_live(schedule: Schedule) -> tuple[int, ...]:
    """Most activations that each rank holds at once, each of one stage and one microbatch.

    F adds one, B or W frees it; in a schedule without backwards the end of F does.
    """
    change = {Op.FORWARD: 1, Op.BACKWARD: -1, Op.BACKWARD_INPUT: 0, Op.BACKWARD_WEIGHT: -1}
    if not schedule.training:
        return (1,) * len(schedule.per_rank)
    return tuple(max(accumulate(change[action.op] for action in row), default=0) for row in schedule.per_rank)
