"""``trine verify``: the verdict, what brings a deviation in, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine.launch.cli import main

SUBJECTS = "tests.launch.verifier.subjects:"
CONFIG: dict[str, Any] = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 4,
    "parallel": {"data": 4, "tensor": 2},
    "zero_optimization": {"stage": 1},
    "bf16": {"enabled": True},
    "checkpoint": {"folder": "never-written"},
}


def verify(tmp_path: Path, model: str, *more: str, **changes: Any) -> int:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | changes))
    return main(["verify", SUBJECTS + model if ":" not in model else model, str(tmp_path / "config.json"), *more])


def test_a_sound_plan_trains_as_one_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify(tmp_path, "classifier", "--weights") == 0
    said = capsys.readouterr().out
    assert "Classifier as it is, 280 parameters" in said
    assert "2 data x 2 tensor x 1 pipeline ranks as threads, ZeRO 1; 3 steps of 4 microbatches, fp32" in said
    assert said.endswith("verdict    trains as one process\n")
    assert {"up.weight", "up.bias", "down.weight", "down.bias"} <= set(said.split())
    assert not Path("never-written").exists()


def test_a_wrong_plan_is_found_and_the_axis_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = {"tensor_plan": {"up": "column", "down": "row"}, "prove_plan": False}
    assert verify(tmp_path, "classifier", parallel=CONFIG["parallel"] | plan, kernels="reference") == 1
    _, verdict = capsys.readouterr().out.split("verdict    DIFFERS from one process; with one thing switched off:\n")
    lines = {line.split()[0]: line.split(maxsplit=1)[1] for line in verdict.splitlines()}
    assert lines.keys() == {"parallel.tensor", "parallel.data", "zero_optimization"}
    assert lines["parallel.tensor"] == "equal: it brings the deviation in"
    assert all(lines[name].startswith("differs: losses ") for name in ("parallel.data", "zero_optimization"))


@pytest.mark.parametrize(
    ("model", "more", "changes", "sentence"),
    [
        ("of_one_row", (), {}, "gives first dims of [1]; return at least two rows with content"),
        ("without_rows", (), {}, "does not say what its rows are; return (module, some rows of a batch) from it."),
        ("no_model", (), {}, "gives a int; return an nn.Module"),
        ("that_raises", (), {}, "cannot be built (ValueError: no such size)"),
        ("missing", (), {}, "is not found (module 'tests.launch.verifier.subjects' has no attribute 'missing')"),
        (
            "no.such.module:build",
            (),
            {},
            "MODEL no.such.module:build is not found (No module named 'no'); give module:",
        ),
        ("classifier", ("--steps", "0"), {}, "--steps 0: a comparison takes 1 or more; give such a number."),
        ("classifier", (), {"parallel": {"tensor": 2}}, 'parallel.data is "auto": it follows from the number of'),
        ("classifier", ("--world", "3"), {"parallel": {"tensor": 2}}, "the world size 3"),
        ("wrong_width", (), {"parallel": {"data": 2}}, "raises RuntimeError in training: "),
    ],
    ids=str,
)
def test_a_mistake_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str, more: tuple[str, ...], changes: Any, sentence: str
) -> None:
    assert verify(tmp_path, model, *more, **changes) == 1
    said = capsys.readouterr().err
    assert sentence in said and "Traceback" not in said


def test_a_folder_without_a_configuration_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "empty").mkdir()
    assert main(["verify", str(tmp_path / "empty"), str(tmp_path / "config.json")]) == 1
    assert (
        "has no config.json; give a Hugging Face folder, its config.json, or module:function."
        in capsys.readouterr().err
    )


@pytest.mark.long
@pytest.mark.parametrize(
    "family", ["Llama", "GPT2", "Mixtral", "DeepseekV3", "GptOss", "Qwen3", "T5", "Bert", "Gemma3Text"]
)
def test_families_of_hugging_face_train_as_one_process(tmp_path: Path, family: str) -> None:
    import transformers

    getattr(transformers, f"{family}Config")().save_pretrained(tmp_path / "model")
    grid = {"data": 2, "tensor": 2, "pipeline": 2}
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"parallel": grid, "zero_optimization": {"stage": 2}}))
    assert main(["verify", str(tmp_path / "model"), str(tmp_path / "config.json")]) == 0
