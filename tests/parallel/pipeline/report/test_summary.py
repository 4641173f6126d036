"""The figures by which schedules are compared."""

from fractions import Fraction

import pytest

from engine.parallel.pipeline.report.text import Panel, cost_of_slices, end_of, number, slices, summarize
from engine.parallel.pipeline.schedule.one_f_one_b import forward_only, gpipe, one_f_one_b
from engine.parallel.pipeline.schedule.simulate import Cost, simulate
from tests.parallel.pipeline.timelines import V_SHAPE, measured


def test_one_f_one_b() -> None:
    figures = summarize(simulate(one_f_one_b(4, 8)))
    assert (figures.stages, figures.makespan, figures.bubble) == (4, 33, 3 / 11)
    assert list(figures.peak_slices) == [4, 3, 2, 1] and figures.peak == 4
    assert figures.messages == (8, 16, 16, 8) and not figures.splits


def test_several_stages_on_a_rank_are_counted_in_slices_and_send_nothing_to_themselves() -> None:
    # one microbatch: rank 0 keeps both of its half slices; 1F0 goes to 2F0 on the same rank, 2I0 to 1I0 likewise
    figures = summarize(simulate(V_SHAPE, cost_of_slices(V_SHAPE, Cost())))
    assert list(figures.peak_slices) == [1, 1] and figures.messages == (2, 2) and figures.splits
    assert figures.makespan == 4.5  # nine actions of half a slice


def test_a_slice_costs_the_same_in_one_stage_and_in_two() -> None:
    whole = Cost(forward=2, backward=6, backward_input=4, backward_weight=2, transfer=0.5)
    busy = [
        sum(span.end - span.start for span in simulate(schedule, cost_of_slices(schedule, whole)).spans[0])
        for schedule in (gpipe(2, 1), V_SHAPE)
    ]
    assert busy == [8, 8]


def test_without_backwards() -> None:
    figures = summarize(simulate(forward_only(2, 3)))
    assert list(figures.peak_slices) == [1, 1] and figures.messages == (3, 0)


def test_headlines() -> None:
    timeline = simulate(V_SHAPE)
    title = "v: 2 ranks x 2 stages, 1 microbatch, 33.3% idle, at most 1 slice held"
    assert Panel(timeline).headline() == title
    later = Panel(measured(timeline, 1e-5, 0), "measured", seconds=True).headline()
    assert later == title.replace("v:", "v, measured:") + ", 90 us"


@pytest.mark.parametrize(("seconds", "text"), [(2.345, "2.35 s"), (0.1234, "123 ms"), (12e-6, "12 us"), (0, "0 us")])
def test_durations(seconds: float, text: str) -> None:
    timeline = simulate(V_SHAPE)
    assert Panel(timeline, seconds=True).duration(seconds) == text
    assert Panel(timeline).duration(seconds) == ""


def test_panels_of_one_unit_have_one_scale() -> None:
    short, long = Panel(simulate(gpipe(2, 2))), Panel(simulate(gpipe(2, 3)))
    clock = Panel(measured(short.timeline), seconds=True)
    panels = [short, clock, long]
    assert [end_of(panel, panels) for panel in panels] == [12, pytest.approx(9e-3), 12]


def test_numbers() -> None:
    assert [number(Fraction(*pair)) for pair in ((4, 1), (5, 2), (1, 3), (10, 1))] == ["4", "2.5", "0.33", "10"]
    assert [slices(Fraction(count)) for count in (1, 2)] == ["1 slice", "2 slices"]
