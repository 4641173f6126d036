"""Dependencies between actions, and an order of all actions that satisfies them, or the cycle that forbids one.

A rule has the form: this action comes after that one. Nothing in a schedule is chosen at run time, so one order that
satisfies all rules proves that every run ends, at any speed of ranks and links. Without such an order, some ranks wait
for each other in a cycle, and the error names the cycle.

    deadlock: rank 1 begins with microbatch 1, which rank 0 starts only after 0B0

    rank 0   0F0  0B0  0F1  0B1        0B0 waits for 1B0, which comes after 1F1
    rank 1   1F1  1F0  1B0  1B1        1F1 waits for 0F1, which comes after 0B0

Actions are numbered row after row. A rule is a column with the number of the preceding action, or -1, for each action.
Half a million actions are ordered in a second.
"""

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate, chain, repeat

from engine.errors import ScheduleError
from engine.parallel.pipeline.schedule.actions import Op, Schedule

Columns = tuple[Sequence[int], ...]
"""Dependencies as columns of action numbers, one column per rule: entry i must precede action i; -1: none."""


class DependencyGraph:
    """Dependencies among the actions of a complete schedule; actions are numbered rank after rank, in order."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.actions = list(chain.from_iterable(schedule.per_rank))
        ends = list(accumulate(map(len, schedule.per_rank)))
        self.rows = [range(end - len(row), end) for row, end in zip(schedule.per_rank, ends, strict=True)]
        self.rank = list(chain.from_iterable(repeat(rank, len(row)) for rank, row in enumerate(schedule.per_rank)))
        self.needs = self._needs()

    def _needs(self) -> Columns:
        """Returns two rules: the needed action of the same stage, and of the previous (forward) or next (backward)
        stage."""
        microbatches = self.schedule.microbatches
        size = self.schedule.stages * microbatches
        # indexed by stage * microbatches + microbatch; stages before the first or after the last read the -1 at the end
        forward, backward = [-1] * (size + microbatches), [-1] * (size + microbatches)
        is_forward, is_weight = Op.FORWARD, Op.BACKWARD_WEIGHT
        for number, (op, stage, microbatch) in enumerate(self.actions):
            if op is is_forward:
                forward[stage * microbatches + microbatch] = number
            elif op is not is_weight:
                backward[stage * microbatches + microbatch] = number
        own, other = [-1] * len(self.actions), [-1] * len(self.actions)
        for number, (op, stage, microbatch) in enumerate(self.actions):
            cell = stage * microbatches + microbatch
            if op is is_forward:
                other[number] = forward[cell - microbatches]
            elif op is is_weight:
                own[number] = backward[cell]
            else:
                own[number] = forward[cell]
                other[number] = backward[cell + microbatches]
        return own, other

    @cached_property
    def needs_order(self) -> list[int]:
        """Action numbers in an order that satisfies every rank's order and every data dependency."""
        return self.order(self.needs)

    def sends(self) -> list[tuple[int, int]]:
        """Returns pairs (source, user) of action numbers for each result that another rank uses."""
        rank = self.rank
        return [
            (source, taker) for taker, source in enumerate(self.needs[1]) if source >= 0 and rank[source] != rank[taker]
        ]

    def with_rendezvous(self, receives_ahead: int) -> Columns:
        """Returns the dependencies between actions, with sends that block until their receives are posted, as three
        columns.

        Entry i of a column is the number of an action that must precede action i, or -1. Columns 1 and 2: actions that
        compute data for action i, on the same and on a neighbouring stage. Column 3: the receiver's action that must
        end before the send just before action i completes. ``receives_ahead``: number of next actions for which a rank
        posts receives in advance.
        """
        column = [-1] * len(self.actions)
        for source, taker in self.sends():
            offered_after = taker - receives_ahead - 1
            # no rule for a receive posted at the start of the row, or for a send at the end of the row
            if offered_after in self.rows[self.rank[taker]] and source + 1 in self.rows[self.rank[source]]:
                column[source + 1] = offered_after
        return (*self.needs, column)

    def order(self, rules: Columns) -> list[int]:
        """Returns the numbers of all actions in an order that satisfies every rank's order and all ``rules``.

        A rule is a column: entry i is the number of an action that must precede action i, or -1.

        Raises:
            ScheduleError: there is no such order.
        """
        heads = [row.start for row in self.rows]
        stops = [row.stop for row in self.rows]
        asleep: dict[int, list[int]] = {}  # waiting ranks, by the action they wait for
        awake = list(range(len(heads)))
        done = bytearray(len(self.actions) + 1)
        done[-1] = True  # a rule of -1 is always met
        order: list[int] = []
        # every rank runs until it waits, and the missing action wakes it: no row is searched twice
        while awake:
            rank = awake.pop()
            head, stop = heads[rank], stops[rank]
            while head < stop:
                missing = _missing(rules, head, done)
                if missing >= 0:
                    asleep.setdefault(missing, []).append(rank)
                    break
                done[head] = True
                order.append(head)
                if head in asleep:
                    awake.extend(asleep.pop(head))
                head += 1
            heads[rank] = head
        if len(order) < len(self.actions):
            raise ScheduleError(self._circle(rules, heads, done))
        return order

    def _circle(self, rules: Columns, heads: Sequence[int], done: bytearray) -> str:
        """Returns the error's sentence: follows the waits from an unfinished rank until a rank repeats."""
        rank = next(rank for rank, row in enumerate(self.rows) if heads[rank] < row.stop)
        waits: dict[int, str] = {}
        # an unfinished rank waits for an unfinished rank, so the waits lead back to a visited one
        while rank not in waits:
            missing = _missing(rules, heads[rank], done)
            waits[rank] = self._why(heads[rank], missing)
            rank = self.rank[missing]
        circle = list(waits)[list(waits).index(rank) :]
        sends = " when sends block" if len(rules) > len(self.needs) else ""
        return (
            f"schedule {self.schedule.name} is stuck{sends}: {'; '.join(waits[rank] for rank in circle)}. "
            f"Reorder {'this row' if len(circle) == 1 else 'one of these rows'}."
        )

    def _why(self, head: int, missing: int) -> str:
        here, there = self.rank[head], self.rank[missing]
        if any(column[head] == missing for column in self.needs):
            where = "later in the same row" if here == there else f"of rank {there}"
            return f"rank {here} at {self.actions[head]} waits for {self.actions[missing]} {where}"
        sent = self.actions[head - 1]
        taker = self.schedule.sends(sent)
        return f"rank {here} before {self.actions[head]} waits until rank {there} receives {sent} for {taker}"


def _missing(rules: Columns, head: int, done: bytearray) -> int:
    """Returns an action that must come before ``head`` and is not done; -1 if there is none."""
    for column in rules:
        if not done[column[head]]:
            return column[head]
    return -1
