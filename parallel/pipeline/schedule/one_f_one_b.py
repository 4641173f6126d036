"""Schedules by explicit rules: one stage on each rank, several in a loop, forwards alone, or split backwards.

In the drawings a backward takes two clocks, a forward one. ``forward_only``, the order of evaluation, accepts any
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
    """Makes the GPipe schedule (Huang et al. 2019); the activations of all microbatches are live on every rank.

    Backwards run in ascending order of microbatches.
    """
    return _breadth_first("gpipe", ranks, microbatches, 1)


# one_f_one_b(3, 4): the same clocks and the same idle time, but a backward runs as soon as it can, so that at most
# 3 - r microbatches are live on rank r. The rank runs as many forwards ahead, then forwards and backwards in pairs.
#
#    rank 0  F0 F1 F2  .  .  .  . B0 B0 F3 B1 B1  . B2 B2  . B3 B3
#    rank 1   . F0 F1  .  . B0 B0 F2 B1 B1 F3 B2 B2  . B3 B3  .  .
#    rank 2   .  . F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3  .  .  .  .
def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """Makes the 1F1B schedule (Narayanan et al. 2019, PipeDream, with flush), with one stage on each rank.

    At most min(m, p - r) of m microbatches are live on rank r of p.
    """
    rows = []
    for stage in range(ranks):
        forwards, backwards = (_run(op, stage, range(microbatches)) for op in (Op.FORWARD, Op.BACKWARD))
        rows.append(tuple(_one_for_one(forwards, backwards, ranks - stage - 1)))
    return _schedule("1f1b", microbatches, loop(ranks, 1), rows)


# interleaved(2, 4, 2): stages 0 and 2 on rank 0, 1 and 3 on rank 1. A rank starts after fewer layers, so idle clocks
# are shorter; two microbatches pass the whole loop before the next two enter.
#
#    rank 0  0F0 0F1 2F0 2F1 0F2   . 2B0 2B0 0F3 2B1 2B1 2F2 0B0 0B0 2F3 0B1 0B1   . 2B2 2B2   . 2B3 2B3 0B2 0B2 0B3 0B3
#    rank 1    . 1F0 1F1 3F0 3B0 3B0 3F1 3B1 3B1 1F2 1B0 1B0 1F3 1B1 1B1 3F2 3B2 3B2 3F3 3B3 3B3 1B2 1B2 1B3 1B3   .   .
def interleaved(ranks: int, microbatches: int, virtual_stages: int) -> Schedule:
    """Makes the interleaved 1F1B schedule (Narayanan et al. 2021, Megatron-LM, section 2.2).

    For m >= p microbatches on p ranks of v stages, the bubble is (p-1)/(vm+p-1). Rank r has at most (v-1)n + 2(p-r) - 1
    live activations if the largest of :func:`rounds` has n microbatches.
    """
    turns = rounds(ranks, microbatches)
    most = max(map(len, turns))
    placement = loop(ranks, virtual_stages)
    rows = []
    for rank, stages in enumerate(placement):
        forwards = chain.from_iterable(_run(Op.FORWARD, stage, turn) for turn in turns for stage in stages)
        backwards = chain.from_iterable(_run(Op.BACKWARD, stage, turn) for turn in turns for stage in stages[::-1])
        # the first gradient arrives after a round of all stages but the last, and two messages for every later rank
        ahead = (virtual_stages - 1) * most + 2 * (ranks - rank - 1)
        rows.append(tuple(_one_for_one(forwards, backwards, ahead)))
    return _schedule("interleaved", microbatches, placement, rows)


# looped_bfs(2, 4, 2): a stage runs all microbatches before the rank continues with its next stage, so that ZeRO gathers
# and reduces each stage once a step, during compute of other stages. The bubble equals that of interleaved.
#
#    rank 0  0F0 0F1 0F2 0F3 2F0 2F1 2F2 2F3   .   .   . 2B0 2B0 2B1 2B1 2B2 2B2 2B3 2B3 0B0 0B0 0B1 0B1 0B2 0B2 0B3 0B3
#    rank 1    . 1F0 1F1 1F2 1F3 3F0 3F1 3F2 3F3 3B0 3B0 3B1 3B1 3B2 3B2 3B3 3B3 1B0 1B0 1B1 1B1 1B2 1B2 1B3 1B3   .   .
def looped_bfs(ranks: int, microbatches: int, virtual_stages: int) -> Schedule:
    """Makes the breadth-first schedule (Lamy-Poirier 2022): a stage runs all microbatches before the rank's next stage.

    A rank has ``virtual_stages`` stages. The activations of all microbatches are live on every rank.
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
    """Yields ``ahead`` forwards; then forwards and backwards alternately; then the remaining backwards."""
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
    """Makes a schedule of forwards alone, for evaluation; an int as ``placement`` means one stage on each rank.

    With m >= p microbatches on p ranks, a rank is idle for p-1 forwards in a loop placement, for 2(p-1) in a V.
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
    """Makes a schedule of all forwards, then all backwards in the reverse order, for any placement of stages.

    The activations of all microbatches are live on every rank.
    """
    there = forward_only(placement, microbatches)
    rows = [
        (*row, *(Action(Op.BACKWARD, action.stage, action.microbatch) for action in reversed(row)))
        for row in there.per_rank
    ]
    return _schedule("there-and-back", microbatches, placement, rows)


def _deepest_first(placement: Placement, microbatches: int) -> list[list[tuple[int, int]]]:
    """Returns rows in which every rank runs its last ready stage at each clock, with at most p microbatches in
    flight."""
    stages = sum(map(len, placement))
    done = [0] * stages
    rows: list[list[tuple[int, int]]] = [[] for _ in placement]
    while stages and done[-1] < microbatches:
        entered = min(microbatches, done[-1] + len(placement))
        # a stage is ready if the previous stage is ahead; ``entered`` is the count before the first stage
        ready = [count < before for count, before in zip(done, [entered, *done], strict=False)]
        for row, held in zip(rows, placement, strict=True):
            stage = next((stage for stage in reversed(held) if ready[stage]), None)
            if stage is not None:
                row.append((stage, done[stage]))
                done[stage] += 1
    return rows


# ---- split backwards by rule: the distance in actions between a send and its use is equal in all rounds, so that slow
# messages cost little. Both rules are from the papers; torch.distributed.pipelining has the same ones.

Rows = tuple[tuple[Action, ...], ...]
"""Actions of each rank, with split backwards only."""


def short_rounds(ranks: int, microbatches: int) -> list[list[range]]:
    """Returns one or two divisions of ``microbatches`` into consecutive rounds of at most ``ranks`` microbatches.

    The first has rounds of ``ranks`` microbatches, of which the last may be smaller; the second, if different, has
    rounds of nearly equal size.
    """
    count = -(-microbatches // ranks)
    full = [range(start, min(start + ranks, microbatches)) for start in range(0, microbatches, ranks)]
    starts = [-(-microbatches * index // count) for index in range(count + 1)]
    even = [range(start, stop) for start, stop in pairwise(starts)]
    return [full] if full == even else [full, even]


def long_rounds(ranks: int, microbatches: int) -> list[list[range]]:
    """Returns a list with the division by :func:`rounds`, if it has a round of more than ``ranks`` microbatches.

    Otherwise returns an empty list.
    """
    turns = rounds(ranks, microbatches)
    return [turns] if max(map(len, turns)) > ranks else []


def interleaved_split(ranks: int, turns: Sequence[range], virtual_stages: int) -> Rows:
    """Makes ZB1P (Qi et al. 2023), interleaved 1F1B with deferred weight gradients, for a loop placement.

    Returns the actions of each rank. ``turns``: rounds of microbatches. Rank r defers r weight gradients.
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
        # the last r weight gradients fill the end of the row, while earlier ranks still run backwards
        row += [Action(Op.BACKWARD_WEIGHT, *each) for each in backwards[max(len(backwards) - rank, 0) :]]
        rows.append(tuple(row))
    return tuple(rows)


def v_split(ranks: int, microbatches: int) -> Rows:
    """Makes ZB-V (Qi et al. 2023, section 6), with stages r and 2p-1-r on rank r of p.

    Returns the actions of each rank. A rank stores the activations of at most 2p pairs (stage, microbatch) at a time.
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
    # a turn begins with a forward of the near stage, as long as there are any
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
