"""Where sends are waited for: as early as costs nothing, never where it could stop a rank."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import ScheduleError
from engine.parallel.pipeline.schedule.actions import Schedule, v_shape
from engine.parallel.pipeline.schedule.kinds import SCHEDULE_KINDS, make_schedule
from engine.parallel.pipeline.schedule.one_f_one_b import forward_only, looped_bfs, one_f_one_b
from engine.parallel.pipeline.schedule.schedule_file import parse_schedule
from engine.parallel.pipeline.schedule.simulate import RECEIVES_AHEAD, peak_live, releases, simulate
from engine.parallel.pipeline.schedule.validate import check
from tests.parallel.pipeline.wire import Wire

AHEAD = st.integers(0, 3)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Of any kind, or forwards alone."""
    kind = SCHEDULE_KINDS[draw(st.sampled_from(list(SCHEDULE_KINDS)))]
    p = draw(st.integers(1, 5))
    m = draw(st.integers(kind.microbatches_of(p), 3 * p + 2))
    schedule = make_schedule(kind.name, p, m, draw(st.integers(kind.virtual_stages, kind.most or 3)))
    return forward_only(schedule.stages_of_rank, m) if draw(st.integers(0, 4)) == 0 else schedule


def test_of_1f1b_over_two_ranks() -> None:
    #    rank 0  F0 F1  .  . B0 B0 F2 B1 B1  . B2 B2        F0 ends at 1, and travels while F1 computes
    #    rank 1   . F0 B0 B0 F1 B1 B1 F2 B2 B2  .  .        B0 ends at 4, and travels while F1 computes
    assert one_f_one_b(2, 3).text() == "0F0 0F1 0B0 0F2 0B1 0B2\n1F0 1B0 1F1 1B1 1F2 1B2\n"
    assert releases(one_f_one_b(2, 3)) == (((), (), (0, 1), (), (), (3,)), ((), (), (), (1,), (), (3,)))


def test_a_message_that_waits_long_is_let_go_late() -> None:
    # rank 0 begins 0F5, and with it offers to receive for 2F0, at 5, and rank 1 begins its sixth action at 6
    row = releases(looped_bfs(2, 6, 2), receives_ahead=1)[1]
    assert row[:9] == ((), (), (), (), (), (0,), (1,), (2,), (3,))
    # with more receives it is 0F3 at 3
    row = releases(looped_bfs(2, 6, 2), receives_ahead=3)[1]
    assert row[:9] == ((), (), (), (0,), (1,), (2,), (3,), (4,), (5,))


@settings(deadline=None, max_examples=100)
@given(schedules(), AHEAD)
def test_the_first_action_that_begins_after_a_message_could_leave(schedule: Schedule, ahead: int) -> None:
    spans = simulate(schedule).spans
    found = releases(schedule, ahead)
    place = {action: (rank, i) for rank, row in enumerate(schedule.per_rank) for i, action in enumerate(row)}
    for rank, row in enumerate(schedule.per_rank):
        named = {source: at for at, sources in enumerate(found[rank]) for source in sources}
        assert sum(map(len, found[rank])) == len(named)
        for index, action in enumerate(row):
            taker = schedule.sends(action)
            if taker is None:
                assert index not in named
                continue
            there, at = place[taker]
            leaves = max(spans[rank][index].end, spans[there][max(at - ahead, 0)].start)
            later = [i for i in range(len(row)) if spans[rank][i].start > leaves]
            assert named.get(index) == (later[0] if later else None)


@settings(deadline=None, max_examples=150)
@given(schedules(), AHEAD, st.randoms(use_true_random=False), st.booleans())
def test_no_speed_of_ranks_stops_them(
    schedule: Schedule, ahead: int, chance: random.Random, offers_first: bool
) -> None:
    wire = Wire(schedule, releases(schedule, ahead), ahead)
    wire.play(chance, offers_first)
    assert all(state.at == len(state.row) for state in wire.ranks)
    if schedule.training:
        assert tuple(state.peak for state in wire.ranks) == peak_live(schedule)


def test_a_wait_right_after_the_send_would_stop_a_v() -> None:
    schedule = make_schedule("zb-v", 4, 8)
    at_once = tuple(tuple((i - 1,) if i and schedule.sends(row[i - 1]) else () for i in range(len(row)))
                    for row in schedule.per_rank)  # fmt: skip
    with pytest.raises(AssertionError, match="stuck at"):
        Wire(schedule, at_once, RECEIVES_AHEAD).play(random.Random(1), True)
    with pytest.raises(ScheduleError, match="is stuck when sends block"):
        check(schedule, RECEIVES_AHEAD)


def test_a_changed_order_of_microbatches_gives_a_rank_the_wrong_message() -> None:
    schedule = parse_schedule("0F0 0F1 0B0 0B1\n1F1 1F0 1B0 1B1", "crossed")
    with pytest.raises(AssertionError, match="0F0 comes where 0F1 is needed"):
        Wire(schedule, releases(schedule), RECEIVES_AHEAD).play(random.Random(1), True)
    with pytest.raises(ScheduleError, match="has 1F1 where stage 0 has 0F0"):
        check(schedule)


def test_a_schedule_that_cannot_be_run_has_no_releases() -> None:
    with pytest.raises(ScheduleError, match="is stuck"):
        releases(parse_schedule("0F0 0B0 0F1 0B1\n1F1 1F0 1B0 1B1", "stuck"))
    with pytest.raises(ScheduleError, match="is not complete"):
        releases(replace(one_f_one_b(2, 2), microbatches=3))


def test_stages_of_one_rank_send_nothing() -> None:
    assert not any(any(row) for row in releases(forward_only(v_shape(1), 4)))
