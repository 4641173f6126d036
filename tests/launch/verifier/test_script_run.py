"""``trine verify train.py``: a script is run up to its first use of an engine, and what it gave is compared."""

from pathlib import Path

import pytest
from torch.utils._pytree import tree_leaves

import engine
from engine.build.answered_calls import answered_by
from engine.config import load_config
from engine.launch.cli import main
from engine.launch.verifier.script_run import calls_of_script
from tests.launch.verifier import scripts


def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(text)
    return "train.py"


def test_a_script_is_compared_and_trains_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = written(tmp_path, monkeypatch, scripts.TRAINS)
    assert main(["verify", script, "--", "3"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("rank 0\nmodel      Sequential of train.py, unchanged, 280 parameters\n")
    assert "2 data x 2 tensor x 1 pipeline ranks as threads, ZeRO 1" in said
    assert said.endswith("verdict    trains as one process\n")
    assert not (tmp_path / "trained").exists()


def test_the_rows_of_the_first_use_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (call,) = calls_of_script(Path(written(tmp_path, monkeypatch, scripts.LOOP)), (), load_config)
    assert call.rows is not None and [tensor.shape for tensor in call.rows] == [(8, 8), (8, 8)]


@pytest.mark.parametrize(
    "use",
    [".train_batch(rows[0])", ".eval_batch(rows[0], return_output=True)", "(rows[0])", "(input=rows[0])", "(*rows)"],
)
def test_a_use_may_take_one_tensor_options_and_arguments_of_the_forward(
    use: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = scripts.HEAD + f"engine.initialize(model, config, distance, example_batch=rows[1][:2]){use}"
    (call,) = calls_of_script(Path(written(tmp_path, monkeypatch, text)), (), load_config)
    assert {tensor.shape for tensor in tree_leaves(call.rows)} == {(8, 8)}


@pytest.mark.parametrize(("model", "expected"), [("model", {"input", "scale"}), ("lambda: model", None)])
def test_positional_and_keyword_arguments_of_a_forward_are_one_batch(
    model: str, expected: set[str] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = scripts.HEAD + f"engine.initialize({model}, config, distance)(rows[0], scale=rows[1])"
    (call,) = calls_of_script(Path(written(tmp_path, monkeypatch, text)), (), load_config)
    assert (None if call.rows is None else set(call.rows)) == expected


def test_two_calls_are_compared_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", written(tmp_path, monkeypatch, scripts.TWICE), "--steps", "1"]) == 0
    said = capsys.readouterr().out
    assert "script     calls engine.initialize 2 times; each call is verified separately" in said
    models = [line for line in said.splitlines() if line.startswith("model")]
    assert [line.split()[1] for line in models] == ["Sequential", "Linear"]
    assert said.count("verdict    trains as one process") == 2


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (scripts.NEVER, "train.py ends without a call of engine.initialize; give the script that trains"),
        (scripts.FAILS, "train.py raises ValueError before engine.initialize: no data here; give a script"),
        (scripts.LATER, "train.py raises KeyError after engine.initialize: 'rank'; give a script"),
        (scripts.EXITS, "train.py exits with 2 before it calls engine.initialize; give the arguments"),
        (scripts.WITHOUT_ROWS, "to draw tokens from; pass a batch of at least two rows as example_batch to engine"),
    ],
    ids=["never", "fails", "later", "exits", "without rows"],
)
def test_a_script_that_cannot_be_compared_is_one_sentence(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    text: str,
    sentence: str,
) -> None:
    assert main(["verify", written(tmp_path, monkeypatch, text)]) == 1
    said = capsys.readouterr().err.strip()
    assert sentence in said and "\n" not in said and said.endswith(".")


def test_a_call_goes_to_the_engine_again_afterwards() -> None:
    with answered_by(lambda arguments: sorted(arguments)):
        answered: object = engine.initialize("model", {})  # type: ignore[arg-type]
    assert answered == [
        "config", "example_batch", "inputs", "loss_fn", "lr_scheduler", "model", "optimizer", "whole", "world",
    ]  # fmt: skip
    with pytest.raises(engine.EngineError):
        engine.initialize("model", {"train_batch_size": 1})  # type: ignore[arg-type]


@pytest.mark.long
def test_a_model_of_hugging_face_is_shrunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", written(tmp_path, monkeypatch, scripts.HUGGING_FACE)]) == 0
    assert "gpt2 of train.py, shrunk to " in capsys.readouterr().out
