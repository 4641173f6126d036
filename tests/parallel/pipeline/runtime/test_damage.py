"""Schedules of every kind, damaged on purpose: the checker refuses what ranks cannot play, and names it."""

import random
import re
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import ScheduleError
from engine.parallel.pipeline.schedule.actions import Action, Op, Schedule
from engine.parallel.pipeline.schedule.kinds import SCHEDULE_KINDS, make_schedule
from engine.parallel.pipeline.schedule.validate import check
from engine.parallel.pipeline.schedule.zero_bubble import zb_v
from tests.parallel.pipeline.wire import Wire

Rows = list[list[Action]]


def refusal(schedule: Schedule) -> str:
    with pytest.raises(ScheduleError) as error:
        check(schedule)
    return str(error.value)


def with_rows(schedule: Schedule, rows: Rows) -> Schedule:
    return replace(schedule, per_rank=tuple(map(tuple, rows)))


def small(kind: str) -> Schedule:
    return make_schedule(kind, 3, 6, SCHEDULE_KINDS[kind].virtual_stages)


def can_be_played(schedule: Schedule) -> bool:
    ranks = len(schedule.per_rank)
    try:
        no_waits = tuple(tuple(() for _ in row) for row in schedule.per_rank)
        Wire(schedule, no_waits, ahead=ranks).play(random.Random(0), offers_first=True)
    except AssertionError:
        return False
    return True


def takes_microbatches_in_one_order(schedule: Schedule) -> bool:
    orders = {
        tuple(one.microbatch for one in row if one.stage == stage and one.op in ops)
        for ops in ("F", "BI")
        for row, stages in zip(schedule.per_rank, schedule.stages_of_rank, strict=True)
        for stage in stages
    }
    return len(orders) == 1


@pytest.mark.parametrize("kind", list(SCHEDULE_KINDS))
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_a_changed_order_is_refused_where_ranks_cannot_play_it(kind: str, data: st.DataObject) -> None:
    schedule = small(kind)
    rows = [list(row) for row in schedule.per_rank]
    for _ in range(data.draw(st.integers(1, 2), "changes")):
        row = data.draw(st.sampled_from(rows))
        here = data.draw(st.integers(0, len(row) - 1))
        there = data.draw(st.one_of(st.integers(0, len(row) - 1), st.sampled_from([here, max(here - 1, 0)])))
        if data.draw(st.booleans()):
            row[here], row[there] = row[there], row[here]
        else:
            row.insert(there, row.pop(here))
    changed = with_rows(schedule, rows)
    if not can_be_played(changed):
        text = refusal(changed)
        assert re.search(r" is stuck: rank \d at \d+[FBIW]\d waits for | where stage 0 has ", text)
        for rank, at in re.findall(r"rank (\d) at (\w+) waits", text):
            assert Action.parse(at) in rows[int(rank)]
    elif takes_microbatches_in_one_order(changed):
        check(changed)


@pytest.mark.parametrize("kind", list(SCHEDULE_KINDS))
@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_what_is_missing_doubled_or_misplaced_is_named(kind: str, data: st.DataObject) -> None:
    schedule = small(kind)
    rows = [list(row) for row in schedule.per_rank]
    rank = data.draw(st.integers(0, 2))
    here = data.draw(st.integers(0, len(rows[rank]) - 1))
    action = rows[rank][here]
    change = data.draw(st.sampled_from(["drop", "double", "other rank", "half", "strange"]))
    if change == "drop":
        rows[rank].pop(here)
        # without its I, a W has no place either, and a B is missing
        named = re.sub("I", "B", str(action))
    elif change == "double":
        rows[rank].insert(data.draw(st.integers(0, len(rows[rank]))), action)
        named = f"more than once: {action}"
    elif change == "other rank":
        rows[(rank + 1) % 3].append(rows[rank].pop(here))
        named = f"on the wrong rank: {action} (on {(rank + 1) % 3}, not {rank})"
    elif change == "half":
        rows[rank][here] = action._replace(op=Op.BACKWARD_WEIGHT if action.op is Op.BACKWARD else Op.BACKWARD)
        # beside a B, a W that was the other half of an I is too much
        named = re.sub("I", "W", str(action))
    else:
        rows[rank][here] = action._replace(microbatch=data.draw(st.sampled_from([-1, 6, 10**9])))
        named = f"not part of it: {rows[rank][here]}"
    text = refusal(with_rows(schedule, rows))
    assert "is not complete" in text and named in text


def test_a_circle_over_all_ranks_of_a_v_is_told_whole() -> None:
    rows = [list(row) for row in zb_v(2, 2).per_rank]
    assert Counter(str(one) for one in rows[1])["2F0"] == 1
    # rank 1 turns to microbatch 0 on its way back only after the backward that needs it
    rows[1].remove(Action(Op.FORWARD, 2, 0))
    rows[1].append(Action(Op.FORWARD, 2, 0))
    text = refusal(with_rows(zb_v(2, 2), rows))
    assert "is stuck: " in text and "2F0" in text
