"""What docs/pipeline.md says of schedules is what the code gives; ``pytest --write-figures`` puts it there."""

from collections.abc import Callable

import pytest

from benchmarks.harness.figures import ROOT, record_text
from engine.errors import ScheduleError
from engine.launch.cli import main
from engine.parallel.pipeline.report.svg import svg
from engine.parallel.pipeline.report.text import Panel, cost_of_slices, number, summarize
from engine.parallel.pipeline.schedule.actions import Schedule
from engine.parallel.pipeline.schedule.kinds import SCHEDULE_KINDS, make_schedule
from engine.parallel.pipeline.schedule.simulate import Cost, simulate
from tests.tables import Table

SIZES = ((2, 4), (4, 4), (4, 8), (4, 16), (8, 8), (8, 16), (8, 32), (8, 64))
"""Pipeline ranks and microbatches."""
PAGE = ROOT / "docs" / "pipeline.md"
PICTURE = ROOT / "benchmarks" / "results" / "schedules.svg"
MORE_STAGES = {"interleaved": (4,), "looped-bfs": (4,), "zb-h1": (2, 4)}
SLICE = Cost()
"""A forward 1, a backward 2, or 1 for the input and 1 for the weight."""


def schedule_of(kind: str, ranks: int, microbatches: int) -> Schedule:
    return make_schedule(kind, ranks, microbatches, SCHEDULE_KINDS[kind].virtual_stages)


def cell(kind: str, ranks: int, microbatches: int, stages: int) -> str:
    """Idle share, and the most slices that a rank holds."""
    try:
        schedule = make_schedule(kind, ranks, microbatches, stages)
    except ScheduleError:
        return ""
    figures = summarize(simulate(schedule, cost_of_slices(schedule, SLICE)))
    return f"{figures.bubble:.1%}, {number(figures.peak)}"


def table() -> str:
    found = Table("schedules", "idle, slices held")
    for kind in SCHEDULE_KINDS.values():
        for stages in (kind.virtual_stages, *MORE_STAGES.get(kind.name, ())):
            row = f"`{kind.name}`" + (f", {stages} stages a rank" if stages > 1 else "")
            for ranks, microbatches in SIZES:
                found.cells[row, f"p {ranks}, m {microbatches}"] = cell(kind.name, ranks, microbatches, stages)
    return found.render()


def explained() -> str:
    rows = [f"| `{kind.name}` | {kind.description} | {kind.paper} |" for kind in SCHEDULE_KINDS.values()]
    return "\n".join(["| schedule | what it does | paper |", "|---|---|---|", *rows])


def picture() -> str:
    """Two schedules on one scale."""
    schedules = [schedule_of(kind, 4, 8) for kind in ("1f1b", "zb-v")]
    return svg([Panel(simulate(schedule, cost_of_slices(schedule, SLICE))) for schedule in schedules])


@pytest.mark.parametrize(("name", "text"), [("schedules", table), ("schedule-kinds", explained)])
def test_tables_are_those_of_the_code(request: pytest.FixtureRequest, name: str, text: Callable[[], str]) -> None:
    if request.config.getoption("--write-figures"):
        record_text(name, text())
    assert f"<!-- {name}:begin -->\n{text()}\n<!-- {name}:end -->" in PAGE.read_text(encoding="utf-8")


def test_the_comparison_is_what_the_command_prints(
    request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    command = "trine schedule --compare --ranks 4 --microbatches 8"
    assert main(command.split()[1:]) == 0
    text = f"```\n$ {command}\n{capsys.readouterr().out}```"
    if request.config.getoption("--write-figures"):
        record_text("schedule-compare", text)
    section = f"<!-- schedule-compare:begin -->\n{text}\n<!-- schedule-compare:end -->"
    assert section in PAGE.read_text(encoding="utf-8")


def test_the_picture_is_small_and_shown(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--write-figures"):
        PICTURE.write_text(picture(), encoding="utf-8")
    assert PICTURE.read_text(encoding="utf-8") == picture() and len(picture()) < 50_000
    assert f"](../{PICTURE.relative_to(ROOT).as_posix()})" in PAGE.read_text(encoding="utf-8")
