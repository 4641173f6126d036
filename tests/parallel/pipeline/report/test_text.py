"""The picture of a schedule, letter by letter."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.parallel.pipeline.report.text import Panel, draw, draw_panels
from engine.parallel.pipeline.schedule.kinds import make_schedule
from engine.parallel.pipeline.schedule.one_f_one_b import gpipe, one_f_one_b
from engine.parallel.pipeline.schedule.simulate import Cost, simulate
from tests.parallel.pipeline.timelines import V_SHAPE, measured


def test_one_f_one_b() -> None:
    picture = """\
1f1b
rank 0 |F0 F1 F2 F3  .  .  .  .  .  . B0 B0 F4 B1 B1 F5 B2 B2  . B3 B3  . B4 B4  . B5 B5
rank 1 | . F0 F1 F2  .  .  .  . B0 B0 F3 B1 B1 F4 B2 B2 F5 B3 B3  . B4 B4  . B5 B5  .  .
rank 2 | .  . F0 F1  .  . B0 B0 F2 B1 B1 F3 B2 B2 F4 B3 B3 F5 B4 B4  . B5 B5  .  .  .  .
rank 3 | .  .  . F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 F4 B4 B4 F5 B5 B5  .  .  .  .  .  ."""
    assert draw(simulate(one_f_one_b(4, 6))) == picture


def test_several_stages_on_a_rank_show_the_stage() -> None:
    picture = """\
v
rank 0 |0F0   .   . 3F0 3I0 3W0   . 0I0 0W0
rank 1 |  . 1F0 2F0   .   . 2I0 1I0 2W0 1W0"""
    assert draw(simulate(V_SHAPE)) == picture


def test_small_letters_are_later_stages_of_a_rank() -> None:
    picture = """\
v, small letters are later stages of a rank
rank 0 |F0  .  . f0 i0 w0  . I0 W0
rank 1 | . F0 f0  .  . i0 I0 w0 W0"""
    assert draw(simulate(V_SHAPE), width=43) != picture
    assert draw(simulate(V_SHAPE), width=42) == picture == draw(simulate(V_SHAPE), width=34)
    picture = """\
v, small letters are later stages of a rank, a letter is the time of one cell
rank 0 |F..fiw.IW
rank 1 |.Ff..iIwW"""
    assert draw(simulate(V_SHAPE), width=33) == picture


def test_a_measured_step_lies_under_the_predicted_one() -> None:
    predicted = simulate(one_f_one_b(2, 3))
    picture = """\
1f1b, predicted: 2 ranks, 3 microbatches, 25.0% idle, at most 2 slices held
rank 0 |F0 F1  .  . B0 B0 F2 B1 B1  . B2 B2
rank 1 | . F0 B0 B0 F1 B1 B1 F2 B2 B2  .  .

1f1b, measured: 2 ranks, 3 microbatches, 30.0% idle, at most 2 slices held, 12 ms, a cell is 1 ms
rank 0 |F0 F1  .  . B0 B0 F2 B1 B1  . B2 B2
rank 1 | . F0 B0 B0 F1 B1 B1 F2 B2 B2  .  ."""
    panels = [Panel(predicted, "predicted"), Panel(measured(predicted), "measured", seconds=True)]
    assert draw_panels(panels) == picture
    assert draw_panels(panels, 19).splitlines()[-3:] == [
        "1f1b, measured: 2 ranks, 3 microbatches, 30.0% idle, at most 2 slices held, 12 ms, a letter is 2 ms",
        "rank 0 |F.BFBB",
        "rank 1 |.BFBB.",
    ]  # fmt: skip


def test_timelines_of_one_unit_have_one_scale_and_end_where_they_end() -> None:
    picture = """\
gpipe
rank 0 |F0 F1  .  .  . B0 B0 B1 B1
rank 1 | . F0 F1 B0 B0 B1 B1  .  .

1f1b
rank 0 |F0 F1  .  . B0 B0 F2 B1 B1  . B2 B2
rank 1 | . F0 B0 B0 F1 B1 B1 F2 B2 B2  .  ."""
    assert draw_panels([Panel(simulate(gpipe(2, 2))), Panel(simulate(one_f_one_b(2, 3)))]) == picture


def test_a_slip_of_the_clock_makes_no_finer_cells() -> None:
    timeline = measured(simulate(one_f_one_b(2, 3)))
    first, *others = timeline.spans[0]
    short = first._replace(end=first.start + 1e-7)
    slipped = replace(timeline, spans=((short, *others), timeline.spans[1]))
    title, *rows = draw_panels([Panel(slipped, seconds=True)]).splitlines()
    assert title == "1f1b, a cell is 900 us"  # a forward, and not the slip
    assert [len(row.split("|")[1].split()) for row in rows] == [14, 14]  # 12 ms


def test_a_narrow_picture_keeps_one_letter_of_each_cell() -> None:
    picture = """\
1f1b, a letter is the time of one cell
rank 0 |FFFF......BBFBBFBB.BB.BB.BB
rank 1 |.FFF....BBFBBFBBFBB.BB.BB..
rank 2 |..FF..BBFBBFBBFBBFBB.BB....
rank 3 |...FBBFBBFBBFBBFBBFBB......"""
    assert draw(simulate(one_f_one_b(4, 6)), width=40) == picture


def test_a_narrower_picture_keeps_the_phases() -> None:
    picture = """\
1f1b, a letter is the time of 3 cells
rank 0 |F..BBBBBB
rank 1 |F..BBBBB.
rank 2 |..BBBBBB.
rank 3 |.BBBBBB.."""
    assert draw(simulate(one_f_one_b(4, 6)), width=20) == picture


def test_transfers_and_unequal_times() -> None:
    timeline = simulate(one_f_one_b(2, 2), Cost(forward=0.5, backward=1.0, transfer=0.5))
    picture = """\
1f1b
rank 0 |F0 F1  .  .  .  . B0 B0  . B1 B1
rank 1 | .  . F0 B0 B0 F1 B1 B1  .  .  ."""
    assert draw(timeline) == picture


@settings(deadline=None)
@given(st.sampled_from(["gpipe", "1f1b"]), st.integers(1, 12), st.integers(1, 24), st.integers(20, 200))
def test_no_picture_is_wider_than_asked(kind: str, stages: int, microbatches: int, width: int) -> None:
    title, *rows = draw(simulate(make_schedule(kind, stages, microbatches)), width).splitlines()
    assert len(rows) == stages and title.startswith(kind)
    assert len({len(row) for row in rows}) == 1 and len(rows[0]) <= width


@pytest.mark.parametrize("cost", [Cost(forward=0.1, backward=0.2), Cost(forward=1 / 3, backward=2 / 3, transfer=1 / 7)])
def test_rounding_adds_no_column(cost: Cost) -> None:
    *_, last = draw(simulate(one_f_one_b(1, 10), cost), 200).splitlines()
    assert last.split("|")[1].split() == [f"{op}{i}" for i in range(10) for op in "FBB"]
