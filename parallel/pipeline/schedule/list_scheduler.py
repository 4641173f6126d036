"""Greedy list scheduling on a clock: at every tick each rank starts the most urgent action that it can start.

Forward, input gradient and weight gradient of a stage take one tick each. For every stage only three counts are
kept, since microbatches pass all stages in the same order, and each count is limited by the one before it:

    forwards done of stage s      < forwards done of stage s-1
    input gradients of stage s    < those of stage s+1, and < its own forwards
    weight gradients of stage s   < its own input gradients; each frees an activation

So a rank's choice takes a few comparisons, a row is in order by construction, and the result is deterministic.
"""

from dataclasses import dataclass

from engine.parallel.pipeline.schedule.actions import Placement

FORWARD, INPUT, WEIGHT = range(3)
Tick = tuple[int, int, int, int]
"""Start of an action, which of the three it is, its stage and its microbatch."""


@dataclass(frozen=True, slots=True)
class Policy:
    """Preferences of the ranks, and limits on what they hold."""

    live: int
    """Most activations that a rank holds, each of one stage and one microbatch."""
    ahead: tuple[int, ...]
    """For each rank: most forwards whose input gradient is not done."""
    backlog: tuple[int, ...]
    """For each rank: most weight gradients that are deferred; beyond it they come first, below it they fill gaps."""
    forward_first: bool = True
    """True: forwards come before input gradients."""
    deep_inputs: bool = True
    """True: input gradients of later stages come before those of earlier ones. Forwards of later stages always do."""


def list_schedule(placement: Placement, microbatches: int, policy: Policy) -> list[list[Tick]]:
    """The rows of all ranks, with the tick at which every action starts.

    A forward leaves one activation free for every later stage of its rank. So the oldest microbatch can always advance:
    microbatches that fill the places meant for it have passed all forwards, and can go back without any.
    """
    clock = _Clock(placement, microbatches, policy)
    rows: list[list[Tick]] = [[] for _ in placement]
    left = 3 * microbatches * len(clock.forwards)
    tick = 0
    while left:
        chosen = [(rank, choice) for rank in range(len(placement)) if (choice := clock.choose(rank))]
        assert chosen, "no rank can continue: the policy allows too little"
        for rank, (kind, stage) in chosen:
            rows[rank].append((tick, kind, stage, clock.do(rank, kind, stage)))
        left -= len(chosen)
        tick += 1
    return rows


class _Clock:
    """Counts of all stages at the start of a tick."""

    def __init__(self, placement: Placement, microbatches: int, policy: Policy) -> None:
        stages = sum(map(len, placement))
        self.policy, self.last = policy, stages - 1
        self.forwards = [0] * stages
        self.inputs = [0] * stages
        self.weights = [0] * stages
        self._microbatches = microbatches
        self._deepest = [held[::-1] for held in placement]
        self._inputs_order = self._deepest if policy.deep_inputs else list(placement)
        self._live = [0] * len(placement)
        self._put_off = [0] * len(placement)

    def choose(self, rank: int) -> tuple[int, int] | None:
        """The most urgent action that ``rank`` can start now, or None."""
        if self._put_off[rank] > self.policy.backlog[rank]:
            return self._weight(rank)
        if self.policy.forward_first:
            return self._forward(rank) or self._input(rank) or self._weight(rank)
        return self._input(rank) or self._forward(rank) or self._weight(rank)

    def do(self, rank: int, kind: int, stage: int) -> int:
        """Count an action as done; returns its microbatch."""
        counts = (self.forwards, self.inputs, self.weights)[kind]
        self._live[rank] += (1, 0, -1)[kind]
        self._put_off[rank] += (0, 1, -1)[kind]
        counts[stage] += 1
        return counts[stage] - 1

    def _forward(self, rank: int) -> tuple[int, int] | None:
        live, forwards = self._live[rank], self.forwards
        if live - self._put_off[rank] >= self.policy.ahead[rank]:
            return None
        for later, stage in enumerate(self._deepest[rank]):
            if live + later >= self.policy.live:
                return None
            if forwards[stage] < (forwards[stage - 1] if stage else self._microbatches):
                return FORWARD, stage
        return None

    def _input(self, rank: int) -> tuple[int, int] | None:
        forwards, inputs = self.forwards, self.inputs
        for stage in self._inputs_order[rank]:
            done = inputs[stage]
            if done < forwards[stage] and (stage == self.last or done < inputs[stage + 1]):
                return INPUT, stage
        return None

    def _weight(self, rank: int) -> tuple[int, int] | None:
        for stage in reversed(self._deepest[rank]):
            if self.weights[stage] < self.inputs[stage]:
                return WEIGHT, stage
        return None
