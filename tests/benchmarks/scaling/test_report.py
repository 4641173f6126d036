"""What is shown of a record: text and picture, from the record alone."""

from dataclasses import replace
from xml.etree import ElementTree

import pytest

from benchmarks.scaling.plot import draw_record
from benchmarks.scaling.report import efficiency, table
from engine.planning.step_time.ranking import GridChoice
from tests.benchmarks.scaling.test_record import DP4, record, row

PP4 = GridChoice(dp=1, tp=1, pp=4)


def test_a_row_says_rates_and_the_error_of_its_prediction() -> None:
    lines = table(record(row(samples=(2.0,)), row(PP4, samples=(1.0,)))).splitlines()
    assert [line.split()[:4] for line in lines[1:3]] == [["2", "4", "strong", "pp4"], ["2", "4", "strong", "dp4,"]]
    assert "2.000   1.750      -12%  50     0.0000   0.0%  50%" in lines[2]
    assert "computation 1.000 bubble 0.500 dp 0.250" in lines[2] and "dp 1.000" in lines[2]


def test_links_and_machine_are_shown() -> None:
    told = table(record(row()))
    assert "dp4, ZeRO 1  dp    4                 2                 1000        10.0" in told
    assert "takes a rank 3000.0 ms" in told and "out of a host 1000 us and 10.0 MB/s" in told


def test_a_refused_grid_says_why() -> None:
    assert (
        table(record(replace(row(), predicted=None, refused="no such grid."))).splitlines()[1].endswith("no such grid.")
    )


def test_efficiency_is_that_of_a_rank_beside_the_fewest_ranks() -> None:
    few, slow, many = row(samples=(1.0,)), row(PP4, samples=(4.0,)), row(nodes=4, samples=(1.0,))
    told = record(few, slow, many, row(mode="weak", samples=(9.0,)))
    assert [efficiency(each, told) for each in (few, slow, many)] == [1.0, 0.25, 0.5]
    assert efficiency(row(), told) is None


def test_a_picture_has_lines_of_modes_and_bars_of_grids() -> None:
    told = record(
        row(samples=(2.0,)), row(nodes=4, samples=(1.0,)), row(PP4, nodes=4, samples=(3.0,)),
        row(mode="weak", samples=(1.0,)),
    )  # fmt: skip
    root = ElementTree.fromstring(draw_record(told))
    texts = ["".join(node.itertext()) for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "strong: seconds of a step, the best grid" in texts and "weak, 2 nodes, 4 ranks: seconds of a step" in texts
    assert texts.count("dp4, ZeRO 1") == 2 and texts.count("pp4") == 1
    bars = [node for node in root.iter("{http://www.w3.org/2000/svg}rect") if node.get("class") == "measured"]
    assert len(bars) == 3 + 2  # of grids, and of two legends
    assert draw_record(told) == draw_record(told)


def test_an_unpredicted_record_is_drawn_too() -> None:
    ElementTree.fromstring(draw_record(record(replace(row(samples=(1.0,)), predicted=None))))
    ElementTree.fromstring(draw_record(record(row())))


@pytest.mark.parametrize("choice", [DP4, PP4])
def test_bars_have_the_length_of_their_seconds(choice: GridChoice) -> None:
    root = ElementTree.fromstring(draw_record(record(row(choice, samples=(3.5,)))))
    width = {
        node.get("class"): float(node.get("width", "0"))
        for node in reversed(list(root.iter("{http://www.w3.org/2000/svg}rect")))
    }
    assert width["p0"] / width["measured"] == pytest.approx(1.0 / 3.5, abs=1e-3)
