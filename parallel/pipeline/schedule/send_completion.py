"""When what was sent has surely left: where a rank may wait for its sends without losing time.

A send ends when its receiver has offered to receive, which may be long after: stages that share a rank take
turns. Until then the sender holds the tensor. So a send is waited for before the first action that begins,
in the simulated schedule, after it could leave:

    rank 0   0F0   0F1   0F2        1F0 is offered from the start, and 0F0 travels while 0F1 computes:
    rank 1    .    1F0   1F1        before 0F2 it has left
"""

from bisect import bisect_right

from engine.parallel.pipeline.schedule.actions import Schedule
from engine.parallel.pipeline.schedule.dependencies import Columns
from engine.parallel.pipeline.schedule.simulate import Cost, action_times
from engine.parallel.pipeline.schedule.validate import complete_rules

RECEIVES_AHEAD = 1
"""A rank that begins an action has offered to receive for it and for so many actions after it, ``row[i : i + 1 +
RECEIVES_AHEAD]``: a message travels while the action before its use computes, and one more buffer is held."""

Releases = tuple[tuple[tuple[int, ...], ...], ...]


def releases(schedule: Schedule, receives_ahead: int = RECEIVES_AHEAD) -> Releases:
    """For each rank and each action of its row: the earlier actions of the row whose sends to a neighbouring stage
    are waited for just before it begins, by their places in the row. Those never named may be waited for at the end.

    Waiting there delays nobody at the costs of :class:`Cost`. It cannot stop anybody at any other, which is proven:
    the receiver's action that comes with the offer begins before the action that waits, in an order that all needs
    allow. So it does not matter either whether a rank waits first or offers first.

    Raises:
        ScheduleError: the schedule is incomplete or stuck.
    """
    rules = complete_rules(schedule)
    begins, ends = action_times(rules, Cost())
    waits: dict[int, list[int]] = {}
    offers: dict[int, dict[int, int]] = {}
    for source, taker in rules.sends():
        row, there = rules.rows[rules.rank[source]], rules.rank[taker]
        offer = max(taker - receives_ahead, rules.rows[there].start)
        waiter = bisect_right(begins, max(begins[offer], ends[source]), source + 1, row.stop)
        if waiter < row.stop:
            waits.setdefault(waiter, []).append(source - row.start)
            latest = offers.setdefault(waiter, {})
            latest[there] = max(latest.get(there, offer), offer)
    rules.order((*rules.needs, *_columns(offers, len(rules.actions))))
    return tuple(tuple(tuple(sorted(waits.get(number, ()))) for number in row) for row in rules.rows)


def _columns(after: dict[int, dict[int, int]], actions: int) -> Columns:
    """As rules: of every action all that it comes after, one in each column."""
    columns: list[list[int]] = []
    for number, earlier in after.items():
        for index, before in enumerate(earlier.values()):
            if index == len(columns):
                columns.append([-1] * actions)
            columns[index][number] = before
    return tuple(columns)
