"""Which action must come before which, and an order that keeps all such rules or the circle that forbids one.

All rules have one form: this action comes after those. Nothing in a schedule is chosen at run time, so one
order that respects all rules proves that every run ends, whatever the speed of ranks and links; and where
no order exists, some ranks wait for each other in a circle, which is what an error names.

    stuck, because rank 1 begins with microbatch 1, which rank 0 starts only after 0B0

    rank 0   0F0  0B0  0F1  0B1        0B0 waits for 1B0, which stands after 1F1
    rank 1   1F1  1F0  1B0  1B1        1F1 waits for 0F1, which stands after 0B0
"""

from collections.abc import Sequence

from engine.errors import ScheduleError
from engine.parallel.pipeline.schedule import Schedule


class Rules:
    """The actions of a complete schedule as numbers, row after row, and which must come before which."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.actions = [action for row in schedule.per_rank for action in row]
        self.number = {action: number for number, action in enumerate(self.actions)}
        self.rank = [rank for rank, row in enumerate(schedule.per_rank) for _ in row]
        ends = [sum(map(len, schedule.per_rank[: rank + 1])) for rank in range(len(schedule.per_rank))]
        self.rows = [range(end - len(row), end) for row, end in zip(schedule.per_rank, ends, strict=True)]
        self.needs = [[self.number[need] for need in schedule.needs(action)] for action in self.actions]

    def with_rendezvous(self, receives_ahead: int) -> list[list[int]]:
        """The needs and, for each send, that the sender goes on only when the receiver has offered to receive."""
        rules = [list(needs) for needs in self.needs]
        for number, action in enumerate(self.actions):
            taker = self.schedule.sends(action)
            if taker is None or number + 1 == self.rows[self.rank[number]].stop:
                continue
            offered_after = self.number[taker] - receives_ahead
            if offered_after >= self.rows[self.rank[self.number[taker]]].start:
                rules[number + 1].append(offered_after)
        return rules

    def order(self, rules: Sequence[Sequence[int]]) -> list[int]:
        """An order of all actions that keeps every row and every rule; in time linear in their number.

        Raises:
            ScheduleError: there is none.
        """
        heads = [row.start for row in self.rows]
        asleep: dict[int, list[int]] = {}  # by the action that ends the sleep
        awake = list(range(len(heads)))
        done: list[int] = []
        while awake:
            rank = awake.pop()
            while heads[rank] < self.rows[rank].stop:
                missing = self._missing(rules[heads[rank]], heads)
                if missing is not None:
                    asleep.setdefault(missing, []).append(rank)
                    break
                done.append(heads[rank])
                awake.extend(asleep.pop(heads[rank], ()))
                heads[rank] += 1
        if len(done) < len(self.actions):
            raise ScheduleError(self._circle(rules, heads))
        return done

    def _missing(self, rules: Sequence[int], heads: Sequence[int]) -> int | None:
        for number in rules:
            if number >= heads[self.rank[number]]:
                return number
        return None

    def _circle(self, rules: Sequence[Sequence[int]], heads: Sequence[int]) -> str:
        """Follow who waits for whom from any rank that has not finished, until a rank comes up again."""
        rank = next(rank for rank, row in enumerate(self.rows) if heads[rank] < row.stop)
        waits: dict[int, str] = {}
        while rank not in waits:
            missing = self._missing(rules[heads[rank]], heads)
            assert missing is not None  # or order() would have gone on
            waits[rank] = self._why(heads[rank], missing)
            rank = self.rank[missing]
        circle = list(waits)[list(waits).index(rank) :]
        sends = " when sends block" if rules is not self.needs else ""
        return (
            f"schedule {self.schedule.name} is stuck{sends}: {'; '.join(waits[rank] for rank in circle)}. "
            f"Reorder {'this row' if len(circle) == 1 else 'one of these rows'}."
        )

    def _why(self, head: int, missing: int) -> str:
        here, there = self.rank[head], self.rank[missing]
        if missing in self.needs[head]:
            where = "later in the same row" if here == there else f"of rank {there}"
            return f"rank {here} at {self.actions[head]} waits for {self.actions[missing]} {where}"
        sent = self.actions[head - 1]
        taker = self.schedule.sends(sent)
        return f"rank {here} before {self.actions[head]} waits until rank {there} receives {sent} for {taker}"
