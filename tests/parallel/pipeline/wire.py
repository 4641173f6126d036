"""Ranks that play rows over channels without tags, at whatever speed chance gives them.

Every flow between two stages is a channel: what is sent comes out in the order in which it went in. A message
moves when it is sent and a receive is offered; only then has its send ended. Nothing but the needs of an action
is shared with the checker.
"""

import random
from collections import defaultdict, deque

from engine.parallel.pipeline.schedule.actions import Action, Op, Schedule

Channel = tuple[bool, int, int]


class Rank:
    """Where one rank stands in its row, and what it has offered."""

    def __init__(self, row: tuple[Action, ...]) -> None:
        self.row = row
        self.at = 0
        self.offered = 0
        self.live = 0
        self.peak = 0


class Wire:
    """All ranks of a schedule; ``waits`` names the sends that are waited for before each action."""

    def __init__(self, schedule: Schedule, waits: tuple[tuple[tuple[int, ...], ...], ...], ahead: int) -> None:
        self.schedule, self.waits, self.ahead = schedule, waits, ahead
        self.ranks = [Rank(row) for row in schedule.per_rank]
        self.sent: dict[Channel, deque[Action]] = defaultdict(deque)
        self.wanted: dict[Channel, deque[Action]] = defaultdict(deque)
        self.left: set[Action] = set()
        self.arrived: set[Action] = set()
        self.done: set[Action] = set()

    def play(self, chance: random.Random, offers_first: bool) -> None:
        """Until all rows are done; fails where nobody can go on, or where another message comes than is needed."""
        going = [rank for rank, state in enumerate(self.ranks) if state.row]
        while going:
            able = [rank for rank in going if self._can(rank, offers_first)]
            assert able, f"stuck at {[str(state.row[state.at]) for state in self.ranks if state.at < len(state.row)]}"
            self._do(chance.choice(able))
            going = [rank for rank in going if self.ranks[rank].at < len(self.ranks[rank].row)]

    def _can(self, rank: int, offers_first: bool) -> bool:
        state = self.ranks[rank]
        action = state.row[state.at]
        if offers_first:
            self._offer(rank)
        if any(state.row[sender] not in self.left for sender in self.waits[rank][state.at]):
            return False
        self._offer(rank)
        source = self.schedule.receives(action)
        near = [need for need in self.schedule.needs(action) if need != source]
        assert all(need in self.done for need in near), f"{action} comes before what it needs of its own rank"
        return source is None or source in self.arrived

    def _offer(self, rank: int) -> None:
        state = self.ranks[rank]
        while state.offered <= min(state.at + self.ahead, len(state.row) - 1):
            source = self.schedule.receives(state.row[state.offered])
            if source is not None:
                self.wanted[self._channel(source)].append(source)
                self._move(self._channel(source))
            state.offered += 1

    def _do(self, rank: int) -> None:
        state = self.ranks[rank]
        action = state.row[state.at]
        self.done.add(action)
        state.at += 1
        state.live += {Op.FORWARD: 1, Op.BACKWARD: -1, Op.BACKWARD_INPUT: 0, Op.BACKWARD_WEIGHT: -1}[action.op]
        state.peak = max(state.peak, state.live)
        if self.schedule.sends(action) is not None:
            self.sent[self._channel(action)].append(action)
            self._move(self._channel(action))

    def _channel(self, source: Action) -> Channel:
        taker = self.schedule.feeds(source)
        assert taker is not None
        return source.op is Op.FORWARD, source.stage, taker.stage

    def _move(self, channel: Channel) -> None:
        while self.sent[channel] and self.wanted[channel]:
            comes, needed = self.sent[channel].popleft(), self.wanted[channel].popleft()
            assert comes == needed, f"{comes} comes where {needed} is needed"
            self.left.add(comes)
            self.arrived.add(comes)
