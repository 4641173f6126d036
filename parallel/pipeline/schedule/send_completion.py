"""When a send has completed: where a rank can wait for its sends without losing time.

A send completes when its receiver has offered to receive, which may be much later, since stages that share a rank take
turns. Until then the sender holds the tensor. So a rank waits for a send before the first of its actions that starts,
in the simulated schedule, after the send could complete:

    rank 0   0F0   0F1   0F2        1F0 is offered from the start, and 0F0 travels while 0F1 computes:
    rank 1    .    1F0   1F1        before 0F2 it has completed
"""

from bisect import bisect_right

from engine.parallel.pipeline.schedule.actions import Schedule
from engine.parallel.pipeline.schedule.dependencies import Columns
from engine.parallel.pipeline.schedule.simulate import Cost, action_times
from engine.parallel.pipeline.schedule.validate import complete_rules

RECEIVES_AHEAD = 1
"""A rank that starts an action has offered to receive for it and for this many actions after it, ``row[i : i + 1 +
RECEIVES_AHEAD]``: a message travels while the action before its use computes, at the price of one more buffer."""

Releases = tuple[tuple[tuple[int, ...], ...], ...]
"""For each rank and each action of its row: the earlier actions whose sends are waited for just before it."""


def releases(schedule: Schedule, receives_ahead: int = RECEIVES_AHEAD) -> Releases:
    """For each rank and action: positions in the row of the earlier actions whose sends it waits for before it begins.

    Only sends to a neighbouring stage are listed; a send that no action waits for may be completed at the end of the
    row.

    Waiting there delays no rank at the costs of :class:`Cost`, and blocks none at any other costs, which is proven
    here: the receiver's action that comes with the offer precedes the waiting action in some order that keeps all
    needs. So it also does not matter whether a rank waits first or offers first.

    Raises:
        ScheduleError: the schedule is incomplete or stuck.
    """
    rules = complete_rules(schedule)
    begins, ends = action_times(rules, Cost())
    waits: dict[int, list[int]] = {}
    offers: dict[int, dict[int, int]] = {}
    for source, taker in rules.sends():
        row, there = rules.rows[rules.rank[source]], rules.rank[taker]
        # the receive is posted when ``offer`` begins; ``waiter`` is the sender's first action after that and the send
        offer = max(taker - receives_ahead, rules.rows[there].start)
        waiter = bisect_right(begins, max(begins[offer], ends[source]), source + 1, row.stop)
        if waiter < row.stop:
            waits.setdefault(waiter, []).append(source - row.start)
            latest = offers.setdefault(waiter, {})
            latest[there] = max(latest.get(there, offer), offer)
    # the proof: an order that also puts each waiter after the offers that it depends on; raises if there is none
    rules.order((*rules.needs, *_columns(offers, len(rules.actions))))
    return tuple(tuple(tuple(sorted(waits.get(number, ()))) for number in row) for row in rules.rows)


def _columns(after: dict[int, dict[int, int]], actions: int) -> Columns:
    """The predecessors of each action as rules, one predecessor per column."""
    columns: list[list[int]] = []
    for number, earlier in after.items():
        for index, before in enumerate(earlier.values()):
            if index == len(columns):
                columns.append([-1] * actions)
            columns[index][number] = before
    return tuple(columns)
