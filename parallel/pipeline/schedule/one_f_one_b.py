"""Schedules written out by rule: one stage on each rank, several in a loop, forwards alone, or split backwards.

In the pictures a backward takes two clocks, a forward one. ``forward_only``, the order of evaluation, works for any
placement of stages:

forward_only(v_shape(2), 3)     rank 0   0F0 0F1  .  3F0 0F2 3F1  .  3F2
                                rank 1    .  1F0 2F0 1F1 2F1 1F2 2F2  .
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice, pairwise, zip_longest

from engine.parallel.pipeline.schedule.actions import Action, Op, Placement, Schedule, loop, rounds


# gpipe(3, 4): all forwards, then all backwards.
#
#    rank 0  F0 F1 F2 F3  .  .  .  .  .  . B0 B0 B1 B1 B2 B2 B3 B3
#    rank 1   . F0 F1 F2 F3  .  .  . B0 B0 B1 B1 B2 B2 B3 B3  .  .
#    rank 2   .  . F0 F1 F2 F3 B0 B0 B1 B1 B2 B2 B3 B3  .  .  .  .
def gpipe(ranks: int, microbatches: int) -> Schedule:
    """GPipe (Huang et al. 2019): simple, but every rank holds the activations of all microbatches.

    Backwards run in ascending order of microbatches, so that gradients are summed in the order of one process.
    """
    return _breadth_first("gpipe", ranks, microbatches, 1)


# one_f_one_b(3, 4): the same clocks and the same idle time, but a backward runs as soon as it can, so that
# rank r never holds more than 3 - r microbatches. It runs that many forwards ahead, then one for one.
#
#    rank 0  F0 F1 F2  .  .  .  . B0 B0 F3 B1 B1  . B2 B2  . B3 B3
#    rank 1   . F0 F1  .  . B0 B0 F2 B1 B1 F3 B2 B2  . B3 B3  .  .
#    rank 2   .  . F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3  .  .  .  .
def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """1F1B (Narayanan et al. 2019, PipeDream; its flush variant): rank r holds min(m, p - r) microbatches."""
    rows = []
    for stage in range(ranks):
        forwards, backwards = (_run(op, stage, range(microbatches)) for op in (Op.FORWARD, Op.BACKWARD))
        rows.append(tuple(_one_for_one(forwards, backwards, ranks - stage - 1)))
    return _schedule("1f1b", microbatches, loop(ranks, 1), rows)


# interleaved(2, 4, 2): stages 0 and 2 on rank 0, 1 and 3 on rank 1. A rank starts after fewer layers, so idle
# clocks count smaller stages; two microbatches go around the loop before the next two enter.
#
#    rank 0  0F0 0F1 2F0 2F1 0F2   . 2B0 2B0 0F3 2B1 2B1 2F2 0B0 0B0 2F3 0B1 0B1   . 2B2 2B2   . 2B3 2B3 0B2 0B2 0B3 0B3
#    rank 1    . 1F0 1F1 3F0 3B0 3B0 3F1 3B1 3B1 1F2 1B0 1B0 1F3 1B1 1B1 3F2 3B2 3B2 3F3 3B3 3B3 1B2 1B2 1B3 1B3   .   .
def interleaved(ranks: int, microbatches: int, virtual_stages: int) -> Schedule:
    """Interleaved 1F1B (Narayanan et al. 2021, Megatron-LM, section 2.2), here for any number of microbatches.

    The bubble is (p-1)/(vm+p-1) for m >= p, also if p does not divide m: ``rounds`` are then a little larger than p.
    Rank r holds at most (v-1)n + 2(p-r) - 1 activations of a stage, with n microbatches in the largest round.
    """
    turns = rounds(ranks, microbatches)
    most = max(map(len, turns))
    placement = loop(ranks, virtual_stages)
    rows = []
    for rank, stages in enumerate(placement):
        forwards = chain.from_iterable(_run(Op.FORWARD, stage, turn) for turn in turns for stage in stages)
        backwards = chain.from_iterable(_run(Op.BACKWARD, stage, turn) for turn in turns for stage in stages[::-1])
        ahead = (virtual_stages - 1) * most + 2 * (ranks - rank - 1)
        rows.append(tuple(_one_for_one(forwards, backwards, ahead)))
    return _schedule("interleaved", microbatches, placement, rows)


# looped_bfs(2, 4, 2): a stage runs all microbatches before its rank turns to its next stage, so that ZeRO gathers
# and reduces each stage once a step, while the others compute. The bubble is that of interleaved.
#
#    rank 0  0F0 0F1 0F2 0F3 2F0 2F1 2F2 2F3   .   .   . 2B0 2B0 2B1 2B1 2B2 2B2 2B3 2B3 0B0 0B0 0B1 0B1 0B2 0B2 0B3 0B3
#    rank 1    . 1F0 1F1 1F2 1F3 3F0 3F1 3F2 3F3 3B0 3B0 3B1 3B1 3B2 3B2 3B3 3B3 1B0 1B0 1B1 1B1 1B2 1B2 1B3 1B3   .   .
def looped_bfs(ranks: int, microbatches: int, virtual_stages: int) -> Schedule:
    """Breadth-first pipeline parallelism (Lamy-Poirier 2022): every rank holds the activations of all microbatches.

    Backwards run in ascending order of microbatches, so that gradients are summed in the order of one process.
    """
    return _breadth_first("looped-bfs", ranks, microbatches, virtual_stages)


def _breadth_first(name: str, ranks: int, microbatches: int, virtual_stages: int) -> Schedule:
    placement, every = loop(ranks, virtual_stages), range(microbatches)
    rows = []
    for stages in placement:
        forwards = chain.from_iterable(_run(Op.FORWARD, stage, every) for stage in stages)
        backwards = chain.from_iterable(_run(Op.BACKWARD, stage, every) for stage in stages[::-1])
        rows.append((*forwards, *backwards))
    return _schedule(name, microbatches, placement, rows)


def _one_for_one(forwards: Iterable[Action], backwards: Iterable[Action], ahead: int) -> Iterator[Action]:
    """``ahead`` forwards; then forwards and backwards alternately; then the remaining backwards."""
    rest = iter(forwards)
    yield from islice(rest, ahead)
    for pair in zip_longest(rest, backwards):
        yield from (action for action in pair if action is not None)


def _run(op: Op, stage: int, microbatches: range) -> Iterator[Action]:
    return (Action(op, stage, microbatch) for microbatch in microbatches)


def _schedule(name: str, microbatches: int, placement: Placement, rows: Sequence[tuple[Action, ...]]) -> Schedule:
    stages = sum(map(len, placement))
    return Schedule(name, stages, microbatches, tuple(rows), placement)


def forward_only(placement: Placement | int, microbatches: int) -> Schedule:
    """The forwards of all microbatches; ``placement`` may be the number of ranks with one stage each.

    A loop of m >= p microbatches is idle for p-1 clocks, the minimum, and a V for 2(p-1), since the result has to
    return to rank 0. At most as many microbatches as ranks, or a round, are in flight.
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


def there_and_back(placement: Placement, microbatches: int) -> Schedule:
    """The forwards of ``forward_only``, then the backwards in the reverse order, for any placement.

    For a loop of the user's own, which computes the loss between the two: every rank holds all microbatches then.
    """
    there = forward_only(placement, microbatches)
    rows = [
        (*row, *(Action(Op.BACKWARD, action.stage, action.microbatch) for action in reversed(row)))
        for row in there.per_rank
    ]
    return _schedule("there-and-back", microbatches, placement, rows)


def _deepest_first(placement: Placement, microbatches: int) -> list[list[tuple[int, int]]]:
    """At each clock every rank runs the last of its stages that is ready; at most p microbatches are in flight."""
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


# ---- split backwards by rule: the distance in actions between a send and its use is the same in all rounds, so that
# slow messages cost little. Both rules come from the papers, as torch.distributed.pipelining has them too.

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
    """ZB1P in a loop of several stages a rank (Qi et al. 2023): interleaved 1F1B with deferred weight gradients.

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
