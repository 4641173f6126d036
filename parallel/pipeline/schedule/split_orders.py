"""Orders of split backwards by rule: what each rank does is counted, whatever an action or a message takes.

A rule keeps the distance in actions between a send and its use the same in all rounds, so that slow messages cost
little. Both rules are those of the papers, in the form in which ``torch.distributed.pipelining`` has them too.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import chain, islice, pairwise

from engine.parallel.pipeline.schedule.actions import Action, Op, loop, rounds

Rows = tuple[tuple[Action, ...], ...]
"""A row of actions for each rank; every backward is split."""


def short_rounds(ranks: int, microbatches: int) -> list[list[range]]:
    """Ways to divide the microbatches into rounds of at most ``ranks``: all but the last full, and evenly."""
    count = -(-microbatches // ranks)
    full = [range(start, min(start + ranks, microbatches)) for start in range(0, microbatches, ranks)]
    starts = [-(-microbatches * index // count) for index in range(count + 1)]
    even = [range(start, stop) for start, stop in pairwise(starts)]
    return [full] if full == even else [full, even]


def long_rounds(ranks: int, microbatches: int) -> list[list[range]]:
    """Rounds of more than ``ranks``, if ``ranks`` does not divide the microbatches: faster, and they hold more."""
    turns = rounds(ranks, microbatches)
    return [turns] if max(map(len, turns)) > ranks else []


def interleaved_split(ranks: int, turns: Sequence[range], virtual_stages: int) -> Rows:
    """ZB1P in a loop of several stages a rank (Qi et al. 2023): interleaved 1F1B whose weight gradients wait.

    Rank r runs (v-1)n + p-1-r forwards ahead, n microbatches in the largest of ``turns``, then one for one, and defers
    r weight gradients. It holds (v-1)n + p activations of a stage, which is vp for rounds of p.
    """
    most = max(map(len, turns))
    rows = []
    for rank, held in enumerate(loop(ranks, virtual_stages)):
        forwards = (Action(Op.FORWARD, stage, i) for turn in turns for stage in held for i in turn)
        backwards = [(stage, i) for turn in turns for stage in held[::-1] for i in turn]
        row = list(islice(forwards, (virtual_stages - 1) * most + ranks - 1 - rank))
        for done, (stage, microbatch) in enumerate(backwards):
            row += islice(forwards, 1)
            row.append(Action(Op.BACKWARD_INPUT, stage, microbatch))
            if done >= rank:
                row.append(Action(Op.BACKWARD_WEIGHT, *backwards[done - rank]))
        row += [Action(Op.BACKWARD_WEIGHT, *each) for each in backwards[max(len(backwards) - rank, 0) :]]
        rows.append(tuple(row))
    return tuple(rows)


def v_split(ranks: int, microbatches: int) -> Rows:
    """ZB-V (Qi et al. 2023, section 6): stages r and 2p-1-r on rank r, in turns once both have begun.

    The rule is for at least 2p-1 microbatches; of fewer, the actions of those beyond are left out. A rank holds at most
    2p activations of a half slice.
    """
    rows = (_v_row(ranks, rank, max(microbatches, 2 * ranks - 1)) for rank in range(ranks))
    return tuple(tuple(action for action in row if action.microbatch < microbatches) for row in rows)


def _v_row(ranks: int, rank: int, microbatches: int) -> list[Action]:
    near, far, after = rank, 2 * ranks - 1 - rank, ranks - rank
    forward, into, weight = Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT
    turn = [(into, near), (weight, near), (forward, far), (into, far), (weight, far)]
    begin = [
        *[(forward, near)] * (2 * after - 1),
        *[(forward, far), (forward, near)] * rank,
        *[(forward, far), (into, far), (weight, far)] * after,
    ]
    # forwards of the near stage come first in a turn, until there are no more
    started = 2 * after - 1 + rank
    steady = chain.from_iterable(
        [*[(forward, near)] * (started + index < microbatches), *turn] for index in range(microbatches - ranks)
    )
    end = [*[(into, near), (into, far)] * rank, *[(into, near), (weight, near)] * after]
    left = [(weight, far)] * rank + [(weight, near)] * rank
    done: Counter[tuple[Op, int]] = Counter()
    row = []
    for op, stage in chain(begin, steady, end, left):
        row.append(Action(op, stage, done[op, stage]))
        done[op, stage] += 1
    return row
