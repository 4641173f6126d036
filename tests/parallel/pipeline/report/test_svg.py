"""The SVG picture: well formed, to scale, complete, and the same again."""

from xml.etree import ElementTree

import pytest

from engine.parallel.pipeline.report.svg import svg
from engine.parallel.pipeline.report.text import Panel
from engine.parallel.pipeline.schedule.one_f_one_b import gpipe, one_f_one_b
from engine.parallel.pipeline.schedule.simulate import StepTimeline, simulate
from tests.parallel.pipeline.timelines import V_SHAPE, measured

NAME = "{http://www.w3.org/2000/svg}"


def rows_of(text: str) -> list[ElementTree.Element]:
    return ElementTree.fromstring(text).findall(f"{NAME}g")


def boxes(row: ElementTree.Element) -> list[tuple[str, str, float, float]]:
    """Token, class, left edge and width of each action."""
    found = [(box.findtext(f"{NAME}title"), box) for box in row.iter(f"{NAME}rect")]
    return [
        (token, box.attrib["class"], float(box.attrib["x"]), float(box.attrib["width"]))
        for token, box in found
        if token is not None
    ]


def idle_width(row: ElementTree.Element) -> float:
    return float(next(box.attrib["width"] for box in row.iter(f"{NAME}rect") if box.attrib["class"] == "idle"))


@pytest.mark.parametrize("timeline", [simulate(V_SHAPE), simulate(one_f_one_b(3, 5))], ids=["v", "1f1b"])
def test_every_action_is_a_box_to_scale(timeline: StepTimeline) -> None:
    rows = rows_of(svg([Panel(timeline)]))
    for row, spans in zip(rows, timeline.spans, strict=True):
        scale = idle_width(row) / timeline.makespan
        assert [token for token, *_ in boxes(row)] == [str(span.action) for span in spans]
        for (_, name, x, width), span in zip(boxes(row), spans, strict=True):
            assert name[0] == span.action.op
            assert x == pytest.approx(span.start * scale, abs=0.02)
            assert width == pytest.approx((span.end - span.start) * scale, abs=0.7)  # less the gap


def test_operations_and_stages_of_a_rank_have_colours_of_their_own() -> None:
    text = svg([Panel(simulate(V_SHAPE))])
    names = {name for row in rows_of(text) for _, name, *_ in boxes(row)}
    fills = {name: text.split(f".{name}{{fill:")[1].split("}")[0] for name in names}
    assert names == {f"{op}{place}-2" for op in "FIW" for place in (0, 1)}
    assert len(set(fills.values())) == 6


def test_only_what_occurs_is_explained() -> None:
    plain, split = svg([Panel(simulate(one_f_one_b(2, 2)))]), svg([Panel(simulate(V_SHAPE))])
    assert "B backward" in plain and "weights" not in plain and "paler" not in plain
    assert "B backward" not in split and "W gradient of the weights" in split and "paler" in split


def test_numbers_stand_where_they_fit() -> None:
    def numbers(width: int) -> int:
        return svg([Panel(simulate(one_f_one_b(4, 12)))], width).count('class="n"')

    assert numbers(960) == 4 * 12 * 2 and numbers(420) == 4 * 12 and numbers(200) == 0  # backwards are wider


def test_predicted_and_measured_each_fill_the_width_and_equal_units_share_a_scale() -> None:
    predicted = simulate(one_f_one_b(2, 3))
    pair = rows_of(svg([Panel(predicted, "predicted"), Panel(measured(predicted), "measured", seconds=True)]))
    assert len(pair) == 4 and len({idle_width(row) for row in pair}) == 1
    assert boxes(pair[2])[0][2] > boxes(pair[0])[0][2] == 0  # the measured one begins late

    short, long = rows_of(svg([Panel(simulate(gpipe(1, 2))), Panel(simulate(gpipe(1, 4)))]))
    assert idle_width(long) == pytest.approx(2 * idle_width(short), abs=0.02)


def test_one_picture_for_light_and_dark_without_anything_from_outside() -> None:
    text = svg([Panel(simulate(V_SHAPE))])
    assert "prefers-color-scheme:dark" in text and text.count("http") == 1 and "<script" not in text
    root = ElementTree.fromstring(text)
    assert root.attrib["aria-label"] == Panel(simulate(V_SHAPE)).headline()
    assert text == svg([Panel(simulate(V_SHAPE))])


def test_names_are_escaped() -> None:
    root = ElementTree.fromstring(svg([Panel(simulate(V_SHAPE), '<a & "b">')]))
    title = next(root.iter(f"{NAME}text")).text
    assert title is not None and title.startswith('v, <a & "b">: ') and root.attrib["aria-label"] == title


def test_the_picture_is_as_high_as_its_rows() -> None:
    heights = [float(ElementTree.fromstring(svg([Panel(simulate(gpipe(p, 1)))])).attrib["height"]) for p in (1, 2, 5)]
    assert heights[1] - heights[0] == 23 and heights[2] - heights[1] == 69
