"""``trine report``: one page that needs nothing else, whose figures are those that the ranks have recorded."""

import json
import re
import signal
from collections.abc import Mapping
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import engine
from engine.errors import ConfigError
from engine.launch.cli import main
from engine.launch.run_report.charts import Curve, chart, nice_ticks
from engine.launch.run_report.recorded_run import perfetto, read_run, read_traces
from engine.models.decoder import loss_sum
from engine.parallel.comm.threads import run_thread_ranks
from engine.parallel.comm.world import World
from tests import models
from tests.launches import Launch, Line
from tests.resumed_runs import own_rows

SECTIONS = ["training", "waits", "bytes", "memory", "schedule", "plan", "configuration", "environment", "warnings"]
CONFIG: dict[str, Any] = {
    "train_batch_size": 4, "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
}  # fmt: skip
BATCHES = models.batches_for("decoder", 4, 3)


class Outline(HTMLParser):
    """What a page holds; raises if a tag is not closed in order."""

    VOID = ("meta", "br", "hr", "img")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.rows: dict[str, list[list[str]]] = {}
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if tag == "section":
            self.ids.append(str(found["id"]))
            self.rows[self.ids[-1]] = []
        self.references += [str(found[name]) for name in ("href", "src", "xlink:href", "data") if name in found]
        if tag == "tr":
            self.rows[self.ids[-1]].append([])
        if tag in ("td", "th"):
            self.rows[self.ids[-1]][-1].append("")
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data: str) -> None:
        if {"td", "th"} & set(self.open[-2:]):
            self.rows[self.ids[-1]][-1][-1] += data


def rank(folder: Path, parallel: Mapping[str, int], world: World) -> Any:
    settings = CONFIG | {"parallel": parallel, "monitor": {"report": str(folder), "every": 2}}
    config = engine.load_config(settings, world.size)
    with engine.initialize(models.decoder, config, world=world, loss_fn=loss_sum) as eng:
        reports = [eng.train_batch(own_rows(eng, batch)) for batch in BATCHES]
        return reports[1], eng.plan.rank(eng.grid.rank).traffic


def written(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["report", str(folder)]) == 0
    capsys.readouterr()
    return (folder / "report.html").read_text()


def test_a_page_shows_what_ranks_have_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = run_thread_ranks(2, partial(rank, tmp_path, {"pipeline": 2}))
    page = written(tmp_path, capsys)
    outline = Outline(page)
    assert sorted(outline.ids) == sorted(SECTIONS)
    assert not re.search(r"https?:|url\(|@import|<script|<link", page)
    assert outline.references and all(reference.startswith("#") for reference in outline.references)
    run = read_run(tmp_path)
    assert [row["step"] for row in run.steps] == [1, 2], "the first step, and every second one"
    assert run.steps[1]["loss"] == told[0][0].loss and f"{told[0][0].loss:.4g}" in page
    planned: dict[tuple[str, str], int] = {}
    for _, traffic in told:
        for row in traffic:
            planned[row.axis, row.label] = planned.get((row.axis, row.label), 0) + row.bytes
    assert planned
    shown = {(row[0], row[1]): (row[2], row[3], row[4]) for row in outline.rows["bytes"][1:]}
    assert shown == {key: (f"{count:,}", f"{count:,}", "0") for key, count in planned.items()}
    assert [row[0] for row in outline.rows["memory"]] == ["rank", "0", "1"]
    (line,) = run.timelines().values()
    assert [[str(span.action) for span in row] for row in line.spans] == [
        [str(action) for action in row] for row in run.schedule.per_rank
    ]
    assert outline.rows["schedule"][1][:3] == ["data 0, tensor 0", "20.0%", f"{line.bubble:.1%}"]
    assert page.count("<title>1F0</title>") == 2, "as predicted, and as run"


def test_what_is_missing_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_thread_ranks(1, partial(rank, tmp_path, {}))
    first, steps = tmp_path / "rank-00000.json", tmp_path / "steps.jsonl"
    again = steps.read_text().splitlines()
    steps.write_text("\n".join([*again, again[1], again[0][:40]]))
    told = json.loads(first.read_text())
    first.write_text(json.dumps(told | {"ranks": 2}))
    page = written(tmp_path, capsys)
    Outline(page)
    assert "1 logged steps were repeated" in page
    assert "1 line of steps.jsonl cannot be read" in page
    assert "1 of 2 ranks have no record here: 1." in page
    assert len(read_run(tmp_path).steps) == 2


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (None, "there is no folder"),
        ({}, "has no rank-00000.json, so no run has recorded there"),
        ({"rank-00000.json": "{"}, "rank-00000.json cannot be read (JSONDecodeError"),
        ({"rank-00000.json": "[]"}, "rank-00000.json cannot be read (TypeError"),
        ({"rank-00000.json": '{"format": 99}'}, "format 99, but this version reads format 1"),
        ({"rank-00000.json": '{"format": 1, "ranks": 1, "run": null}'}, "cannot be read (TypeError"),
    ],
    ids=["no folder", "no run", "cut", "a list", "newer", "no facts"],
)
def test_bad_input_is_one_sentence(
    files: dict[str, str] | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    if files is not None:
        folder.mkdir()
        for name, text in files.items():
            (folder / name).write_text(text)
    assert main(["report", str(folder)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_a_damaged_value_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_thread_ranks(1, partial(rank, tmp_path, {}))
    first, steps = tmp_path / "rank-00000.json", tmp_path / "steps.jsonl"
    record, row = json.loads(first.read_text()), json.loads(steps.read_text().splitlines()[0])
    told = record["run"]
    inf = float("inf")
    records = [
        *({"written": 1e300}, {"peak_bytes": inf}, {"waits": {"dp": "x"}}, {"ranks": 0}, {"place": 3}),
        *({"run": told | {"notes": None}}, {"run": told | {"environment": [1]}}),
    ]
    for changed in records:
        first.write_text(json.dumps(record | changed))
        assert main(["report", str(tmp_path)]) == 1
        assert "rank-00000.json cannot be read (" in capsys.readouterr().err
    first.write_text(json.dumps(record))
    for changed in (
        *({"step": "x"}, {"step": inf}, {"loss": float("nan")}, {"loss": 10**400}, {"metrics": [1]}),
        *({"metrics": {"a": "x"}}, {"waits": 5}),
    ):
        steps.write_text(json.dumps(row | changed))
        assert main(["report", str(tmp_path)]) == 1
        assert "steps.jsonl cannot be read (ValueError: line 1 is not a step, " in capsys.readouterr().err
    steps.write_text("[" * 100_000)
    first.write_text(json.dumps(record | {"spans": [], "run": told | {"plan": "/data/\udcff"}}))
    page = written(tmp_path, capsys)
    assert "1 line of steps.jsonl cannot be read" in page and "/data/\\udcff" in page


def test_ticks_span_the_values_and_peaks_are_kept() -> None:
    assert nice_ticks(0, 10) == [0, 5, 10]
    assert nice_ticks(2.0, 2.0)[0] < 2 < nice_ticks(2.0, 2.0)[-1]
    points = [(float(step), 1.0) for step in range(5000)]
    points[3333] = (3333.0, 9.0)
    drawn = chart("loss", [Curve("", points)], lambda value: f"{value:g}")
    heights = [float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", drawn)]
    assert len(heights) < 700 and min(heights) < 30 < 100 < sorted(heights)[1]


@pytest.mark.long
def test_eight_ranks_of_all_axes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_thread_ranks(8, partial(rank, tmp_path, {"data": 2, "tensor": 2, "pipeline": 2}))
    outline = Outline(written(tmp_path, capsys))
    assert sorted(outline.ids) == sorted(SECTIONS)
    assert [row[0] for row in outline.rows["memory"][1:]] == [str(number) for number in range(8)]
    assert len(outline.rows["schedule"]) == 1 + 4, "a pipeline for each of 2 x 2 data and tensor ranks"
    assert {row[0] for row in outline.rows["bytes"][1:]} >= {"dp", "tp", "pp"}
    assert {row[4] for row in outline.rows["bytes"][1:]} == {"0"}, "sent as planned"


def endless(line: Line, settings: Mapping[str, Any]) -> None:
    """A rank that trains until it is killed, and says that its record is there."""
    with engine.initialize(models.decoder, settings, loss_fn=loss_sum) as eng:
        for _ in range(3):
            eng.train_batch(BATCHES[0])
        line("recorded")
        while True:
            eng.train_batch(BATCHES[0])


@pytest.mark.long
def test_a_killed_run_gives_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = CONFIG | {"parallel": {"pipeline": 2}, "monitor": {"report": str(tmp_path), "every": 1}}
    with Launch(endless, 2, settings) as launch:
        launch.hear("recorded")
        launch.send(signal.SIGKILL)
        assert [rank.code for rank in launch.end()] == [-signal.SIGKILL] * 2
    outline = Outline(written(tmp_path, capsys))
    assert sorted(outline.ids) == sorted(SECTIONS)
    assert [row[0] for row in outline.rows["waits"]] == ["rank", "0", "1"]
    assert len(read_run(tmp_path).steps) >= 3


def told_trace(rank: int, host: str, zero: int, actions: list[Any], events: list[Any]) -> dict[str, Any]:
    return {
        "format": 1, "rank": rank, "ranks": 2, "place": {"dp": 0, "tp": 0, "pp": rank}, "host": host, "zero": zero,
        "lost": 0, "steps": [[3, zero - 9000, zero]], "actions": actions, "events": events,
    }  # fmt: skip


def test_traces_of_hosts_are_put_on_one_clock(tmp_path: Path) -> None:
    event = {"kind": "collective", "axis": "tp", "stream": "tp", "label": "row outputs", "bytes": 8, "dtype": "float32",
             "peer": -1, "begun": 600_000, "ended": 900_000}  # fmt: skip
    beside, sent = event | {"begun": 700_000}, event | {"kind": "send", "axis": "pp", "peer": 1, "ended": 0}
    told = [
        told_trace(0, "a", 1_000_000, [["0F0", 500_000, 600_000]], [event, beside, sent]),
        told_trace(1, "b", 7_000_000, [["1F0", 6_700_000, 6_800_000]], []),
    ]
    for number, one in enumerate(told):
        (tmp_path / f"trace-{number:05}.json").write_text(json.dumps(one))
    merged = json.loads(perfetto(read_traces(tmp_path, 2)))["traceEvents"]
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in merged if e["name"] == "thread_name"}
    found = [(e["pid"], tracks[e["pid"], e["tid"]], e["name"], e["ts"], e["dur"]) for e in merged if e["ph"] == "X"]
    assert found == [
        (0, "steps", "step 3", -9.0, 9.0), (0, "actions", "0F0", -500.0, 100.0),
        (0, "tp", "row outputs", -400.0, 300.0), (0, "tp (2)", "row outputs", -300.0, 200.0),
        (0, "pp send", "row outputs", -400.0, 400.0),
        (1, "steps", "step 3", -9.0, 9.0), (1, "actions", "1F0", -300.0, 100.0),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("monitor", "watchdog", "said"),
    [
        ({"profile": "5", "report": "run"}, {}, 'is not a range of steps; give one such as "10:12"'),
        ({"profile": "5:3", "report": "run"}, {}, "is not a range of steps"),
        ({"profile": "3:5"}, {}, "without monitor.report"),
        ({"profile": "3:5", "report": "run"}, {"enabled": False}, "flight recorder"),
    ],
    ids=["a number", "backwards", "no folder", "no recorder"],
)
def test_steps_that_cannot_be_profiled(monitor: dict[str, str], watchdog: dict[str, bool], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        engine.load_config(CONFIG | {"monitor": monitor, "watchdog": watchdog})


def profiled(line: Line, settings: Mapping[str, Any]) -> None:
    """A rank that trains four steps, and says what it has sent to align the clocks and what it sends in a step."""
    with engine.initialize(models.decoder, settings, loss_fn=loss_sum) as eng:
        for _ in range(4):
            eng.train_batch(own_rows(eng, BATCHES[0]))
        labels = {(row.axis, row.label) for row in eng.plan.rank(eng.grid.rank).traffic if row.calls}
        line(({(row.axis, row.label): (row.calls, row.bytes) for row in eng.sent.rows()}, labels))


@pytest.mark.long
def test_a_profile_has_the_tokens_and_labels_of_all_ranks_on_one_clock(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parallel = {"data": 2, "tensor": 2, "pipeline": 2}
    settings = CONFIG | {"parallel": parallel, "monitor": {"report": str(tmp_path), "profile": "2:3"}}
    with Launch(profiled, 8, settings) as launch:
        ended = launch.end(120)
    assert [rank.error for rank in ended] == [""] * 8
    written(tmp_path, capsys)
    slices = [e for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if e["ph"] == "X"]
    run = read_run(tmp_path)
    begins: dict[Any, float] = {}
    for number, rank in enumerate(ended):
        ((sent, labels),) = rank.said
        assert sent["world", "profile clock"] == (1, 2 * 4 * 7 // 8)
        mine = [one for one in slices if one["pid"] == number]
        assert [one["name"] for one in mine if one["cat"] == "steps"] == ["step 2", "step 3"]
        row = [str(action) for action in run.schedule.per_rank[run.ranks[number].place["pp"]]]
        actions = [one for one in mine if one["cat"] == "actions"]
        assert [one["name"] for one in actions] == row * 2
        named = {(one["cat"].split()[0], one["name"]) for one in mine}
        assert not {label for label in labels if label not in named}
        place = run.ranks[number].place
        for order, one in enumerate(actions):
            begins[place["dp"], place["tp"], one["name"], order >= len(row)] = one["ts"]
    for (dp, tp, token, later), begun in begins.items():
        if token.startswith("0F"):
            assert begun < begins[dp, tp, f"1{token[1:]}", later], "a stage begins before the one that it waits for"
