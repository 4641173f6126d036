"""Evaluation: forwards alone, for stages that lie anywhere."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import ScheduleError
from engine.parallel.pipeline.schedule.actions import Op, loop, v_shape
from engine.parallel.pipeline.schedule.one_f_one_b import forward_only, gpipe, there_and_back
from engine.parallel.pipeline.schedule.simulate import peak_live, releases, simulate
from engine.parallel.pipeline.schedule.validate import check


def test_of_a_v() -> None:
    assert forward_only(v_shape(2), 3).text() == "0F0 0F1 3F0 0F2 3F1 3F2\n1F0 2F0 1F1 2F1 1F2 2F2\n"


@settings(deadline=None)
@given(st.integers(1, 8), st.integers(1, 20), st.integers(1, 4))
def test_a_loop_is_as_short_as_can_be(p: int, m: int, v: int) -> None:
    schedule = forward_only(loop(p, v), m)
    check(schedule)
    assert simulate(schedule).makespan == v * m + p - 1 + (v - 1) * max(0, p - m)
    assert peak_live(schedule) == (1,) * p
    if v == 1:
        assert schedule == forward_only(p, m)


@settings(deadline=None)
@given(st.integers(1, 8), st.integers(1, 20))
def test_a_v_is_as_short_as_can_be(p: int, m: int) -> None:
    schedule = forward_only(v_shape(p), m)
    check(schedule)
    # the last rank computes 2m, after p-1 clocks and before p-1
    assert simulate(schedule).makespan == 2 * m + 2 * (p - 1)


@settings(deadline=None, max_examples=60)
@given(st.permutations(range(7)), st.integers(0, 7), st.integers(1, 9))
def test_stages_may_lie_anywhere(order: list[int], first: int, m: int) -> None:
    placement = (tuple(sorted(order[:first])), tuple(sorted(order[first:])))
    schedule = forward_only(placement, m)
    check(schedule)
    assert schedule.stages_of_rank == placement and not schedule.training


@settings(deadline=None, max_examples=60)
@given(st.permutations(range(7)), st.integers(0, 7), st.integers(1, 9))
def test_backwards_may_follow_wherever_stages_lie(order: list[int], first: int, m: int) -> None:
    placement = (tuple(sorted(order[:first])), tuple(sorted(order[first:])))
    schedule = there_and_back(placement, m)
    check(schedule)
    releases(schedule)
    for row, forwards in zip(schedule.per_rank, forward_only(placement, m).per_rank, strict=True):
        back = [(action.stage, action.microbatch) for action in row[len(forwards) :]]
        assert row[: len(forwards)] == forwards and all(each.op is Op.BACKWARD for each in row[len(forwards) :])
        assert back == [(action.stage, action.microbatch) for action in reversed(forwards)]


def test_there_and_back_idles_as_gpipe_does() -> None:
    for p, m in ((2, 1), (2, 4), (4, 3)):
        found, expected = there_and_back(loop(p, 1), m), gpipe(p, m)
        assert simulate(found).makespan == simulate(expected).makespan and peak_live(found) == peak_live(expected)


def test_nothing_is_no_schedule() -> None:
    for nothing in (0, (), ((), ())):
        with pytest.raises(ScheduleError, match=r"schedule forward over 0 stages and 3 microbatches is empty"):
            forward_only(nothing, 3)
