"""``trine sweep``: halving on two data ranks, an end after the same step on all ranks, kills, and promotion."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from signal import SIGKILL
from time import monotonic, sleep
from typing import Any

import pytest

from engine.launch.cli import main
from engine.sweep.settings import read_sweep
from engine.sweep.study import SweepStudy, TrialRow
from tests.launch import swept
from tests.launches import Launch

RunRanks = Callable[..., list[Any]]
FEW = {"optimizer.params.lr": {"choices": [1e-1, 3e-2, 1e-2]}}
SCALARS = 9
"""fp64 numbers of the control all-reduce, as without a sweep."""


def rows_of(folder: Path) -> list[TrialRow]:
    return SweepStudy(read_sweep(folder / "sweep.json")).rows()


@pytest.fixture(scope="module")
def halved(tmp_path_factory: pytest.TempPathFactory, run_ranks: RunRanks) -> tuple[Path, list[Any]]:
    """Folder of a sweep on two data ranks, and what each has printed."""
    folder = tmp_path_factory.mktemp("halved")
    return folder, run_ranks(swept.run, 2, [swept.words(swept.write(folder))])


def test_halving_finds_the_winner_of_the_grid_in_two_fifths_of_its_steps(
    tmp_path: Path, halved: tuple[Path, list[Any]]
) -> None:
    assert main(swept.words(swept.write(tmp_path, pruner="nop"))) == 0
    grid, rows = rows_of(tmp_path), rows_of(halved[0])
    assert sum(row.updates for row in grid) == len(swept.RATES) * swept.STEPS
    assert sum(row.updates for row in rows) <= 0.4 * len(swept.RATES) * swept.STEPS
    whole, pruned = (min((row for row in each if row.state == "complete"), key=lambda row: row.value or 0.0)
                     for each in (grid, rows))  # fmt: skip
    assert (whole.number, whole.values) == (pruned.number, pruned.values) and whole.value
    assert pruned.value == pytest.approx(whole.value, rel=1e-5)
    assert f"best       trial {whole.number}: " in halved[1][0][0] and halved[1][1] == [""]


def test_all_ranks_end_after_the_same_step_without_another_message(halved: tuple[Path, list[Any]]) -> None:
    first, second = (swept.lines(halved[0], rank) for rank in (0, 1))
    assert [line["updates"] for line in first] == [line["updates"] for line in second]
    assert [line["updates"] for line in first] == [row.updates for row in rows_of(halved[0])]
    assert 4 in {line["updates"] for line in first}, "reported after 3 updates, and ended by the next one"
    assert all(line["control"] == [line["updates"], line["updates"] * 8 * SCALARS] for line in first)


def test_killed_and_started_again_it_goes_on(tmp_path: Path, halved: tuple[Path, list[Any]]) -> None:
    settings = swept.write(tmp_path)
    words = swept.words(settings, pause=0.03)
    with Launch(swept.run_until_killed, 2, words) as job:
        wait_for(lambda: list(tmp_path.glob("journal.trials/0/checkpoints/step-00000004")))
        job.send(SIGKILL)
        assert {rank.code for rank in job.end()} == {-SIGKILL}
    assert [row.state for row in rows_of(tmp_path)].count("running") == 1
    with Launch(swept.run_until_killed, 2, swept.words(settings)) as job:
        assert [rank.said for rank in job.end()] == [["done"], ["done"]]
    first = swept.lines(tmp_path, 0)[0]
    assert first["updates"] == swept.STEPS and first["begun"] >= 4, "from its checkpoint"
    assert rows_of(tmp_path) == rows_of(halved[0]), "as if nobody had killed it"


def wait_for(found: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = monotonic() + seconds
    while not found():
        assert monotonic() < deadline
        sleep(0.02)


def test_promoted_trials_go_on_from_their_checkpoints_to_the_same_losses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = swept.write(tmp_path, space=FEW)
    assert main(swept.words(settings, steps=8)) == 0
    assert main(swept.words(settings, "--resume-pruned", "2", steps=8)) == 0
    rows = rows_of(tmp_path)
    pruned = [row for row in rows if row.state == "pruned"]
    assert len(pruned) == 2 and len(rows) == 5 and {row.state for row in rows[3:]} == {"complete"}
    assert [line["begun"] for line in swept.lines(tmp_path, 0)] == [0, 0, 0, 4, 4]
    (tmp_path / "plain").mkdir()
    other = swept.write(tmp_path / "plain", space=FEW, pruner="nop")
    assert main(swept.words(other, steps=8)) == 0
    whole = {row.values["optimizer.params.lr"]: row.value for row in rows_of(tmp_path / "plain")}
    assert {row.values["optimizer.params.lr"]: row.value for row in rows if row.state == "complete"} == whole
    printed = capsys.readouterr().out
    assert "updates    16 in 3 trials" in printed and "updates    24 in 5 trials" in printed


@pytest.mark.parametrize(
    ("changes", "options", "sentence"),
    [
        ({"metric": None}, (), "metric null is for a loop that calls trial.report; give loss, or metrics/NAME."),
        ({"metric": "metrics/top1"}, (), "metric metrics/top1 never comes, because monitor.metrics of the"),
        ({"metric": "mfu"}, (), "metric mfu has no value in the step report of update 1; set the sweep's metric"),
        ({"report_every": 50}, (), "has ended after 2 updates without a report, and report_every is 50; lower it"),
        ({}, ("--resume-pruned", "-1"), "promote -1 is not a number of trials; give a whole number of at least 0."),
        ({}, ("--nproc-per-node", "0"), "--nproc-per-node 0 is not a number of processes; give at least 1."),
        ({"space": {"optimizer.params.lr": {"choices": ["fast"]}}}, (), 'optimizer.params.lr: "fast" is text; give a'),
    ],
    ids=["null", "unnamed", "not here", "too rare", "promote", "ranks", "value"],
)  # fmt: skip
def test_a_mistake_is_one_sentence(
    changes: dict[str, Any], options: tuple[str, ...], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(swept.words(swept.write(tmp_path, **changes), *options, steps=2)) == 1
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert sentence in said and said.endswith(".")


@pytest.mark.parametrize(
    ("script", "sentence"),
    [
        ("print(1)", "train.py ends without a call of engine.initialize that trains; give the script"),
        ("import engine; config = {'train_batch_size': 1}; import torch\n"
         "for _ in range(2): eng = engine.initialize(torch.nn.Linear(2, 2), config)",
         "trial 0 of the sweep initializes a second engine with an optimizer, but a trial has one"),
    ],
    ids=["none", "two"],
)  # fmt: skip
def test_a_script_that_cannot_be_swept_is_one_sentence(
    script: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = swept.write(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(script)
    assert main(swept.words(settings, steps=2)) == 1
    assert sentence in capsys.readouterr().err
    assert rows_of(tmp_path)[0].state == "fail"


def test_a_script_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = swept.write(tmp_path)
    assert main(["sweep", str(settings), "--", "absent.py"]) == 1
    assert capsys.readouterr().err == (
        "SCRIPT absent.py does not exist; give the script that calls engine.initialize.\n"
    )
    assert not (tmp_path / "journal").exists()


def test_ranks_are_started_by_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, called = swept.write(tmp_path), list[list[str]]()

    def replaced(program: str, command: list[str]) -> None:
        called.append(command)
        sys.exit(0)

    monkeypatch.setattr("os.execv", replaced)
    with pytest.raises(SystemExit):
        main(swept.words(settings, "--nproc_per_node", "2", "--resume-pruned", "1"))
    launcher, command = called[0][:5], called[0][5:]
    assert launcher[1:] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    assert command[:4] == ["-m", "engine.launch.cli", "sweep", "--resume-pruned=1"]
    assert command[4:] == swept.words(settings)[1:]
    monkeypatch.setenv("RANK", "0")
    for name, value in (("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"), ("MASTER_ADDR", "x"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    assert main(swept.words(settings, "--nproc_per_node", "2")) == 1


@pytest.mark.long
def test_torchrun_s_ranks_share_one_sweep(tmp_path: Path) -> None:
    import subprocess

    settings = swept.write(tmp_path, space=FEW)
    command = [sys.executable, "-m", "engine.launch.cli", *swept.words(settings, "--nproc_per_node", "2", steps=5)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("best       trial") == 1 and len(swept.lines(tmp_path, 1)) == 3
    assert json.loads((tmp_path / "sweep.json").read_text())["grid"]
