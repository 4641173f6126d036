"""Schedules with split backwards: weight gradients, needed by no other stage, fill the idle time.

In the drawings every action takes one clock, and a whole backward two. If no stage gains from an earlier input
gradient, both halves are merged into one whole backward, which costs less.

The method is greedy list scheduling on a clock: at every tick each rank starts the most urgent possible action.

Forward, input gradient and weight gradient of a stage take one tick each. Microbatches pass all stages in the same
order, so three counts per stage suffice, and each count limits the next:

    forwards done of stage s      < forwards done of stage s-1
    input gradients of stage s    < gradients of stage s+1, and < its own forwards
    weight gradients of stage s   < its own input gradients; each frees an activation

A choice takes a few comparisons, a row is in order by construction, and the result is deterministic.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from engine.parallel.pipeline.schedule.actions import Action, Op, Placement, Schedule, loop, v_shape
from engine.parallel.pipeline.schedule.dependencies import DependencyGraph
from engine.parallel.pipeline.schedule.one_f_one_b import (
    Rows,
    interleaved_split,
    long_rounds,
    short_rounds,
    v_split,
)
from engine.parallel.pipeline.schedule.simulate import Cost, action_times

FORWARD, INPUT, WEIGHT = range(3)
Tick = tuple[int, int, int, int]
"""Tuple (start tick, type FORWARD, INPUT or WEIGHT, stage, microbatch) of a scheduled action."""


@dataclass(frozen=True, slots=True)
class Policy:
    """Priorities of actions, and limits on live activations, by which :func:`list_schedule` orders the actions."""

    live: int
    """Maximum number of live activations of a rank, each of one stage and one microbatch."""
    ahead: tuple[int, ...]
    """Maximum number of forwards with a pending input gradient, by rank."""
    backlog: tuple[int, ...]
    """Maximum number of deferred weight gradients on each rank; a full backlog is computed first, otherwise they fill
    idle time.
    """
    forward_first: bool = True
    """True if forwards precede input gradients."""
    deep_inputs: bool = True
    """True if input gradients of later stages come first. Forwards of later stages always come first."""


def list_schedule(placement: Placement, microbatches: int, policy: Policy) -> list[list[Tick]]:
    """Schedules all actions greedily: at each tick, every rank starts its most urgent possible action.

    ``policy`` determines the urgency. Returns the actions of each rank as tuples (start tick, type, stage, microbatch).
    """
    clock = _Clock(placement, microbatches, policy)
    rows: list[list[Tick]] = [[] for _ in placement]
    left = 3 * microbatches * len(clock.forwards)
    tick = 0
    while left:
        # all ranks choose before any action counts, because a result can be used from the next tick on
        chosen = [(rank, choice) for rank in range(len(placement)) if (choice := clock.choose(rank))]
        assert chosen, "no rank can continue: the policy allows too little"
        for rank, (kind, stage) in chosen:
            rows[rank].append((tick, kind, stage, clock.do(rank, kind, stage)))
        left -= len(chosen)
        tick += 1
    return rows


class _Clock:
    """State of all stages at the start of a tick, as counts."""

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
        """Returns the most urgent action that ``rank`` can start now, or None."""
        # a deferred gradient keeps an activation live: above the backlog, memory comes first
        if self._put_off[rank] > self.policy.backlog[rank]:
            return self._weight(rank)
        if self.policy.forward_first:
            return self._forward(rank) or self._input(rank) or self._weight(rank)
        return self._input(rank) or self._forward(rank) or self._weight(rank)

    def do(self, rank: int, kind: int, stage: int) -> int:
        """Counts an action as done; returns its microbatch."""
        counts = (self.forwards, self.inputs, self.weights)[kind]
        self._live[rank] += (1, 0, -1)[kind]
        self._put_off[rank] += (0, 1, -1)[kind]
        counts[stage] += 1
        return counts[stage] - 1

    def _forward(self, rank: int) -> tuple[int, int] | None:
        live, forwards = self._live[rank], self.forwards
        # live minus deferred: the forwards with a pending input gradient
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


_OPS = (Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
_SLOW = (Cost(transfer=0.25), Cost(transfer=0.5), Cost(transfer=2))
"""Costs with slow messages, for the choice of an order at unknown costs."""


# zb_h1(3, 4): 1f1b with the weight gradients of the later ranks deferred into their idle time. Rank 0 needs no
# split: no stage waits for the input gradient of stage 0.
#
#    rank 0  F0 F1 F2  .  . B0 B0 F3 B1 B1 B2 B2 B3 B3
#    rank 1   . F0 F1  . I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
#    rank 2   .  . F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
def zb_h1(ranks: int, microbatches: int, virtual_stages: int = 1, cost: Cost | None = None) -> Schedule:
    """Makes ZB-H1 (Qi et al. 2023, Zero Bubble Pipeline Parallelism), interleaved for several stages per rank.

    With m >= p microbatches on p ranks of v stages, the bubble is (p-1)/(3vm+p-1). A rank stores the activations of at
    most pv pairs (stage, microbatch) at a time.

    With ``cost``, simulation selects the order with the shortest step, possibly with more stored activations.
    """
    p, m, v = ranks, microbatches, virtual_stages
    placement, most = loop(p, v), p * v
    policy = Policy(most, tuple(most - rank for rank in range(p)), tuple(range(p)))
    policies = (policy, _eager(p, most)) if m < p or cost else (policy,)
    orders = [_listed(placement, m, each) for each in policies]
    if v > 1:
        turns = short_rounds(p, m) + (long_rounds(p, m) if cost else [])
        orders += [interleaved_split(p, each, v) for each in turns]
    return _best("zb-h1", placement, microbatches, orders, cost)


# zb_v(2, 4): stages 0 and 3 on rank 0, 1 and 2 on rank 1. Activations of stage 0 live longest and of stage 3 shortest;
# on a rank in the middle both live half as long. So all ranks need the same memory.
#
#    rank 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 3B1 3B1 0F3 0B0 0B0 3F2 3I2 3W2 0B1 0B1 3F3 3I3 3W3 0B2 0B2 0B3 0B3   .
#    rank 1    . 1F0 2F0 1F1 2F1 2B0 2B0 1F2 1I0 1W0 2F2 2B1 2B1 1F3 1I1 1W1 2F3 2B2 2B2 1I2 2I3 1I3 1W2 2W3 1W3
def zb_v(ranks: int, microbatches: int, cost: Cost | None = None) -> Schedule:
    """Makes ZB-V (Qi et al. 2024, Pipeline Parallelism with Controllable Memory): stages r and 2p-1-r on rank r of p.

    With m >= p microbatches, the bubble is (p-1)/(6m+p-1). A rank stores the activations of at most 2p pairs (stage,
    microbatch) at a time. Simulation with the times ``cost`` selects, from several orders of the actions, one with the
    shortest step; None: F, I and W take 1 each.
    """
    most = 2 * ranks
    ahead = (most,) * ranks
    alike = Policy(most, ahead, (ranks - 1,) * ranks, deep_inputs=False)
    # a backlog of weight gradients on the later ranks; for m near p an equal backlog on all ranks is shorter
    later = [tuple(factor * rank + more for rank in range(ranks)) for factor, more in ((2, 0), (1, 0), (1, 1))]
    policies = [Policy(most, ahead, backlog) for backlog in later]
    policies += [alike, replace(alike, deep_inputs=True), _eager(ranks, most)]
    orders = [_listed(v_shape(ranks), microbatches, policy) for policy in policies]
    return _best("zb-v", v_shape(ranks), microbatches, [*orders, v_split(ranks, microbatches)], cost)


def _eager(ranks: int, most: int) -> Policy:
    """Returns the policy of backwards first, without deferred weight gradients, for fewer microbatches than ranks."""
    return Policy(most, (most,) * ranks, (most,) * ranks, forward_first=False)


def _listed(placement: Placement, microbatches: int, policy: Policy) -> Rows:
    rows = list_schedule(placement, microbatches, policy)
    return tuple(tuple(Action(_OPS[kind], stage, i) for _, kind, stage, i in row) for row in rows)


def _best(name: str, placement: Placement, microbatches: int, orders: Iterable[Rows], cost: Cost | None) -> Schedule:
    """Returns the order with the shortest step at ``cost``, the first of equal ones.

    Without ``cost`` all actions take one clock and messages no time; among the shortest orders, the one that loses
    least with slow messages is returned.
    """
    stages = sum(map(len, placement))
    split = [DependencyGraph(Schedule(name, stages, microbatches, rows, placement)) for rows in dict.fromkeys(orders)]
    ends = [_end(rules, cost or Cost()) for rules in split]
    best = [rules for rules, end in zip(split, ends, strict=True) if end == min(ends)]
    if cost is None and len(best) > 1:
        best.sort(key=lambda rules: sum(_end(rules, slow) for slow in _SLOW))
    return _joined(best[0], cost)


def _end(rules: DependencyGraph, cost: Cost) -> float:
    return max(action_times(rules, cost)[1])


def _joined(rules: DependencyGraph, cost: Cost | None) -> Schedule:
    """Merges adjacent I and W into one B, unless another stage would wait longer.

    Without ``cost``, no stage may wait longer with slow messages either.
    """
    late: set[int] = set()
    for known in (cost,) if cost else (Cost(), *_SLOW):
        begins, ends = action_times(rules, known)
        ends.append(0)  # sentinel: an input gradient at the end of the last row has no action after it
        sent = rules.sends()
        late.update(number for number, taker in sent if begins[taker] < ends[number + 1] + known.transfer)
    rows = tuple(tuple(_actions(rules.actions[row.start : row.stop], row.start, late)) for row in rules.rows)
    return replace(rules.schedule, per_rank=rows)


def _actions(row: Sequence[Action], first: int, late: Collection[int]) -> Iterator[Action]:
    """Yields one row; ``late``: numbers of input gradients that another rank needs before the weight gradients end."""
    index = 0
    while index < len(row):
        op, stage, microbatch = row[index]
        follows = row[index + 1 : index + 2] == [Action(Op.BACKWARD_WEIGHT, stage, microbatch)]
        if op is Op.BACKWARD_INPUT and follows and first + index not in late:
            yield Action(Op.BACKWARD, stage, microbatch)
            index += 2
        else:
            yield row[index]
            index += 1
