"""Simulation of a schedule in time: start and end of each action, idle time, live activations, completion of sends.

A send completes after the receiver has posted the receive, which may be much later, because stages on one rank run one
after the other. Until then the sender's tensor stays allocated. So a rank waits for a send before the first of its
actions that starts, in the simulated schedule, after the send can complete:

    rank 0   0F0   0F1   0F2        1F0 is posted from the start, and the message of 0F0 is sent
    rank 1    .    1F0   1F1        during 0F1: the send has completed before 0F2
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
    """Action with its start and end time: in seconds if measured, in the unit of :class:`Cost` if simulated."""

    action: Action
    start: float
    end: float


class StageTimes(NamedTuple):
    """Times of one stage: forward, input gradient and weight gradient."""

    forward: float
    backward_input: float
    backward_weight: float


@dataclass(frozen=True, slots=True)
class Cost:
    """Times of actions and transfers for the simulation, all in one unit."""

    forward: float = 1
    backward: float = 2
    backward_input: float = 1
    backward_weight: float = 1
    transfer: float = 0
    """Time from the end of an action until its result arrives on another rank."""
    stages: tuple[float, ...] = ()
    """Factor on the times of each stage; empty: 1 for every stage."""
    times: tuple[StageTimes, ...] = ()
    """Times of each stage, in place of all fields above except ``transfer``; empty: unused."""

    def of(self, op: Op) -> float:
        """Returns the time of an action of type ``op``, before multiplication by a stage's factor in ``stages``."""
        return (self.forward, self.backward, self.backward_input, self.backward_weight)["FBIW".index(op)]

    def at(self, op: Op, stage: int) -> float:
        """Returns the time of an action of type ``op`` on ``stage``."""
        if not self.times:
            return self.of(op) * (self.stages[stage] if self.stages else 1)
        forward, for_inputs, for_weights = self.times[stage]
        return (forward, for_inputs + for_weights, for_inputs, for_weights)["FBIW".index(op)]

    @classmethod
    def of_parts(cls, forward: float, backward_input: float, backward_weight: float, transfer: float = 0) -> "Cost":
        """Returns costs in which a whole backward takes ``backward_input`` + ``backward_weight``."""
        return cls(forward, backward_input + backward_weight, backward_input, backward_weight, transfer)

    def shared(self, ranks: int, stages: int) -> "Cost":
        """Converts the times of a rank's share of the model to the times of single stages of equal size.

        ``stages``: number over all ``ranks``. Transfers are unchanged.
        """
        return replace(self, stages=(ranks / stages,) * stages) if stages != ranks else self


@dataclass(frozen=True)
class StepTimeline:
    """Start and end of every action of one step, by rank and in order."""

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]

    @cached_property
    def makespan(self) -> float:
        """End of the last action of all ranks; the step starts at 0."""
        return max(row[-1].end for row in self.spans if row)

    @cached_property
    def idle(self) -> float:
        """Idle time of all ranks together, from 0 to ``makespan``."""
        busy = sum(span.end - span.start for row in self.spans for span in row)
        return self.makespan * len(self.spans) - busy

    @property
    def bubble(self) -> float:
        """Idle share of the ranks' time, from 0 to 1."""
        return self.idle / (self.makespan * len(self.spans)) if self.makespan else 0.0


def simulate(schedule: Schedule, cost: Cost | None = None) -> StepTimeline:
    """Simulates one step of ``schedule``: each action starts when its rank is free and its inputs have arrived.

    Without ``cost``, a forward, an input gradient and a weight gradient take 1 each, a transfer 0.

    Raises:
        ScheduleError: the schedule is incomplete or stuck, or ``cost`` is for another number of stages.
    """
    cost = cost or Cost()
    for name, noun, given in (("stages", "factors", cost.stages), ("times", "entries", cost.times)):
        if given and len(given) != schedule.stages:
            raise ScheduleError(
                f"cost.{name} has {len(given)} {noun} for the {schedule.stages} stages of schedule "
                f"{schedule.name}; pass one for each stage, or an empty cost.{name}."
            )
    rules = complete_rules(schedule)
    begins, ends = action_times(rules, cost)
    spans = list(map(Span, rules.actions, begins, ends))
    return StepTimeline(schedule, tuple(tuple(spans[row.start : row.stop]) for row in rules.rows))


def action_times(rules: DependencyGraph, cost: Cost) -> tuple[list[float], list[float]]:
    """Returns (start times, end times) of all actions by action number; each starts as early as possible.

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
        if need >= 0 and ranks[need] != rank:  # inputs from the same rank were ready before the rank was free
            start = max(start, ends[need] + cost.transfer)
        begins[number] = start
        free[rank] = ends[number] = start + lasts[op, stage]
    return begins, ends


def peak_live(schedule: Schedule) -> tuple[int, ...]:
    """Returns the peak number of live activations (one per stage and microbatch) on each rank."""
    change = {Op.FORWARD: 1, Op.BACKWARD: -1, Op.BACKWARD_INPUT: 0, Op.BACKWARD_WEIGHT: -1}
    if not schedule.training:
        return (1,) * len(schedule.per_rank)
    return tuple(max(accumulate(change[action.op] for action in row), default=0) for row in schedule.per_rank)


RECEIVES_AHEAD = 1
"""Number of following actions with receives that a rank posts in advance.

A transfer overlaps with the action before its use, at the price of one more buffer.
"""

Releases = tuple[tuple[tuple[int, ...], ...], ...]
"""For each action of each rank, positions of the earlier actions whose sends must have completed before it."""


def releases(schedule: Schedule, receives_ahead: int = RECEIVES_AHEAD) -> Releases:
    """Finds the sends to neighbouring stages that must complete before each action of the sending rank.

    Returns, for each rank and action, the positions of the sending actions among the rank's actions. Waits for these
    sends delay no rank at the default :class:`Cost`, and cannot deadlock at any cost. ``receives_ahead``: number of
    next actions for which a rank posts receives in advance.

    Raises:
        ScheduleError: the schedule is incomplete or stuck.
    """
    rules = complete_rules(schedule)
    begins, ends = action_times(rules, Cost())
    waits: dict[int, list[int]] = {}
    offers: dict[int, dict[int, int]] = {}
    for source, taker in rules.sends():
        row, there = rules.rows[rules.rank[source]], rules.rank[taker]
        # the receive is posted when ``offer`` begins; ``waiter`` is the sender's first action after post and send
        offer = max(taker - receives_ahead, rules.rows[there].start)
        waiter = bisect_right(begins, max(begins[offer], ends[source]), source + 1, row.stop)
        if waiter < row.stop:
            waits.setdefault(waiter, []).append(source - row.start)
            latest = offers.setdefault(waiter, {})
            latest[there] = max(latest.get(there, offer), offer)
    # the proof: an order with each waiter after the posts it depends on; raises if there is none
    rules.order((*rules.needs, *_columns(offers, len(rules.actions))))
    return tuple(tuple(tuple(sorted(waits.get(number, ()))) for number in row) for row in rules.rows)


def _columns(after: dict[int, dict[int, int]], actions: int) -> Columns:
    """Returns the predecessors of each action as rules, one predecessor per column."""
    columns: list[list[int]] = []
    for number, earlier in after.items():
        for index, before in enumerate(earlier.values()):
            if index == len(columns):
                columns.append([-1] * actions)
            columns[index][number] = before
    return tuple(columns)
