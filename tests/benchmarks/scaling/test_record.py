"""The file of a benchmark of scaling: written whole, read back, filled row by row, merged."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.scaling.ranking import GridChoice
from benchmarks.scaling.record import (
    AxisMeasurement,
    Machine,
    Sample,
    ScalingRecord,
    ScalingRow,
    merged,
    read_record,
    write_record,
)
from engine.planning.cost_model.links import LinkSpeed
from engine.planning.step_time.prediction import Computation, HostLinks, StepTime

LINK = LinkSpeed(1e-4, 1e9)
DP4 = GridChoice(dp=4, tp=1, pp=1, stage=1)


def machine(forward: float = 1.0, nodes: int = 2) -> Machine:
    links = HostLinks(within=LINK, between=LinkSpeed(1e-3, 1e7))
    computed = Computation(forward=forward, backward=2.0)
    return Machine(nodes=nodes, ranks=2, computation=computed, links=links)


def row(choice: GridChoice = DP4, nodes: int = 2, samples: tuple[float, ...] = (), mode: str = "strong") -> ScalingRow:
    return ScalingRow(
        nodes=nodes, ranks=2, mode=mode, choice=choice, tokens=100, flops=1000,
        samples=tuple(Sample(seconds=seconds, waits={"dp": seconds / 2}) for seconds in samples),
        axes=(AxisMeasurement(axis="dp", ranks=4, hosts=2, latency=1e-3, rate=1e7),),
        predicted=StepTime(computation=1.0, bubble=0.5, communication={"dp": 0.25}),
    )  # fmt: skip


def record(*rows: ScalingRow, task: int = 8) -> ScalingRecord:
    return ScalingRecord(task={"rows": task}, peak_flops=1e12, machines=(machine(),), rows=rows)


def test_a_file_gives_back_what_was_written(tmp_path: Path) -> None:
    told = record(row(samples=(1.0, 2.0)), replace(row(nodes=4), predicted=None, refused="no such grid."))
    write_record(told, tmp_path / "new" / "scaling.json")
    assert read_record(tmp_path / "new" / "scaling.json") == told
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["scaling.json"]


def test_a_write_that_fails_leaves_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "scaling.json"
    write_record(record(row()), path)
    monkeypatch.setattr(json, "dumps", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_record(record(), path)
    monkeypatch.undo()
    assert len(read_record(path).rows) == 1


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ValueError, match=r"other\.json is no file of this benchmark"):
        read_record(tmp_path / "other.json")


def test_a_row_takes_the_place_of_its_own_key_only() -> None:
    told = record(row(), row(nodes=4)).with_row(row(samples=(3.0,)))
    assert [each.seconds for each in told.rows] == [3.0, None]
    assert len(told.with_row(row(mode="weak")).rows) == 3
    assert told.row(row(replace(DP4, stage=0)).key) is None


def test_figures_are_medians_of_rounds() -> None:
    measured = row(samples=(1.0, 9.0, 2.0))
    assert (measured.seconds, measured.waits, measured.world) == (2.0, {"dp": 1.0}, 4)
    told = replace(record(), machines=(machine(1.0), machine(5.0), machine(3.0), machine(7.0, nodes=4)))
    middle = told.machine((2, 2))
    assert middle is not None and middle.computation.forward == 3.0 and middle.links == machine().links
    assert told.machine((8, 2)) is None and told.keys == ((2, 2), (4, 2))


def test_files_of_one_task_are_merged() -> None:
    two, four = record(row(samples=(1.0,))), record(row(nodes=4, samples=(3.0,)), row(samples=(1.0, 2.0)))
    both = merged([two, four])
    assert [(each.nodes, len(each.samples)) for each in both.rows] == [(2, 2), (4, 1)]
    assert len(both.machines) == 1
    with pytest.raises(ValueError, match="cannot be merged"):
        merged([two, record(task=9)])
