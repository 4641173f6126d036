"""The order of evaluation: the forwards alone, for stages that lie anywhere.

forward_only(v_shape(2), 3)     rank 0   0F0 0F1  .  3F0 0F2 3F1  .  3F2
                                rank 1    .  1F0 2F0 1F1 2F1 1F2 2F2  .
"""

from engine.parallel.pipeline.actions import Action, Op, Schedule
from engine.parallel.pipeline.placement import Placement, loop, rounds


def forward_only(placement: Placement | int, microbatches: int) -> Schedule:
    """The forwards of all microbatches; ``placement`` may be the number of ranks with one stage each.

    Idle are p-1 clocks of a loop of m >= p microbatches, which is the least, and 2(p-1) of a V, where the
    result has to come back to rank 0. No more than the ranks' number of microbatches, or a round, is on the way.
    """
    if isinstance(placement, int):
        placement = loop(placement, 1)
    ranks = len(placement)
    stages = sum(map(len, placement))
    if ranks and placement == loop(ranks, stages // ranks):
        turns = rounds(ranks, microbatches)
        orders = [[(stage, i) for turn in turns for stage in held for i in turn] for held in placement]
    else:
        orders = _deepest_first(placement, microbatches)
    rows = tuple(tuple(Action(Op.FORWARD, stage, i) for stage, i in order) for order in orders)
    return Schedule("forward", stages, microbatches, rows, placement, training=False)


def _deepest_first(placement: Placement, microbatches: int) -> list[list[tuple[int, int]]]:
    """Clock by clock, every rank does the last of its stages that it can; p microbatches are on the way at most."""
    stages = sum(map(len, placement))
    done = [0] * stages
    rows: list[list[tuple[int, int]]] = [[] for _ in placement]
    while stages and done[-1] < microbatches:
        entered = min(microbatches, done[-1] + len(placement))
        ready = [count < before for count, before in zip(done, [entered, *done], strict=False)]
        for row, held in zip(rows, placement, strict=True):
            stage = next((stage for stage in reversed(held) if ready[stage]), None)
            if stage is not None:
                row.append((stage, done[stage]))
                done[stage] += 1
    return rows
