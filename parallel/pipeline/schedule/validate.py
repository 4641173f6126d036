"""Proof, from the data alone, that a schedule is complete and runs without deadlock."""

from collections import Counter
from collections.abc import Iterator, Sequence

from engine.errors import ScheduleError
from engine.parallel.pipeline.schedule.actions import Action, Op, Schedule
from engine.parallel.pipeline.schedule.dependencies import DependencyGraph


def check(schedule: Schedule, receives_ahead: int | None = None) -> None:
    """Proves that ``schedule`` is complete and runs without deadlock.

    Every stage must run the forward and, in training, the backward (B, or I and W) of each microbatch exactly once, on
    its rank. All stages must process the microbatches in the same order. Sends are asynchronous.

    ``receives_ahead``: number of following actions for which a rank posts receives. If given, blocking sends must not
    deadlock either. gpipe, 1f1b and zb-h1 with one stage on each rank allow 0.

    Raises:
        ScheduleError: actions are missing, doubled or misplaced, wait in a cycle, or receive messages out of order; the
            message names them.
    """
    rules = complete_rules(schedule)
    _ = rules.needs_order  # raises if there is no order
    if receives_ahead is not None:
        rules.order(rules.with_rendezvous(receives_ahead))
    _check_message_order(schedule)


def complete_rules(schedule: Schedule) -> DependencyGraph:
    """Checks that ``schedule`` is complete and returns the dependencies of its actions.

    Raises:
        ScheduleError: the schedule is incomplete.
    """
    _check_complete(schedule)
    return DependencyGraph(schedule)


def _check_message_order(schedule: Schedule) -> None:
    """Compares the order of microbatches in all stages, because values may be sent past a neighbouring stage.

    A schedule on one rank sends nothing and is not checked.
    """
    if sum(map(bool, schedule.stages_of_rank)) < 2:
        return
    flows: list[list[list[Action]]] = [[[] for _ in range(schedule.stages)] for _ in range(2)]
    forward, weight = Op.FORWARD, Op.BACKWARD_WEIGHT
    for row in schedule.per_rank:
        for action in row:
            if action.op is not weight:
                flows[action.op is forward][action.stage].append(action)
    for first, *others in flows:
        microbatches = [action.microbatch for action in first]
        for stage in others:
            if [action.microbatch for action in stage] != microbatches:
                here, there = next(pair for pair in zip(first, stage, strict=True) if pair[0][2] != pair[1][2])
                raise ScheduleError(
                    f"schedule {schedule.name} has {there} where stage 0 has {here}: messages between two stages are "
                    "received in the order of the sends; list microbatches in the same order on all stages."
                )


def _check_complete(schedule: Schedule) -> None:
    if _is_complete(schedule):
        return
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
    must = "F and B (or I and W)" if schedule.training else "F and nothing else"
    raise ScheduleError(
        f"schedule {schedule.name} of {schedule.stages} stages and {schedule.microbatches} microbatches is not "
        f"complete: {found}. Each stage does {must} of every microbatch once, on its own rank."
    )


def _is_complete(schedule: Schedule) -> bool:
    """Returns True if the schedule is complete: a fast check that names no fault."""
    stages, microbatches, rank_of = schedule.stages, schedule.microbatches, schedule.rank_of_stage
    bits = {Op.FORWARD: 1, Op.BACKWARD: 2, Op.BACKWARD_INPUT: 4, Op.BACKWARD_WEIGHT: 8}
    seen = bytearray(stages * microbatches)
    for rank, row in enumerate(schedule.per_rank):
        for op, stage, microbatch in row:
            if not (0 <= stage < stages and 0 <= microbatch < microbatches and rank_of[stage] == rank):
                return False
            cell, bit = stage * microbatches + microbatch, bits[op]
            if seen[cell] & bit:
                return False
            seen[cell] |= bit
    return set(seen) <= ({1 | 2, 1 | 4 | 8} if schedule.training else {1})


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
