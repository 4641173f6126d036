"""Whether a schedule can be done, how long it takes and how much it holds; found from the data alone."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from engine.errors import ScheduleError
from engine.parallel.pipeline.order import Rules
from engine.parallel.pipeline.schedule import Action, Op, Schedule


def check(schedule: Schedule, receives_ahead: int = 1) -> None:
    """Prove that ``schedule`` can be run, before anything is sent.

    Complete: every stage does the forward and the backward (B, or I and W) of each microbatch exactly once,
    on the rank that holds the stage; without backwards where the schedule is not for training.

    Ordered, and free of deadlock with asynchronous sends: a rank works through its row from left to right,
    waits before each action for all that it ``needs``, and never waits for a send. Values that a stage
    sends past its neighbour add nothing here: the chain of needs already orders them.

    Free of deadlock with blocking sends and no buffer anywhere (rendezvous): between two actions a rank offers
    what the finished one ``sends`` together with what the next one ``receives``, and goes on when partners
    have met both, each in the same gap of its own row. With ``receives_ahead`` = 1, any two ranks then also
    take their messages in the order in which they were sent, so that messages need no tags. Larger values
    let a rank offer the receives of that many actions to come (interleaved stages need 2). A send right
    after each action that blocks before the next receive is offered would stop every 1F1B, and is not proven.

    Raises:
        ScheduleError: names what is missing, doubled or misplaced, or all actions of one circle of waiting
            and what each waits for.
    """
    _check_complete(schedule)
    rules = Rules(schedule)
    rules.order(rules.needs)
    rules.order(rules.with_rendezvous(receives_ahead))


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

    def at(self, action: Action) -> float:
        """The time of one action."""
        if not self.times:
            return self.of(action.op) * (self.stages[action.stage] if self.stages else 1)
        forward, for_inputs, for_weights = self.times[action.stage]
        return (forward, for_inputs + for_weights, for_inputs, for_weights)["FBIW".index(action.op)]


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
    _check_complete(schedule)
    rules = Rules(schedule)
    free: list[float] = [0] * len(schedule.per_rank)
    ends: list[float] = [0] * len(rules.actions)
    spans: list[list[Span]] = [[] for _ in schedule.per_rank]
    for number in rules.order(rules.needs):
        action, rank = rules.actions[number], rules.rank[number]
        start = free[rank]
        for need in rules.needs[number]:
            if rules.rank[need] != rank:  # those of its own rank ended before it was free
                start = max(start, ends[need] + cost.transfer)
        free[rank] = ends[number] = start + cost.at(action)
        spans[rank].append(Span(action, start, free[rank]))
    return Timeline(schedule, tuple(map(tuple, spans)))


def peak_live(schedule: Schedule) -> tuple[int, ...]:
    """Most activations that each rank holds at once, each of one stage and one microbatch.

    F adds one, B or W frees it; in a schedule without backwards the end of F does.
    """
    change = {Op.FORWARD: 1, Op.BACKWARD: -1, Op.BACKWARD_INPUT: 0, Op.BACKWARD_WEIGHT: -1}
    if not schedule.training:
        return (1,) * len(schedule.per_rank)
    return tuple(max(accumulate(change[action.op] for action in row)) for row in schedule.per_rank)


def _check_complete(schedule: Schedule) -> None:
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
    if found:
        must = "F and B (or I and W)" if schedule.training else "F and nothing else"
        raise ScheduleError(
            f"schedule {schedule.name} of {schedule.stages} stages and {schedule.microbatches} microbatches is not "
            f"complete: {found}. Each stage does {must} of every microbatch once, on its own rank."
        )


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
