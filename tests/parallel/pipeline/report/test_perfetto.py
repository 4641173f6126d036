"""The trace: JSON with every action in its place, and an arrow for every message."""

import json
from collections import Counter
from typing import Any

import pytest

from engine.parallel.pipeline.report.perfetto import trace
from engine.parallel.pipeline.report.text import Panel, summarize
from engine.parallel.pipeline.schedule.one_f_one_b import one_f_one_b
from engine.parallel.pipeline.schedule.simulate import StepTimeline, simulate
from tests.parallel.pipeline.timelines import V_SHAPE, measured


def events(*panels: Panel) -> list[dict[str, Any]]:
    found = json.loads(trace(panels))["traceEvents"]
    assert isinstance(found, list)
    return found


def of_kind(found: list[dict[str, Any]], phase: str) -> list[dict[str, Any]]:
    return [event for event in found if event["ph"] == phase]


@pytest.mark.parametrize("timeline", [simulate(V_SHAPE), simulate(one_f_one_b(3, 5))], ids=["v", "1f1b"])
@pytest.mark.parametrize(("seconds", "scale"), [(False, 1e3), (True, 1e6)])
def test_every_action_is_a_slice(timeline: StepTimeline, seconds: bool, scale: float) -> None:
    slices = of_kind(events(Panel(timeline, seconds=seconds)), "X")
    expected = [
        (str(span.action), rank, span.start * scale, (span.end - span.start) * scale)
        for rank, row in enumerate(timeline.spans)
        for span in row
    ]
    assert [(event["name"], event["tid"], event["ts"], event["dur"]) for event in slices] == expected
    assert all(event["name"] == f"{event['args']['stage']}{event['cat'][0].upper()}{event['args']['microbatch']}"
               for event in slices if not event["cat"].startswith("backward "))  # fmt: skip


def test_slices_of_a_rank_add_up_to_its_busy_time() -> None:
    timeline = measured(simulate(one_f_one_b(4, 8)))
    busy = Counter[int]()
    for event in of_kind(events(Panel(timeline, seconds=True)), "X"):
        busy[event["tid"]] += event["dur"]
    assert [busy[rank] for rank in range(4)] == pytest.approx([8 * 2.8 * 1e3] * 4)  # 0.9 and 1.9 ms a microbatch


@pytest.mark.parametrize("timeline", [simulate(V_SHAPE), simulate(one_f_one_b(3, 5))], ids=["v", "1f1b"])
def test_an_arrow_leads_from_each_send_to_its_receiver(timeline: StepTimeline) -> None:
    found = events(Panel(timeline))
    place = {event["name"]: event for event in of_kind(found, "X")}
    starts, ends = of_kind(found, "s"), {event["id"]: event for event in of_kind(found, "f")}
    schedule = timeline.schedule
    assert len(starts) == len(ends) == sum(summarize(timeline).messages)
    for start in starts:
        sender = next(span.action for row in timeline.spans for span in row if start["id"] == f"0/{span.action}")
        taker = place[str(schedule.sends(sender))]
        assert start["tid"] == place[str(sender)]["tid"] != taker["tid"] == ends[start["id"]]["tid"]
        assert 0 < start["ts"] - place[str(sender)]["ts"] < place[str(sender)]["dur"]
        assert ends[start["id"]]["ts"] == taker["ts"] and ends[start["id"]]["bp"] == "e"


def test_timelines_are_processes_and_ranks_are_threads_with_names() -> None:
    predicted = simulate(one_f_one_b(2, 3))
    panels = [Panel(predicted, "predicted"), Panel(measured(predicted), "measured", seconds=True)]
    found = events(*panels)
    names = {(event["name"], event["pid"], event["tid"]): event["args"]["name"] for event in of_kind(found, "M")}
    assert [names["process_name", process, 0] for process in (0, 1)] == [
        f"pipeline {panel.headline()}" for panel in panels
    ]
    assert [names["thread_name", process, rank] for process in (0, 1) for rank in (0, 1)] == ["rank 0", "rank 1"] * 2
    arrows = Counter(event["id"] for event in found if event["ph"] in "sf")
    assert set(arrows.values()) == {2} and len(arrows) == 12  # names of arrows are not shared by processes


def test_equal_input_gives_equal_text() -> None:
    assert trace([Panel(simulate(V_SHAPE))]) == trace([Panel(simulate(V_SHAPE))])
