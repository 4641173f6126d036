"""The folder of a run: who may go on in it, what is cut from its log, what --fresh keeps."""

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.data.corpus import Corpus
from engine.errors import EngineError
from engine.launch.reference_run import ProgressLine
from engine.launch.run_folder import go_on, open_run
from engine.models.decoder import DecoderConfig
from engine.reporting.step_report import StepReport

TEXT = Corpus("mine", np.zeros(9, dtype=np.uint8), 1, "0123456789abcdef")
OTHER = Corpus("mine", np.zeros(9, dtype=np.uint8), 1, "f0123456789abcde")
SHAPE = DecoderConfig(layers=2, width=32)


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    return {"seed": 1, "checkpoint": {"folder": str(folder / "checkpoints")}, **changes}


def options(folder: Path, fresh: bool = False, steps: int = 9) -> Namespace:
    return Namespace(out=folder, fresh=fresh, steps=steps)


def begin(folder: Path, config: dict[str, Any], fresh: bool = False) -> None:
    """A start that ends at once."""
    open_run(options(folder, fresh), config, TEXT, SHAPE).close()


def test_a_run_goes_on_and_records_its_last_start(tmp_path: Path) -> None:
    out = tmp_path / "a/run"
    for rate in (1, 2):
        begin(out, settings(out, rate=rate))
    record = json.loads((out / "run.json").read_text())
    assert record["config"]["rate"] == 2 and record["model"]["width"] == 32 and record["corpus"]["bytes"] == 9
    assert [path.name for path in out.iterdir()] == ["run.json"] and [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"corpus": OTHER}, "text digest 0123456789abcdef, but this start has text digest f0123456789abcde"),
        ({"shape": DecoderConfig(layers=3, width=32)}, "layers 2, but this start has layers 3"),
        ({"seed": 2}, "seed 1, but this start has seed 2"),
    ],
)
def test_another_run_is_refused_in_one_sentence(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    out = tmp_path / "run"
    begin(out, settings(out))
    before = (out / "run.json").read_bytes()
    config = settings(out, seed=changes.get("seed", 1))
    with pytest.raises(EngineError, match=said) as raised:
        open_run(options(out), config, changes.get("corpus", TEXT), changes.get("shape", SHAPE))
    assert f"pass --fresh to rename the folder to {tmp_path / 'run.1'}" in str(raised.value)
    assert (out / "run.json").read_bytes() == before


def test_the_record_does_not_follow_a_link(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    out = tmp_path / "run"
    out.mkdir()
    for name in ("run.json.tmp", "run.json"):
        begin(out, settings(out))
        (out / name).unlink(missing_ok=True)
        (out / "run.json.tmp").symlink_to(tmp_path / "mine")
        begin(out, settings(out))
    assert (tmp_path / "mine").read_text() == "mine" and json.loads((out / "run.json").read_text())["config"][
        "seed"
    ] == 1
    assert [path.name for path in out.iterdir()] == ["run.json"]


NESTED, DIGITS = "[" * 100_000, f'{{"corpus": {"9" * 5000}}}'


@pytest.mark.parametrize("content", ["", "{}", "[]", "{", NESTED, DIGITS, '{"corpus": 1, "config": 1}'])
def test_a_record_that_cannot_be_read_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(EngineError, match=r"run\.json cannot be read"):
        open_run(options(tmp_path), settings(tmp_path), TEXT, SHAPE)


def test_fresh_keeps_every_run_under_a_number(tmp_path: Path) -> None:
    out = tmp_path / "run"
    for seed in (1, 2, 3):
        begin(out, settings(out, seed=seed), fresh=True)
    kept = {name: json.loads((tmp_path / name / "run.json").read_text()) for name in ("run", "run.1", "run.2")}
    assert {name: record["config"]["seed"] for name, record in kept.items()} == {"run": 3, "run.1": 1, "run.2": 2}


def test_fresh_is_refused_where_checkpoints_would_stay(tmp_path: Path) -> None:
    out, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    (elsewhere / "step-00000003").mkdir(parents=True)
    config = settings(out, checkpoint={"folder": str(elsewhere)})
    begin(out, config, fresh=True)
    with pytest.raises(EngineError, match=r"would continue from checkpoints in checkpoint\.folder .*elsewhere"):
        open_run(options(out, fresh=True), config, TEXT, SHAPE)
    assert not (tmp_path / "run.1").exists()


def test_the_folder_of_this_process_keeps_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    begin(Path(), settings(tmp_path))
    with pytest.raises(EngineError, match=f"pass --fresh to rename the folder to {tmp_path}.1 and"):
        begin(Path(), settings(tmp_path, seed=2))
    with pytest.raises(EngineError, match=r"--fresh renames \., but this process has been started in it; "):
        begin(Path(), settings(tmp_path, seed=2), fresh=True)


@pytest.mark.parametrize("fresh", [False, True])
def test_a_second_run_in_the_same_folder_is_refused(tmp_path: Path, fresh: bool) -> None:
    out = tmp_path / "run"
    held = open_run(options(out), settings(out), TEXT, SHAPE)
    with pytest.raises(EngineError, match=f"another process trains in {out}"):
        begin(out, settings(out), fresh)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    held.close()
    begin(out, settings(out), fresh)


def rows(*steps: int) -> str:
    return "".join(json.dumps({"step": step, "loss": 1.0}) + "\n" for step in steps)


@pytest.mark.parametrize(
    ("given", "made", "left", "cut"),
    [
        (rows(1, 5, 10, 15), 10, rows(1, 5, 10), 1),
        (rows(1, 5, 10), 10, rows(1, 5, 10), 0),
        (rows(1, 5), 0, "", 2),
        (rows(1, 5) + '{"step": 6, "lo', 10, rows(1, 5), 1),
        (rows(1, 5) + '{"step": 6}', 10, rows(1, 5), 1),  # whole but for its end: the next line would follow in it
        ("", 3, "", 0),
    ],
)
def test_the_log_is_cut_back_to_the_checkpoint(tmp_path: Path, given: str, made: int, left: str, cut: int) -> None:
    log = tmp_path / "metrics.jsonl"
    log.write_text(given)
    with open(log, "a", encoding="utf-8") as writer:  # as the engine's: open since before the checkpoint was loaded
        said = go_on(options(tmp_path, steps=99), made)
        writer.write(rows(made + 1))
    assert log.read_text() == left + rows(made + 1)
    assert said == ([f"{cut} lines after step {made} are removed from {log}: these steps are repeated"] if cut else [])


def test_a_finished_run_is_told(tmp_path: Path) -> None:
    assert go_on(options(tmp_path, steps=8), 7) == []
    for made in (8, 9):
        (said,) = go_on(options(tmp_path, steps=8), made)
        assert said.startswith("nothing to train: ") and f"has made {made} steps, and --steps is 8" in said


def test_progress_counts_the_steps_before_this_start(capsys: pytest.CaptureFixture[str]) -> None:
    line = ProgressLine(steps=30, every=10)
    for step in range(18, 31):
        skipped = step == 23
        line.show(
            StepReport(step, 2.0, 1.0, 1.0, 1e-3, 8, 0.1, None, None, 1, 0, skipped, "x" if skipped else None, 1.0)
        )
    shown = capsys.readouterr().out.splitlines()
    assert [text.split()[1] for text in shown] == ["18/30", "20/30", "23/30", "30/30"]
    assert shown[0].endswith("eta ?") and shown[-1].split()[2] == "100%" and shown[-1].endswith("eta 0s")
