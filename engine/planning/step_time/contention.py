"""A schedule simulated in time where ranks compete: for the processors of a machine, and for the way out of a rank.

    compute   all ranks that compute share the processors: with P of them and more than P ranks, each gets P / ranks
    wait      what an action waits for besides, such as sums over tensor ranks, takes no processor
    send      messages leave a pipeline rank one after another; a transfer takes no time of the rank itself

With a processor for every rank and endless links this is :func:`~engine.parallel.pipeline.schedule.simulate.simulate`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.parallel.pipeline.schedule.actions import Action, Op, Schedule
from engine.parallel.pipeline.schedule.dependencies import DependencyGraph
from engine.parallel.pipeline.schedule.simulate import Span, StepTimeline
from engine.parallel.pipeline.schedule.validate import complete_rules


class Task(NamedTuple):
    """What an action of a stage takes, in seconds."""

    work: float
    """On a processor of its own."""
    wait: float = 0.0
    """After it, without a processor."""


Hop = Callable[[Action, int], tuple[float, float]]
"""(seconds on the way out of its rank, seconds more until it arrives) of the result of an action, sent to a rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contention:
    """For what the ranks of a schedule compete."""

    copies: int = 1
    """Ranks that do what a pipeline rank does, at the same time: its data and tensor ranks."""
    processors: float = math.inf
    """Ranks that compute at full speed at the same time."""
    hop: Hop | None = None
    """None: a result is there as soon as it is made."""


def simulate_contention(
    schedule: Schedule, tasks: Mapping[tuple[Op, int], Task], contention: Contention
) -> StepTimeline:
    """Start every action as soon as its rank is free and its needs have arrived.

    Args:
        tasks: by operation and stage.

    Raises:
        ScheduleError: the schedule is incomplete or stuck.
    """
    rules = complete_rules(schedule)
    _ = rules.needs_order  # refuses a schedule that is stuck
    play = _Play(rules, tasks, contention)
    play.run()
    spans = list(map(Span, rules.actions, play.begins, play.ends))
    return StepTimeline(schedule, tuple(tuple(spans[row.start : row.stop]) for row in rules.rows))


@dataclass(slots=True)
class _Busy:
    """An action under way."""

    number: int
    work: float
    """That is left."""
    until: float = math.inf
    """When its wait ends; infinite while it works."""


@dataclass(slots=True)
class _Play:
    rules: DependencyGraph
    tasks: Mapping[tuple[Op, int], Task]
    contention: Contention
    begins: list[float] = field(init=False)
    ends: list[float] = field(init=False)
    _now: float = 0.0
    _next: list[int] = field(init=False)
    """Of each rank, the number of its next action."""
    _busy: dict[int, _Busy] = field(default_factory=dict)
    """By rank."""
    _arrived: list[float] = field(init=False)
    """When what an action needs of another rank is there; infinite: that has not ended yet."""
    _takers: dict[int, list[int]] = field(default_factory=dict)
    _free: dict[int, float] = field(default_factory=dict)
    """When the way out of a rank is free."""

    def __post_init__(self) -> None:
        count, rank = len(self.rules.actions), self.rules.rank
        self.begins, self.ends = [0.0] * count, [math.inf] * count
        self._arrived = [0.0] * count
        self._next = [row.start for row in self.rules.rows]
        for taker, need in enumerate(self.rules.needs[1]):
            if need >= 0 and rank[need] != rank[taker]:
                self._arrived[taker] = math.inf
                self._takers.setdefault(need, []).append(taker)

    def run(self) -> None:
        """Go from event to event until no rank has anything left to do."""
        self._start()
        while self._busy or any(at < row.stop for at, row in zip(self._next, self.rules.rows, strict=True)):
            self._advance()
            self._start()

    def _start(self) -> None:
        for rank, row in enumerate(self.rules.rows):
            number = self._next[rank]
            if rank not in self._busy and number < row.stop and self._arrived[number] <= self._now:
                self.begins[number] = self._now
                self._busy[rank] = _Busy(number, self._task(number).work)
                self._next[rank] += 1

    def _task(self, number: int) -> Task:
        op, stage, _ = self.rules.actions[number]
        return self.tasks[op, stage]

    def _advance(self) -> None:
        """To the next moment at which work ends, a wait ends or a message arrives."""
        working = [busy for busy in self._busy.values() if busy.until == math.inf]
        speed = min(1.0, self.contention.processors / (len(working) * self.contention.copies)) if working else 1.0
        moments = [self._now + busy.work / speed for busy in working]
        moments += [busy.until for busy in self._busy.values() if busy.until < math.inf]
        moments += [
            self._arrived[at]
            for at, row in zip(self._next, self.rules.rows, strict=True)
            if at < row.stop and self._now < self._arrived[at] < math.inf
        ]
        then = min(moments)
        done = {id(busy) for busy in working if self._now + busy.work / speed <= then}
        for busy in working:
            busy.work -= (then - self._now) * speed
        self._now = then
        for rank, busy in list(self._busy.items()):
            if id(busy) in done:
                busy.until = then + self._task(busy.number).wait
            if busy.until <= then:
                del self._busy[rank]
                self._end(busy.number)

    def _end(self, number: int) -> None:
        self.ends[number] = self._now
        rank = self.rules.rank[number]
        for taker in self._takers.get(number, ()):
            if self.contention.hop is None:
                self._arrived[taker] = self._now
                continue
            out, further = self.contention.hop(self.rules.actions[number], self.rules.rank[taker])
            sent = max(self._now, self._free.get(rank, 0.0)) + out
            self._free[rank] = sent
            self._arrived[taker] = sent + further
