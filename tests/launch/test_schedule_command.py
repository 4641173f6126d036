"""``trine schedule``: pictures, figures, the comparison, files, and mistakes in one sentence."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.harness.figures import ROOT, read, record_text
from engine.errors import ScheduleError
from engine.launch.cli import main
from engine.parallel.pipeline.report.svg import svg
from engine.parallel.pipeline.report.text import Panel, cost_of_slices, number, summarize
from engine.parallel.pipeline.schedule.actions import Schedule
from engine.parallel.pipeline.schedule.kinds import SCHEDULE_KINDS, make_schedule
from engine.parallel.pipeline.schedule.one_f_one_b import one_f_one_b
from engine.parallel.pipeline.schedule.schedule_file import parse_schedule
from engine.parallel.pipeline.schedule.simulate import Cost, simulate
from tests.tables import Table

V_SHAPE = "0F0 3F0 3I0 3W0 0I0 0W0\n1F0 2F0 2I0 1I0 2W0 1W0\n"


@pytest.fixture
def v_shape(tmp_path: Path) -> Path:
    """Two ranks with two stages each, as a file."""
    path = tmp_path / "v.txt"
    path.write_text(V_SHAPE)
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    status = main(["schedule", *map(str, arguments)])
    found = capsys.readouterr()
    assert status == 0, found.err
    return found.out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    assert main(["schedule", *map(str, arguments)]) == 1
    found = capsys.readouterr()
    assert found.out == ""
    return found.err


def test_picture_and_figures(capsys: pytest.CaptureFixture[str]) -> None:
    text = """\
1f1b
rank 0 |F0 F1  .  . B0 B0 F2 B1 B1  . B2 B2
rank 1 | . F0 B0 B0 F1 B1 B1 F2 B2 B2  .  .
stages                 2: 0 1, by rank
idle share (bubble)    25.0%
time of the step       12, if the forward of a slice takes 1 and its backward 2 (split: 1 + 1)
peak of activations    2 1 slices, by rank
messages sent          3 3, by rank
"""
    assert run(capsys, "1f1b", "--ranks", "2", "--microbatches", "3", "--width", "80") == text


def test_several_stages_on_a_rank_count_as_parts_of_a_slice(capsys: pytest.CaptureFixture[str], v_shape: Path) -> None:
    text = f"""\
{v_shape}
rank 0 |0F0   .   . 3F0 3I0 3W0   . 0I0 0W0
rank 1 |  . 1F0 2F0   .   . 2I0 1I0 2W0 1W0
stages                 4: 0+3 1+2, by rank
idle share (bubble)    33.3%
time of the step       4.5, if the forward of a slice takes 1 and its backward 2 (split: 1 + 1)
peak of activations    1 1 slices, by rank
messages sent          2 2, by rank
"""
    assert run(capsys, v_shape, "--width", "80") == text


def test_without_words_it_is_1f1b_on_four_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys) == run(capsys, "1f1b", "--ranks", "4", "--microbatches", "8")


@pytest.mark.parametrize(("words", "times"), [
    (["--backward", "3"], "1 and its backward 3 (split: 1.5 + 1.5)"),
    (["--input", "1.5"], "1 and its backward 2.5 (split: 1.5 + 1)"),
    (["--weight", "0.5", "--backward", "2"], "1 and its backward 2 (split: 1 + 0.5)"),
    (["--forward", "2", "--transfer", "0.25"], "2 and its backward 2 (split: 1 + 1), a transfer 0.25"),
])  # fmt: skip
def test_times(capsys: pytest.CaptureFixture[str], words: list[str], times: str) -> None:
    assert f"if the forward of a slice takes {times}\n" in run(capsys, *words)


def test_times_change_the_picture(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--ranks", "2", "--microbatches", "2", "--width", "80", "--backward", "1", "--transfer", "1")
    assert run(capsys, *words).splitlines()[1:3] == [
        "rank 0 |F0 F1  .  .  . B0  . B1",
        "rank 1 | .  . F0 B0 F1 B1  .  .",
    ]


def test_tokens_make_a_file_that_is_read_again(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = run(capsys, "--ranks", "3", "--microbatches", "4", "--tokens")
    assert parse_schedule(text, "again").per_rank == one_f_one_b(3, 4).per_rank
    (tmp_path / "a.csv").write_text(text)
    pictures = run(capsys, tmp_path / "a.csv"), run(capsys, "--ranks", "3", "--microbatches", "4")
    assert pictures[0].splitlines()[1:] == pictures[1].splitlines()[1:]


def test_a_configuration_gives_kind_and_sizes_and_words_win(capsys: pytest.CaptureFixture[str]) -> None:
    config = ROOT / "configs" / "tp2_pp2_zero1.json"
    assert run(capsys, "--config", config) == run(capsys, "1f1b", "--ranks", "2", "--microbatches", "4")
    assert run(capsys, "gpipe", "--config", config, "--ranks", "3") == run(
        capsys, "gpipe", "--ranks", "3", "--microbatches", "4"
    )


def test_a_configuration_that_leaves_sizes_open_needs_the_world(capsys: pytest.CaptureFixture[str]) -> None:
    config = ROOT / "configs" / "dp_zero1.json"
    assert "gradient_accumulation_steps" in refused(capsys, "--config", config)
    assert run(capsys, "--config", config, "--world", "4").startswith("1f1b\nrank 0 |F0 B0 B0\n")
    assert run(capsys, "--config", config, "--microbatches", "3").startswith("1f1b\nrank 0 |F0 B0 B0 F1")


def test_svg_and_trace_are_written(capsys: pytest.CaptureFixture[str], tmp_path: Path, v_shape: Path) -> None:
    run(capsys, v_shape, "--svg", tmp_path / "a.svg", "--trace", tmp_path / "a.json")
    assert (ElementTree.parse(tmp_path / "a.svg").getroot().get("aria-label") or "").endswith("at most 1 slice held")
    slices = [event for event in json.loads((tmp_path / "a.json").read_text())["traceEvents"] if event["ph"] == "X"]
    assert sum(event["dur"] for event in slices) == 12 * 500  # half a slice each, 1000 us


def comparison(text: str) -> dict[str, list[str]]:
    """Rows of the table by kind, in their order."""
    rows = [line.split() for line in text.splitlines()]
    return {row[0]: row[1:] for row in rows if row[0] in SCHEDULE_KINDS and len(row) == 7}


def test_comparison_lists_all_kinds_the_least_idle_first(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = run(capsys, "--compare", "--ranks", "4", "--microbatches", "8", "--svg", tmp_path / "all.svg")
    rows = comparison(text)
    assert set(rows) == set(SCHEDULE_KINDS) and "left out" not in text
    assert text.startswith("kind         stages   idle  time  held  messages  backward\n")
    assert rows["1f1b"] == ["4", "27.3%", "33", "4", "48", "whole"]
    assert rows["gpipe"] == ["4", "27.3%", "33", "8", "48", "whole"]
    assert rows["interleaved"][:3] == ["8", "15.8%", "28.5"] and rows["zb-v"][0] == "8"
    assert [kind for kind, row in rows.items() if row[-1] == "split"] == ["zb-v", "dualpipe-v", "zb-h1"]
    idle = [float(row[1].rstrip("%")) for row in rows.values()]
    assert idle == sorted(idle) and list(rows)[-2:] == ["1f1b", "gpipe"]  # equally idle, but gpipe holds more
    titles = (ElementTree.parse(tmp_path / "all.svg").getroot().get("aria-label") or "").split("; ")
    assert [title.split(":")[0] for title in titles] == list(rows)


def test_comparison_says_why_a_kind_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "--compare", "--ranks", "4", "--microbatches", "4")
    assert set(comparison(text)) == set(SCHEDULE_KINDS) - {"dualpipe-v"}
    assert text.splitlines()[-1].startswith("dualpipe-v is left out: schedule dualpipe-v with 4 microbatches")


def test_comparison_with_other_numbers_of_stages(capsys: pytest.CaptureFixture[str]) -> None:
    stages = {kind: row[0] for kind, row in comparison(run(capsys, "--compare", "--virtual-stages", "4")).items()}
    assert stages["interleaved"] == stages["looped-bfs"] == "16"
    assert stages["1f1b"] == "4" and stages["zb-v"] == "8"  # theirs are fixed


def test_a_kind_has_its_usual_stages(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "interleaved") == run(capsys, "interleaved", "--virtual-stages", "2")
    assert "stages                 8: 0+7 1+6 2+5 3+4, by rank" in run(capsys, "zb-v")


@pytest.mark.parametrize(("words", "sentence"), [
    (["--compare", "gpipe"], "--compare prints the figures of all kinds; leave out gpipe, or --compare."),
    (["--compare", "--tokens"], "--compare prints the figures of all kinds; leave out --tokens, or --compare."),
    (["no.txt"], "schedule no.txt: No such file or directory; name the path of a file of actions."),
    (["--svg", "/no/x.svg", "--tokens", "--ranks", "0"],
     "schedule 1f1b over 0 stages and 8 microbatches is empty; use at least one of each."),
    (["--forward", "0"], "--forward 0 is not a duration; give a number from 1e-99 to 1e+99."),
    (["--forward", "1e308"], "--forward 1e+308 is not a duration; give a number from 1e-99 to 1e+99."),
    (["--weight", "nan"], "--weight nan is not a duration; give 0, or a number from 1e-99 to 1e+99."),
    (["--transfer", "-1"], "--transfer -1 is not a duration; give 0, or a number from 1e-99 to 1e+99."),
    (["--compare", "--ranks", "0"], "is empty; use at least one of each"),
    (["--world", "4"], "--world completes the sizes of a configuration; give --config too, or leave --world out."),
    (["gpipe", "--virtual-stages", "2"], "it holds one stage on each rank; set virtual_stages to 1."),
    (["zb-h9"], "schedule 'zb-h9' does not exist; choose "),
    (["--config", "no.json"], "no.json: this file does not exist;"),
])  # fmt: skip
def test_mistakes_are_sentences(
    capsys: pytest.CaptureFixture[str], words: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert sentence in refused(capsys, *words)


def test_a_file_that_cannot_be_written_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "no" / "x.svg"
    assert main(["schedule", "--svg", str(path)]) == 1
    expected = f"{path} cannot be written (No such file or directory); name a file in an existing folder.\n"
    assert capsys.readouterr().err == expected


def test_sizes_beside_a_file_have_to_be_its_own(capsys: pytest.CaptureFixture[str], v_shape: Path) -> None:
    run(capsys, v_shape, "--ranks", "2", "--microbatches", "1", "--virtual-stages", "2")
    sentence = "has 2 virtual stages, not 1: a file fixes its sizes; leave --virtual-stages out."
    assert refused(capsys, v_shape, "--virtual-stages", "1") == f"schedule {v_shape} {sentence}\n"


def test_files_that_are_no_schedules(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xff\xfe")
    assert "is not a text file" in refused(capsys, path)
    path.write_text("0F0 0X0")
    assert "line 1: '0X0' is not an action" in refused(capsys, path)
    path.write_text("0F0 0B0\n1B0 1F0")
    assert "is stuck" in refused(capsys, path)
    path.write_text("0F0 0F1 0B0 0B1\n1F1 1F0 1B0 1B1")  # could be done, but not with messages in order
    assert "received in the order of the sends" in refused(capsys, path)


@pytest.mark.parametrize("words", [["1f1b"], ["--compare"], ["--config", "configs/tp2_pp2_zero1.json"]])
def test_no_torch_and_no_numpy(words: list[str], tmp_path: Path) -> None:
    files = ["--svg", str(tmp_path / "a.svg"), "--trace", str(tmp_path / "a.json")]
    code = f"""
import sys
from engine.launch.cli import main
assert main({["schedule", *words, *files]!r}) == 0
sys.exit(str([name for name in ("torch", "numpy") if name in sys.modules]))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stderr == "[]\n"
    assert (tmp_path / "a.svg").exists() and (tmp_path / "a.json").exists()


def test_the_order_of_a_kind_follows_the_times(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sizes = ("--ranks", "4", "--microbatches", "32", "--virtual-stages", "4")
    assert "time of the step       114," in run(capsys, "zb-h1", *sizes, "--transfer", "0.2")
    parallel = {
        "pipeline": 4,
        "schedule": "zb-h1",
        "virtual_stages": 4,
        "schedule_costs": {"transfer": 0.2, "input": 2},
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 6,
                                "parallel": parallel}))  # fmt: skip
    shown = run(capsys, "--config", path, "--world", "4")
    assert "takes 1 and its backward 3 (split: 2 + 1), a transfer 0.2" in shown
    assert shown == run(capsys, "zb-h1", "--ranks", "4", "--microbatches", "6", "--virtual-stages", "4", "--input", "2",
                        "--transfer", "0.2")  # fmt: skip
    assert "a transfer" not in run(capsys, "--config", path, "--world", "4", "--transfer", "0")


def test_what_a_file_of_torch_holds_beside_actions_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "torch.csv"
    path.write_text("0F0,(0F1;0B0)OVERLAP_F_B,,0B1,0REDUCE_GRAD\n")
    assert run(capsys, path).splitlines()[-2:] == [
        f"note: schedule {path}: the REDUCE_GRAD of the file are checked, but made where the run needs them",
        f"note: schedule {path}: the overlapped pairs of the file run one after the other",
    ]


SIZES = ((2, 4), (4, 4), (4, 8), (4, 16), (8, 8), (8, 16), (8, 32), (8, 64))
"""Pipeline ranks and microbatches."""
PAGE = ROOT / "docs" / "guides" / "pipeline.md"
PICTURE = ROOT / "docs" / "drawings" / "two_schedules.svg"
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
    assert read(name)["text"] == text()


def test_the_comparison_is_what_the_command_prints(
    request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    command = "trine schedule --compare --ranks 4 --microbatches 8"
    assert main(command.split()[1:]) == 0
    text = f"```\n$ {command}\n{capsys.readouterr().out}```"
    if request.config.getoption("--write-figures"):
        record_text("schedule-compare", text)
    assert read("schedule-compare")["text"] == text


def test_the_picture_is_small_and_shown(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--write-figures"):
        PICTURE.write_text(picture(), encoding="utf-8")
    assert PICTURE.read_text(encoding="utf-8") == picture() and len(picture()) < 50_000
    assert f"](../{PICTURE.relative_to(ROOT / 'docs').as_posix()})" in PAGE.read_text(encoding="utf-8")
