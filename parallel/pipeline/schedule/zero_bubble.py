"""Schedules with split backwards: weight gradients, for which no stage waits, fill the idle time.

In the pictures every action takes one clock, and a whole backward two. If no stage gains from having the input
gradient earlier, both halves are merged into one whole backward, which costs less to run.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from engine.parallel.pipeline.schedule.actions import Action, Op, Placement, Schedule, loop, v_shape
from engine.parallel.pipeline.schedule.list_scheduler import INPUT, WEIGHT, Policy, Tick, list_schedule

_OPS = (Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)


# zb_h1(3, 4): 1f1b with the weight gradients of the later ranks deferred into what was their idle time. Rank 0 needs
# no split: no stage waits for the input gradient of stage 0.
#
#    rank 0  F0 F1 F2  .  . B0 B0 F3 B1 B1 B2 B2 B3 B3
#    rank 1   . F0 F1  . I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
#    rank 2   .  . F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
def zb_h1(ranks: int, microbatches: int, virtual_stages: int = 1) -> Schedule:
    """ZB-H1 (Qi et al. 2023, Zero Bubble Pipeline Parallelism), and its interleaved form for several stages on a rank.

    The bubble is (p-1)/(3vm+p-1) for m >= p, a third of 1F1B's; a rank holds at most pv activations of a stage, as many
    as 1F1B's rank 0. Rank r defers r weight gradients, into the time that 1F1B leaves idle on later ranks.
    """
    most = ranks * virtual_stages
    policy = Policy(most, tuple(most - rank for rank in range(ranks)), tuple(range(ranks)))
    return _best("zb-h1", loop(ranks, virtual_stages), microbatches, (policy, _eager(ranks, most)))


# zb_v(2, 4): stages 0 and 3 on rank 0, 1 and 2 on rank 1. Rank 0 holds the activations of stage 0 longest and those of
# stage 3 shortest; a rank in the middle holds both half as long. So all ranks need the same memory.
#
#    rank 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0B0 0B0 0F3 0B1 0B1 3F2 3I2 3W2 3F3 3I3 3W3 0B2 0B2 0B3 0B3   .
#    rank 1    . 1F0 2F0 1F1 2F1 2I0 1B0 1B0 2I1 1B1 1B1 1F2 2F2 2W0 2W1 1F3 2F3 2I2 1I2 2I3 1W2 1I3 1W3 2W2 2W3
def zb_v(ranks: int, microbatches: int) -> Schedule:
    """ZB-V (Qi et al. 2024, Pipeline Parallelism with Controllable Memory): stages r and 2p-1-r on rank r.

    The bubble is (p-1)/(6m+p-1) for m >= p; every rank holds at most 2p activations of a half slice, as much as 1F1B's
    rank 0. It has no slack: if messages or input gradients take longer than planned, dualpipe-v loses less.
    """
    most = 2 * ranks
    ahead = (most,) * ranks
    alike = Policy(most, ahead, (ranks - 1,) * ranks, deep_inputs=False)
    # Policies that lose least with slow messages and input gradients come first, as simulated for many sizes: a backlog
    # of weight gradients on the later ranks, or for m near p the same on all ranks.
    later = [tuple(factor * rank + more for rank in range(ranks)) for factor, more in ((2, 0), (1, 0), (1, 1))]
    by_rank = [Policy(most, ahead, backlog) for backlog in later]
    known = (alike, *by_rank) if 2 * microbatches < 3 * ranks else (*by_rank, alike)
    policies = (*known, replace(alike, deep_inputs=True), _eager(ranks, most))
    return _best("zb-v", v_shape(ranks), microbatches, policies)


def fewest_ticks(ranks: int, microbatches: int, virtual_stages: int) -> int:
    """Ticks of the shortest known split schedule with v stages on each rank, in a loop or a V.

    The first is a bound: rank p-1 is idle for p-1 ticks and works for 3vm. The others are for m < p: pv ticks until the
    last stage can start, 2m for its forwards and input gradients, and pv back to the weights of stage 0; the third is
    not a bound, but the best that is reached.
    """
    p, m, v = ranks, microbatches, virtual_stages
    return max(3 * v * m + p - 1, 2 * p * v + 2 * m - 1, p * v + 2 * v * m + p - 1)


def _eager(ranks: int, most: int) -> Policy:
    """Backwards first, without deferring weight gradients: for fewer microbatches than ranks."""
    return Policy(most, (most,) * ranks, (most,) * ranks, forward_first=False)


def _best(name: str, placement: Placement, microbatches: int, policies: Sequence[Policy]) -> Schedule:
    """The shortest schedule of all policies, the first of equals; stops at one that cannot be beaten."""
    ranks, stages = len(placement), sum(map(len, placement))
    least = fewest_ticks(ranks, microbatches, stages // ranks)
    best: list[list[Tick]] = []
    for policy in policies:
        rows = list_schedule(placement, microbatches, policy)
        if not best or _ticks(rows) < _ticks(best):
            best = rows
        if _ticks(best) == least:
            break
    return Schedule(name, stages, microbatches, _joined(best, placement, microbatches), placement)


def _ticks(rows: list[list[Tick]]) -> int:
    return max(row[-1][0] for row in rows) + 1


def _joined(rows: list[list[Tick]], placement: Placement, microbatches: int) -> tuple[tuple[Action, ...], ...]:
    """The rows as actions; adjacent I and W become B, unless another stage would wait longer for it."""
    begins = [0] * (sum(map(len, placement)) * microbatches)
    for row in rows:
        for tick, kind, stage, microbatch in row:
            if kind == INPUT:
                begins[stage * microbatches + microbatch] = tick
    return tuple(tuple(_actions(row, held, begins, microbatches)) for row, held in zip(rows, placement, strict=True))


def _actions(row: list[Tick], held: Sequence[int], begins: list[int], microbatches: int) -> Iterator[Action]:
    """One row. For a B, the previous stage must start later than B ends, because a message takes time too."""
    index = 0
    while index < len(row):
        tick, kind, stage, microbatch = row[index]
        index += 1
        if kind == INPUT and index < len(row) and row[index][1:] == (WEIGHT, stage, microbatch):
            near = stage == 0 or stage - 1 in held
            if near or begins[(stage - 1) * microbatches + microbatch] > tick + 2:
                yield Action(Op.BACKWARD, stage, microbatch)
                index += 1
                continue
        yield Action(_OPS[kind], stage, microbatch)
