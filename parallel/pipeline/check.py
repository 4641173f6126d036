"""Whether a schedule can be done, how long it takes and how much it holds; found from the data alone."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from engine.errors import ScheduleError
from engine.parallel.pipeline.actions import Action, Op, Schedule
from engine.parallel.pipeline.order import Rules


def check(schedule: Schedule, receives_ahead: int | None = None) -> None:
    """Prove that ``schedule`` can be run, before anything is sent.

    Complete: every stage does the forward and the backward (B, or I and W) of each microbatch exactly once,
    on the rank that holds the stage; without backwards where the schedule is not for training.

    Ordered, and free of deadlock with asynchronous sends: a rank works through its row from left to right,
    waits before each action for all that it ``needs``, and never waits for a send. Values that a stage
    sends past its neighbour add nothing here: the chain of needs already orders them.

    One order of messages: all stages take the microbatches in the same order, forwards and backwards each. So
    between any two stages messages are received in the order in which they are sent, and need no tags.

    With ``receives_ahead`` also free of deadlock with blocking sends and no buffer anywhere (rendezvous): a rank
    that begins an action has offered to receive for it and for so many actions after it, and goes on to its
    next action when what it sent was met by such an offer. 0 is enough for gpipe, 1f1b and zb-h1 of one stage a rank;
    interleaved needs 1, or 2(n-p) where n > p microbatches are in a round. No small number is enough where a rank runs
    ahead of a stage that takes its messages later: looped-bfs, zb-v, dualpipe-v, zb-h1 of several stages a rank. Their
    sends must be asynchronous, and ``releases`` says when one has ended.

    Raises:
        ScheduleError: names what is missing, doubled or misplaced, or all actions of one circle of waiting
            and what each waits for, or the first two actions that take messages out of order.
    """
    rules = complete_rules(schedule)
    rules.order(rules.needs)
    if receives_ahead is not None:
        rules.order(rules.with_rendezvous(receives_ahead))
    _check_message_order(schedule)


class Span(NamedTuple):
    """One action on the time axis."""

    action: Action
    start: float
    end: float


class StageTimes(NamedTuple):
    """How long the parts of one stage take; a whole backward takes both of its parts."""

    forward: float
    backward_input: float
    backward_weight: float


@dataclass(frozen=True, slots=True)
class Cost:
    """How long things take, in any one unit. Whole numbers stay exact."""

    forward: float = 1
    backward: float = 2
    backward_input: float = 1
    backward_weight: float = 1
    transfer: float = 0
    """From the end of an action to the earliest start of one on another rank that needs it."""
    stages: tuple[float, ...] = ()
    """A factor for each stage; empty: all are alike."""
    times: tuple[StageTimes, ...] = ()
    """What each stage takes, in place of all the above but ``transfer``; empty: that holds."""

    def of(self, op: Op) -> float:
        """The time of one operation, before the factor of its stage."""
        return (self.forward, self.backward, self.backward_input, self.backward_weight)["FBIW".index(op)]

    def at(self, op: Op, stage: int) -> float:
        """The time of one operation of a stage."""
        if not self.times:
            return self.of(op) * (self.stages[stage] if self.stages else 1)
        forward, for_inputs, for_weights = self.times[stage]
        return (forward, for_inputs + for_weights, for_inputs, for_weights)["FBIW".index(op)]


@dataclass(frozen=True)
class Timeline:
    """A schedule laid out in time: the spans of each rank, in order."""

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]

    @cached_property
    def makespan(self) -> float:
        """When the last action ends."""
        return max(row[-1].end for row in self.spans if row)

    @cached_property
    def idle(self) -> float:
        """Time in which ranks do nothing, summed over ranks."""
        busy = sum(span.end - span.start for row in self.spans for span in row)
        return self.makespan * len(self.spans) - busy

    @property
    def bubble(self) -> float:
        """Share of the ranks' time that is idle; (p-1)/(m+p-1) for GPipe and 1F1B of equal stages."""
        return self.idle / (self.makespan * len(self.spans)) if self.makespan else 0.0


def simulate(schedule: Schedule, cost: Cost | None = None) -> Timeline:
    """Start every action as soon as its rank is free and its needs have arrived; sends take no time of a rank.

    Raises:
        ScheduleError: the schedule is incomplete or cannot be done, or ``cost`` is for other stages.
    """
    cost = cost or Cost()
    for name, noun, given in (("stages", "factors", cost.stages), ("times", "entries", cost.times)):
        if given and len(given) != schedule.stages:
            raise ScheduleError(
                f"cost.{name} has {len(given)} {noun} for the {schedule.stages} stages of schedule "
                f"{schedule.name}; give one for each stage, or none."
            )
    rules = complete_rules(schedule)
    begins, ends = times(rules, cost)
    spans = list(map(Span, rules.actions, begins, ends))
    return Timeline(schedule, tuple(tuple(spans[row.start : row.stop]) for row in rules.rows))


def complete_rules(schedule: Schedule) -> Rules:
    """Its actions as numbers.

    Raises:
        ScheduleError: the schedule is incomplete.
    """
    _check_complete(schedule)
    return Rules(schedule)


def times(rules: Rules, cost: Cost) -> tuple[list[float], list[float]]:
    """When each action begins and ends, by its number, if it begins as soon as it can.

    Raises:
        ScheduleError: the schedule cannot be done.
    """
    lasts = {(op, stage): cost.at(op, stage) for op in Op for stage in range(rules.schedule.stages)}
    free: list[float] = [0] * len(rules.rows)
    begins: list[float] = [0] * len(rules.actions)
    ends: list[float] = [0] * len(rules.actions)
    other, ranks = rules.needs[1], rules.rank
    for number in rules.order(rules.needs):
        op, stage, _ = rules.actions[number]
        rank, need = ranks[number], other[number]
        start = free[rank]
        if need >= 0 and ranks[need] != rank:  # those of its own rank ended before it was free
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


def _check_message_order(schedule: Schedule) -> None:
    """Values may go past the neighbour, so that all stages count, not only pairs; within one rank nothing travels."""
    if sum(map(bool, schedule.stages_of_rank)) < 2:
        return
    flows: list[list[list[Action]]] = [[[] for _ in range(schedule.stages)] for _ in range(2)]
    forward, weight = Op.FORWARD, Op.BACKWARD_WEIGHT
    for row in schedule.per_rank:
        for action in row:
            if action.op is not weight:
                flows[action.op is forward][action.stage].append(action)
    for first, *others in flows:
        microbatches = [action.microbatch for action in first]
        for stage in others:
            if [action.microbatch for action in stage] != microbatches:
                here, there = next(pair for pair in zip(first, stage, strict=True) if pair[0][2] != pair[1][2])
                raise ScheduleError(
                    f"schedule {schedule.name} has {there} where stage 0 has {here}: messages between two stages are "
                    "taken in the order in which they are sent; let all stages take microbatches in the same order."
                )


def _check_complete(schedule: Schedule) -> None:
    if _is_complete(schedule):
        return
    count = Counter(action for row in schedule.per_rank for action in row)
    wanted = set(_wanted(schedule))
    rank_of = schedule.rank_of_stage
    problems = {
        "missing": [str(action) for action in sorted(wanted - count.keys())],
        "more than once": [str(action) for action, times in count.items() if times > 1 and action in wanted],
        "not part of it": [str(action) for action in sorted(count.keys() - wanted)],
        "on the wrong rank": [
            f"{action} (on {rank}, not {rank_of[action.stage]})"
            for rank, row in enumerate(schedule.per_rank)
            for action in row
            if action in wanted and rank_of[action.stage] != rank
        ],
    }
    found = "; ".join(f"{what}: {_some(tokens)}" for what, tokens in problems.items() if tokens)
    must = "F and B (or I and W)" if schedule.training else "F and nothing else"
    raise ScheduleError(
        f"schedule {schedule.name} of {schedule.stages} stages and {schedule.microbatches} microbatches is not "
        f"complete: {found}. Each stage does {must} of every microbatch once, on its own rank."
    )


def _is_complete(schedule: Schedule) -> bool:
    """Quickly, without saying what is wrong."""
    stages, microbatches, rank_of = schedule.stages, schedule.microbatches, schedule.rank_of_stage
    bits = {Op.FORWARD: 1, Op.BACKWARD: 2, Op.BACKWARD_INPUT: 4, Op.BACKWARD_WEIGHT: 8}
    seen = bytearray(stages * microbatches)
    for rank, row in enumerate(schedule.per_rank):
        for op, stage, microbatch in row:
            if not (0 <= stage < stages and 0 <= microbatch < microbatches and rank_of[stage] == rank):
                return False
            cell, bit = stage * microbatches + microbatch, bits[op]
            if seen[cell] & bit:
                return False
            seen[cell] |= bit
    return set(seen) <= ({1 | 2, 1 | 4 | 8} if schedule.training else {1})


def _wanted(schedule: Schedule) -> Iterator[Action]:
    for stage in range(schedule.stages):
        for microbatch in range(schedule.microbatches):
            yield Action(Op.FORWARD, stage, microbatch)
            if schedule.training:
                backward = schedule.backward_of(stage, microbatch)
                yield backward
                if backward.op is Op.BACKWARD_INPUT:
                    yield Action(Op.BACKWARD_WEIGHT, stage, microbatch)


def _some(tokens: Sequence[str], most: int = 6) -> str:
    more = f" and {len(tokens) - most} more" if len(tokens) > most else ""
    return ", ".join(tokens[:most]) + more
