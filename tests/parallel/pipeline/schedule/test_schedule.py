"""Schedules as data: tokens, dependencies, the simplest kinds, and refusals."""

import re
import subprocess
import sys
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import ScheduleError
from engine.parallel.pipeline.schedule.actions import Action, Op, Schedule
from engine.parallel.pipeline.schedule.kinds import SCHEDULE_KINDS, make_schedule
from engine.parallel.pipeline.schedule.one_f_one_b import forward_only, gpipe, one_f_one_b
from engine.parallel.pipeline.schedule.schedule_file import parse_schedule

ROOT = Path(__file__).parents[4]
SIZES = (st.integers(1, 8), st.integers(1, 24))
ACTIONS = st.builds(Action, st.sampled_from(Op), st.integers(0, 999), st.integers(0, 99_999))


def action(token: str) -> Action:
    return Action.parse(token)


def rows(schedule: Schedule) -> list[str]:
    return schedule.text().splitlines()


def test_action_prints_as_its_token() -> None:
    assert str(Action(Op.FORWARD, 2, 5)) == "2F5" and f"{Action(Op.BACKWARD_WEIGHT, 12, 340)}" == "12W340"


@settings(deadline=None)
@given(ACTIONS)
def test_parse_inverts_print(one: Action) -> None:
    assert Action.parse(str(one)) == one


@settings(deadline=None)
@given(ACTIONS, ACTIONS)
def test_actions_are_ordered_and_hashed_by_value(one: Action, other: Action) -> None:
    assert (one < other) + (one == other) + (one > other) == 1
    assert (hash(one) == hash(other)) or one != other


def test_actions_and_schedules_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        setattr(action("0F0"), "stage", 1)  # noqa: B010  (mypy refuses the plain assignment)
    assert not hasattr(action("0F0"), "__dict__")
    with pytest.raises(FrozenInstanceError):
        setattr(gpipe(1, 1), "stages", 2)  # noqa: B010


@pytest.mark.parametrize(
    "token", ["", "F", "2F", "F5", "2f5", "2X5", "-1F0", "2F5 ", "2.0F5", "2F\u0665", "9999999999F0"]
)
def test_what_is_no_token_is_refused(token: str) -> None:
    with pytest.raises(ScheduleError) as error:
        Action.parse(token)
    assert str(error.value) == (
        f"{token!r} is not an action; write the number of the stage, then one of the letters F, B, I and W, then the "
        "number of the microbatch, such as 2F5."
    )


def test_gpipe_does_all_forwards_then_all_backwards_in_order() -> None:
    assert rows(gpipe(2, 3)) == ["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2"]


def test_one_f_one_b_runs_ahead_by_the_ranks_that_follow() -> None:
    assert rows(one_f_one_b(3, 4)) == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]


def test_forward_only_has_no_backward() -> None:
    schedule = forward_only(2, 3)
    assert rows(schedule) == ["0F0 0F1 0F2", "1F0 1F1 1F2"] and not schedule.training


def test_needs_are_the_neighbours_and_the_own_forward() -> None:
    schedule = gpipe(3, 2)
    assert schedule.needs(action("0F1")) == ()
    assert schedule.needs(action("2F1")) == (action("1F1"),)
    assert schedule.needs(action("1B0")) == (action("1F0"), action("2B0"))
    assert schedule.needs(action("2B0")) == (action("2F0"),)


def test_a_split_backward_is_what_the_previous_stage_waits_for() -> None:
    # stage 1 splits microbatch 0 only
    schedule = parse_schedule("0F0 0F1 0B0 0B1\n1F0 1I0 1F1 1B1 1W0", "mixed")
    assert schedule.needs(action("0B0")) == (action("0F0"), action("1I0"))
    assert schedule.needs(action("0B1")) == (action("0F1"), action("1B1"))
    assert schedule.needs(action("1W0")) == (action("1I0"),)
    assert schedule.feeds(action("1I0")) == action("0B0") and schedule.feeds(action("1W0")) is None


def test_weights_of_one_microbatch_are_beside_what_another_sends() -> None:
    row = "0F0 0F1 0I0 0F2 0I1 0W0 0W1 0I2 0W2"
    beside = parse_schedule(row, "split").weights_beside(0)
    # before 0I0 has ended there is nothing left to do, and 0I2 is not beside its own weights
    assert beside == {action("0F2"): action("0W0"), action("0I1"): action("0W0")}


@settings(deadline=None)
@given(st.sampled_from(list(SCHEDULE_KINDS)), *SIZES)
def test_what_is_beside_an_action_has_been_left_and_is_still_to_come(kind: str, ranks: int, microbatches: int) -> None:
    microbatches = max(microbatches, SCHEDULE_KINDS[kind].microbatches_of(ranks))
    schedule = make_schedule(kind, ranks, microbatches, SCHEDULE_KINDS[kind].virtual_stages)
    for rank, row in enumerate(schedule.per_rank):
        place = {action: number for number, action in enumerate(row)}
        for action, weights in schedule.weights_beside(rank).items():
            left = Action(Op.BACKWARD_INPUT, weights.stage, weights.microbatch)
            assert place[left] < place[action] < place[weights] and weights.op is Op.BACKWARD_WEIGHT


@settings(deadline=None)
@given(st.sampled_from(list(SCHEDULE_KINDS)), *SIZES)
def test_feeds_is_the_inverse_of_needs_between_stages(kind: str, ranks: int, microbatches: int) -> None:
    microbatches = max(microbatches, SCHEDULE_KINDS[kind].microbatches_of(ranks))
    schedule = make_schedule(kind, ranks, microbatches, SCHEDULE_KINDS[kind].virtual_stages)
    everything = [one for row in schedule.per_rank for one in row]
    needed = {(need, one) for one in everything for need in schedule.needs(one) if need.stage != one.stage}
    assert needed == {(one, fed) for one in everything if (fed := schedule.feeds(one)) is not None}
    rank = schedule.rank_of_stage
    crossing = {(source, one) for source, one in needed if rank[source.stage] != rank[one.stage]}
    assert crossing == {(one, to) for one in everything if (to := schedule.sends(one)) is not None}
    assert crossing == {(source, one) for one in everything if (source := schedule.receives(one)) is not None}
    if SCHEDULE_KINDS[kind].placement == "line":
        assert crossing == needed


def test_nothing_travels_between_stages_of_one_rank() -> None:
    v_shape = parse_schedule("0F0 3F0 3B0 0B0\n1F0 2F0 2B0 1B0", "v")
    assert v_shape.stages_of_rank == ((0, 3), (1, 2)) and v_shape.rank_of_stage == (0, 1, 1, 0)
    assert v_shape.sends(action("1F0")) is None and v_shape.receives(action("2F0")) is None
    assert v_shape.sends(action("2F0")) == action("3F0") and v_shape.receives(action("3F0")) == action("2F0")


@settings(deadline=None)
@given(st.sampled_from(["gpipe", "1f1b"]), *SIZES)
def test_text_of_a_schedule_round_trips(kind: str, stages: int, microbatches: int) -> None:
    schedule = make_schedule(kind, stages, microbatches)
    assert parse_schedule(schedule.text(), kind) == schedule
    assert parse_schedule(schedule.text().replace(" ", ",,"), kind) == schedule
    evaluation = forward_only(stages, microbatches)
    assert parse_schedule(evaluation.text(), "forward") == evaluation


def test_comments_and_empty_lines_are_passed_over() -> None:
    text = "# two stages\n0F0 0B0  # the first\n\n,,1F0, 1B0,,\n"
    assert parse_schedule(text, "gpipe") == gpipe(2, 1)


@pytest.mark.parametrize(("text", "sentence"), [
    ("0F0\n0B0 1X1",
     "own.csv, line 2: '1X1' is not an action; write the number of the stage, then one of the letters F, B, I and W, "
     "then the number of the microbatch, such as 2F5."),
    ("# nothing", "schedule own.csv over 0 stages and 0 microbatches is empty; use at least one of each."),
    ("0F0 1F0\n1B0 0B0",
     "schedule own.csv of 2 stages has stage 0 on ranks 0 and 1; place each of the stages 0 to 1 on one rank."),
    ("0F0 0B0\n999999999F0",
     "schedule own.csv of 2 stages has stage 1 on no rank; place each of the stages 0 to 1 on one rank."),
])  # fmt: skip
def test_a_wrong_file_is_one_sentence(text: str, sentence: str) -> None:
    with pytest.raises(ScheduleError, match=f"^{re.escape(sentence)}$"):
        parse_schedule(text, "own.csv")


def test_rows_must_fit_ranks() -> None:
    sentence = (
        "schedule x has actions for 1 ranks (per_rank), but stages for 2 ranks (stages_of_rank); give both one entry "
        "for each pipeline rank."
    )
    with pytest.raises(ScheduleError, match=f"^{re.escape(sentence)}$"):
        Schedule("x", 2, 1, ((action("0F0"),),), ((0,), (1,)))


@pytest.mark.parametrize(("arguments", "sentence"), [
    (("zb-h2", 4, 8), "schedule 'zb-h2' does not exist; choose gpipe, 1f1b, interleaved, looped-bfs, zb-h1, zb-v or "
     "dualpipe-v."),
    (("1f1b", 4, 8, 2),
     "schedule 1f1b with virtual_stages = 2: it holds one stage on each rank; set virtual_stages to 1."),
    (("gpipe", 0, 8), "schedule gpipe over 0 stages and 8 microbatches is empty; use at least one of each."),
    (("1f1b", 4, 0), "schedule 1f1b over 4 stages and 0 microbatches is empty; use at least one of each."),
])  # fmt: skip
def test_kinds_and_sizes_that_cannot_be(arguments: tuple[str, int, int], sentence: str) -> None:
    with pytest.raises(ScheduleError, match=f"^{re.escape(sentence)}$"):
        make_schedule(*arguments)


def test_the_whole_path_needs_no_torch() -> None:
    code = """
import sys
from engine.parallel.pipeline.schedule.validate import check
from engine.parallel.pipeline.schedule.simulate import simulate
from engine.parallel.pipeline.report.text import draw
from engine.parallel.pipeline.schedule.simulate import releases
from engine.parallel.pipeline.schedule.kinds import SCHEDULE_KINDS, make_schedule
for kind in SCHEDULE_KINDS.values():
    schedule = make_schedule(kind.name, 4, 8, kind.virtual_stages)
    check(schedule)
    assert draw(simulate(schedule)) and releases(schedule)
sys.exit("torch" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
