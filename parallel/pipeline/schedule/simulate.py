"""A schedule simulated in time: start and end of each action, idle time, live activations.

When a send has completed: where a rank can wait for its sends without losing time.

A send completes when its receiver has offered to receive, which may be much later, since stages that share a rank take
turns. Until then the sender holds the tensor. So a rank waits for a send before the first of its actions that starts,
in the simulated schedule, after the send could complete:

    rank 0   0F0   0F1   0F2        1F0 is offered from the start, and 0F0 travels while 0F1 computes:
    rank 1    .    1F0   1F1        before 0F2 it has completed
"""

from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from engine.errors import ScheduleError
from engine.parallel.pipeline.schedule.actions import Action, Op, Schedule
from engine.parallel.pipeline.schedule.dependencies import Columns, DependencyGraph
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
        """Returns the time of an operation, before the factor of its stage."""
        return (self.forward, self.backward, self.backward_input, self.backward_weight)["FBIW".index(op)]

    def at(self, op: Op, stage: int) -> float:
        """Returns the time of an operation of a stage."""
        if not self.times:
            return self.of(op) * (self.stages[stage] if self.stages else 1)
        forward, for_inputs, for_weights = self.times[stage]
        return (forward, for_inputs + for_weights, for_inputs, for_weights)["FBIW".index(op)]

    @classmethod
    def of_parts(cls, forward: float, backward_input: float, backward_weight: float, transfer: float = 0) -> "Cost":
        """Costs of a whole backward that takes both of its parts."""
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
        """Ends of the last action."""
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
    """Starts every action as soon as its rank is free and its needs have arrived; sends take no time of a rank.

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
    """Starts and end of each action, by its number, if each starts as early as possible.

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


RECEIVES_AHEAD = 1
"""A rank that starts an action has offered to receive for it and for this many actions after it, ``row[i : i + 1 +
RECEIVES_AHEAD]``: a message travels while the action before its use computes, at the price of one more buffer."""

Releases = tuple[tuple[tuple[int, ...], ...], ...]
"""For each rank and each action of its row: the earlier actions with sends that are waited for just before it."""


def releases(schedule: Schedule, receives_ahead: int = RECEIVES_AHEAD) -> Releases:
    """For each rank and action: positions in the row of the earlier actions whose sends it waits for before it begins.

    Only sends to a neighbouring stage are listed; a send that no action waits for may be completed at the end of the
    row.

    Waiting there delays no rank at the costs of :class:`Cost`, and blocks none at any other costs, which is proven
    here: the receiver's action that comes with the offer precedes the waiting action in some order that keeps all
    needs. So it also does not matter whether a rank waits first or offers first.

    Raises:
        ScheduleError: the schedule is incomplete or stuck.
    """
    rules = complete_rules(schedule)
    begins, ends = action_times(rules, Cost())
    waits: dict[int, list[int]] = {}
    offers: dict[int, dict[int, int]] = {}
    for source, taker in rules.sends():
        row, there = rules.rows[rules.rank[source]], rules.rank[taker]
        # the receive is posted when ``offer`` begins; ``waiter`` is the sender's first action after that and the send
        offer = max(taker - receives_ahead, rules.rows[there].start)
        waiter = bisect_right(begins, max(begins[offer], ends[source]), source + 1, row.stop)
        if waiter < row.stop:
            waits.setdefault(waiter, []).append(source - row.start)
            latest = offers.setdefault(waiter, {})
            latest[there] = max(latest.get(there, offer), offer)
    # the proof: an order that also puts each waiter after the offers that it depends on; raises if there is none
    rules.order((*rules.needs, *_columns(offers, len(rules.actions))))
    return tuple(tuple(tuple(sorted(waits.get(number, ()))) for number in row) for row in rules.rows)


def _columns(after: dict[int, dict[int, int]], actions: int) -> Columns:
    """The predecessors of each action as rules, one predecessor per column."""
    columns: list[list[int]] = []
    for number, earlier in after.items():
        for index, before in enumerate(earlier.values()):
            if index == len(columns):
                columns.append([-1] * actions)
            columns[index][number] = before
    return tuple(columns)
