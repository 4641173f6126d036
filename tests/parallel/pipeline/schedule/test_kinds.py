"""Every kind for every size: it can be run, it is as short as its formula, and it holds no more than its formula."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import ScheduleError
from engine.parallel.pipeline.report.text import draw
from engine.parallel.pipeline.schedule.actions import Op, Schedule, loop, rounds, v_shape
from engine.parallel.pipeline.schedule.dependencies import DependencyGraph
from engine.parallel.pipeline.schedule.kinds import SCHEDULE_KINDS, dualpipe_v, make_schedule, why_unfit
from engine.parallel.pipeline.schedule.one_f_one_b import gpipe, interleaved, looped_bfs, one_f_one_b
from engine.parallel.pipeline.schedule.schedule_file import parse_schedule
from engine.parallel.pipeline.schedule.simulate import peak_live, simulate
from engine.parallel.pipeline.schedule.validate import check
from engine.parallel.pipeline.schedule.zero_bubble import zb_h1, zb_v

ROOT = Path(__file__).parents[4]


@st.composite
def schedules(
    draw: st.DrawFn, kinds: tuple[str, ...] = tuple(SCHEDULE_KINDS), ranks: int = 9
) -> tuple[Schedule, int, int, int]:
    """A schedule with its p, m and v."""
    kind = SCHEDULE_KINDS[draw(st.sampled_from(kinds))]
    p = draw(st.integers(1, ranks))
    m = draw(st.integers(kind.microbatches_of(p), 4 * p + 3))
    v = draw(st.integers(kind.fewest, kind.most or 4))
    return make_schedule(kind.name, p, m, v), p, m, v


def clocks(kind: str, p: int, m: int, v: int) -> int:
    """The formula: a forward of a stage takes one clock, each half of its backward one."""
    if SCHEDULE_KINDS[kind].splits:
        return max(3 * v * m + p - 1, 2 * p * v + 2 * m - 1, p * v + 2 * v * m + p - 1)
    return 3 * (v * m + p - 1 + (v - 1) * max(0, p - m))


def most_held(kind: str, p: int, m: int, v: int) -> int:
    """The formula: activations of a stage that the fullest rank holds."""
    turn = max(map(len, rounds(p, m)))
    return {
        "gpipe": m,
        "1f1b": min(m, p),
        "interleaved": min(v * m, (v - 1) * turn + 2 * p - 1),
        "looped-bfs": v * m,
        "zb-h1": v * min(m, p),
        "zb-v": v * min(m, p),
        "dualpipe-v": 2 * p + 1,
    }[kind]


@settings(deadline=None, max_examples=150)
@given(schedules())
def test_every_kind_is_what_its_formulas_say(made: tuple[Schedule, int, int, int]) -> None:
    schedule, p, m, v = made
    check(schedule)
    timeline = simulate(schedule)
    assert timeline.makespan == clocks(schedule.name, p, m, v)
    assert timeline.idle == p * (timeline.makespan - 3 * v * m)
    held = max(peak_live(schedule))
    assert held <= most_held(schedule.name, p, m, v)
    if schedule.name != "dualpipe-v":  # which holds a little less over few ranks
        assert held == most_held(schedule.name, p, m, v)


@settings(deadline=None, max_examples=80)
@given(schedules(("gpipe", "1f1b", "interleaved")))
def test_blocking_sends_need_few_receives_ahead(made: tuple[Schedule, int, int, int]) -> None:
    schedule, p, m, v = made
    more = max(map(len, rounds(p, m))) - p
    check(schedule, max(1, 2 * more) if v > 1 else 0)
    check(zb_h1(p, m), 0)


@pytest.mark.parametrize(("kind", "v"), [("looped-bfs", 2), ("zb-h1", 2), ("zb-v", 2), ("dualpipe-v", 2)])
def test_blocking_sends_stop_a_rank_that_runs_ahead(kind: str, v: int) -> None:
    schedule = make_schedule(kind, 8, 64, v)
    check(schedule)
    with pytest.raises(ScheduleError, match="is stuck when sends block"):
        check(schedule, 4)


@settings(deadline=None, max_examples=60)
@given(schedules())
def test_text_round_trips(made: tuple[Schedule, int, int, int]) -> None:
    assert parse_schedule(made[0].text(), made[0].name) == made[0]


@settings(deadline=None, max_examples=60)
@given(schedules())
def test_kinds_say_where_stages_lie_and_whether_backwards_are_split(made: tuple[Schedule, int, int, int]) -> None:
    schedule, p, _, v = made
    kind = SCHEDULE_KINDS[schedule.name]
    assert schedule.stages_of_rank == (v_shape(p) if kind.placement == "v" else loop(p, v))
    assert kind.placement != "line" or v == 1
    ops = {action.op for row in schedule.per_rank for action in row}
    assert kind.splits or ops == {Op.FORWARD, Op.BACKWARD}


@settings(deadline=None, max_examples=60)
@given(schedules())
def test_microbatches_ascend_for_every_operation_of_every_stage(made: tuple[Schedule, int, int, int]) -> None:
    schedule, _, m, _ = made
    for row in schedule.per_rank:
        for stage in {action.stage for action in row}:
            for ops in ("F", "BI", "W"):
                order = [one.microbatch for one in row if one.stage == stage and one.op in ops]
                assert order == sorted(order) and (ops == "W" or order == list(range(m)))


def test_gradients_of_gpipe_and_looped_bfs_add_up_in_the_order_of_one_process() -> None:
    assert looped_bfs(2, 3, 2).text().splitlines()[0] == "0F0 0F1 0F2 2F0 2F1 2F2 2B0 2B1 2B2 0B0 0B1 0B2"
    assert gpipe(2, 3).text().splitlines()[0] == "0F0 0F1 0F2 0B0 0B1 0B2"


def test_the_weight_gradients_of_stage_0_are_not_apart() -> None:
    # nobody waits for its input gradient
    ops = {action.op for action in zb_h1(4, 12).per_rank[0]}
    assert ops == {Op.FORWARD, Op.BACKWARD}


# ---- against what torch 2.13 generates: bubble, then microbatches held in whole slices --------------------------

TORCH: dict[tuple[int, int], list[tuple[float, float | None] | None]] = {
    (2, 4): [(0.200, 2), (0.111, 2.5), (0.059, None), (0.040, 2), (0.040, 2), (0.040, 2.5)],
    (4, 4): [(0.429, 4), (0.273, 4), (0.158, None), (0.111, 4), (0.200, 4), None],
    (4, 8): [(0.273, 4), (0.158, 5.5), (0.086, None), (0.059, 4), (0.059, 4), (0.059, 4.5)],
    (4, 16): [(0.158, 4), (0.086, 5.5), (0.045, None), (0.030, 4), (0.030, 4), (0.030, 4.5)],
    (8, 8): [(0.467, 8), (0.304, 8), (0.180, None), (0.127, 8), (0.226, 8), None],
    (8, 16): [(0.304, 8), (0.180, 11.5), (0.099, None), (0.068, 8), (0.068, 8), (0.068, 8.5)],
    (8, 32): [(0.180, 8), (0.099, 11.5), (0.052, None), (0.035, 8), (0.035, 8), (0.035, 8.5)],
    (8, 64): [(0.099, 8), (0.052, 11.5), (0.027, None), (0.018, 8), (0.018, 8), (0.018, 8.5)],
}
COLUMNS = [("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("zb-h1", 2), ("zb-v", 2), ("dualpipe-v", 2)]


@pytest.mark.parametrize("sizes", TORCH)
def test_no_kind_is_behind_torch(sizes: tuple[int, int]) -> None:
    for (kind, v), target in zip(COLUMNS, TORCH[sizes], strict=True):
        if target is None:
            assert why_unfit(kind, *sizes, v) is not None
            continue
        bubble, held = target
        schedule = make_schedule(kind, *sizes, v)
        assert round(simulate(schedule).bubble, 3) <= bubble, kind
        assert held is None or max(peak_live(schedule)) / v <= held, kind


@pytest.mark.parametrize(("p", "m", "rate"), [(4, 4, 3 / 27), (8, 8, 7 / 55)])
def test_zb_v_is_ahead_of_torch_where_there_are_as_many_microbatches_as_ranks(p: int, m: int, rate: float) -> None:
    assert simulate(zb_v(p, m)).bubble == pytest.approx(rate)


# ---- what does not fit -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("arguments", "sentence"), [
    (("gpipe", 4, 8, 2), "schedule gpipe with virtual_stages = 2: it holds one stage on each rank; "
     "set virtual_stages to 1."),
    (("interleaved", 4, 8), "schedule interleaved with virtual_stages = 1: it holds several stages on each rank; "
     "set virtual_stages to 2 or more."),
    (("looped-bfs", 4, 8, 1), "schedule looped-bfs with virtual_stages = 1: it holds several stages on each rank; "
     "set virtual_stages to 2 or more."),
    (("zb-h1", 4, 8, 0), "schedule zb-h1 with virtual_stages = 0: it holds one stage or more on each rank; "
     "set virtual_stages to 1 or more."),
    (("zb-v", 4, 8, 3), "schedule zb-v with virtual_stages = 3: it holds two stages on each rank; "
     "set virtual_stages to 2."),
    (("dualpipe-v", 4, 7), "schedule dualpipe-v with 7 microbatches over 4 ranks: it needs 8 or more; "
     "raise gradient_accumulation_steps or choose zb-v."),
    (("zb-v", 0, 8), "schedule zb-v over 0 stages and 8 microbatches is empty; use at least one of each."),
    (("interleaved", 4, 0, 2),
     "schedule interleaved over 8 stages and 0 microbatches is empty; use at least one of each."),
])  # fmt: skip
def test_sizes_that_a_kind_does_not_allow(arguments: tuple[str, int, int], sentence: str) -> None:
    assert why_unfit(*arguments) == sentence
    with pytest.raises(ScheduleError, match=f"^{re.escape(sentence)}$"):
        make_schedule(*arguments)


@settings(deadline=None, max_examples=200)
@given(st.sampled_from(list(SCHEDULE_KINDS)), st.integers(-1, 4), st.integers(-1, 9), st.integers(-1, 4))
def test_what_fits_can_be_made_and_nothing_else(kind: str, p: int, m: int, v: int) -> None:
    reason = why_unfit(kind, p, m, v)
    if reason is None:
        check(make_schedule(kind, p, m, v))
    else:
        with pytest.raises(ScheduleError, match=f"^{re.escape(reason)}$"):
            make_schedule(kind, p, m, v)


def test_two_stages_of_a_v_need_not_be_given() -> None:
    assert make_schedule("zb-v", 3, 4) == make_schedule("zb-v", 3, 4, 2) == zb_v(3, 4)
    assert make_schedule("dualpipe-v", 2, 4) == dualpipe_v(2, 4)


def test_kinds_can_be_listed() -> None:
    assert list(SCHEDULE_KINDS) == ["gpipe", "1f1b", "interleaved", "looped-bfs", "zb-h1", "zb-v", "dualpipe-v"]
    for name, kind in SCHEDULE_KINDS.items():
        assert kind.name == name and kind.paper and "\n" not in kind.description and len(kind.description) < 100
        assert why_unfit(name, 3, 6, kind.virtual_stages) is None
    with pytest.raises(TypeError):
        SCHEDULE_KINDS["mine"] = SCHEDULE_KINDS["gpipe"]  # type: ignore[index]


# ---- one rank is a plain loop; the pictures are true --------------------------------------------------------------


@pytest.mark.parametrize("kind", list(SCHEDULE_KINDS))
def test_one_rank_is_never_idle(kind: str) -> None:
    schedule = make_schedule(kind, 1, 5, SCHEDULE_KINDS[kind].virtual_stages)
    check(schedule)
    assert simulate(schedule).bubble == 0 and not DependencyGraph(schedule).sends()


def test_rounds_are_even_and_no_smaller_than_the_ranks() -> None:
    assert [list(map(len, rounds(4, m))) for m in (1, 4, 7, 8, 11, 14)] == [[1], [4], [7], [4, 4], [6, 5], [5, 5, 4]]
    assert [i for turn in rounds(3, 11) for i in turn] == list(range(11))


@pytest.mark.parametrize("file", ["one_f_one_b", "zero_bubble", "kinds"])
def test_pictures_are_true(file: str) -> None:
    makers: dict[str, Callable[..., Schedule]] = {
        one.__name__: one for one in (gpipe, one_f_one_b, interleaved, looped_bfs, zb_h1, zb_v, dualpipe_v)
    }
    text = (ROOT / f"parallel/pipeline/schedule/{file}.py").read_text(encoding="utf-8")
    pictures = re.findall(r"^# (\w+)\(([\d, ]+)\):.*((?:\n#.*)+)", text, re.MULTILINE)
    assert len(pictures) == text.count("#    rank 0  ")
    for name, sizes, lines in pictures:
        rows = [line.split()[2:] for line in re.findall(r"^#    (rank .*)", lines, re.MULTILINE)]
        made = draw(simulate(makers[name](*map(int, sizes.split(",")))), width=400).splitlines()[1:]
        assert rows == [line.partition("|")[2].split() for line in made], name
