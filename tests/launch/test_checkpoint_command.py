"""``trine checkpoint``: what it says of sound, damaged and missing checkpoints, and the model folder it takes out."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engine.data import Sampler
from engine.launch.cli import main
from tests.zero.small import batch, start

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three checkpoints of a model with everything awkward, and what an interrupted save leaves. Not to be changed."""
    folder = tmp_path_factory.mktemp("run") / "checkpoints"
    with start({"checkpoint": {"folder": str(folder), "every": 1, "keep": 3}, "bf16": {"enabled": True}}) as eng:
        sampler = Sampler(1000, 8)
        eng.register_for_checkpointing(data=sampler)
        for step in range(4):
            next(sampler)
            eng.train_batch(batch(eng, step))
    (folder / "step-00000009.tmp-dead").mkdir()
    return folder


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    """The same, to be damaged."""
    return Path(shutil.copytree(run, tmp_path / "run"))


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def test_info_tells_what_a_checkpoint_holds(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "info", str(run)]) == 0
    text = capsys.readouterr().out
    lines = dict(line.strip().split(maxsplit=1) for line in text.splitlines()[1:])
    assert text.splitlines()[0] == str(run / "step-00000004")
    assert "after update 4: 32 rows (" in lines["saved"] and f"torch {torch.__version__}" in lines["saved"]
    assert lines["grid"] == "1 ranks = 1 pipeline x 1 data x 1 tensor, ZeRO 0; any other grid loads it too"
    # embedding 407, up 636, down 583, bias of the head 37, scale 1, wide 7, frozen 11, empty 0, unused 5
    assert lines["model"] == "1,687 parameters in 10 tensors, BF16; 1 other name of tied ones"
    assert lines["optimizer"].startswith("Adam, 1 group, ") and "exp_avg F32 of 1,6" in lines["optimizer"]
    assert "master F32 of 1,6" in lines["optimizer"]
    assert lines["data"] == "position 32, seed 0, windows 1000"
    assert "model " in lines["files"] and "in 2, optim " in lines["files"] and "in 1, state " in lines["files"]
    assert lines["also"] == "there step-00000002, step-00000003, step-00000009.tmp-dead"


def test_info_of_one_step_and_of_a_folder_of_train_py(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "info", str(run / "step-00000002")]) == 0
    assert "after update 2" in capsys.readouterr().out
    assert main(["checkpoint", "info", str(run.parent)]) == 0, "OUT/checkpoints is found from OUT"
    assert "after update 4" in capsys.readouterr().out


def test_verify_reads_one_or_all(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "verify", str(run)]) == 0
    one = capsys.readouterr().out.splitlines()
    assert len(one) == 1 and one[0].startswith(f"{run / 'step-00000004'} is sound: ")
    assert main(["checkpoint", "verify", "--all", str(run / "step-00000003")]) == 0
    sound = [line.split(" is sound")[0] for line in capsys.readouterr().out.splitlines()]
    assert sound == [str(run / f"step-0000000{step}") for step in (2, 3, 4)]


def test_damage_is_named_with_file_and_tensor(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = copy / "step-00000003/model/model-00001-of-00001.safetensors"
    flip(file, -1)
    assert main(["checkpoint", "verify", str(copy)]) == 0, "the newest is sound"
    assert main(["checkpoint", "verify", str(copy / "step-00000003")]) == 1
    error = capsys.readouterr().err
    assert f"{file} is damaged in block 0" in error and "tensor 'param/" in error and error.count("\n") == 1
    assert main(["checkpoint", "verify", str(copy), "--all"]) == 1
    out, error = capsys.readouterr()
    assert out.count("is sound") == 2 and str(file) in error
    assert error.endswith(
        "1 of 3 checkpoints are damaged: step-00000003; copy these again, or load one of the others.\n"
    )


@pytest.mark.parametrize("name", ["manifest.json", "COMMIT", "checksums.safetensors", "optim/optim-00000.safetensors"])
def test_a_missing_file_is_named(copy: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (copy / "step-00000004" / name).unlink()
    assert main(["checkpoint", "verify", str(copy)]) == 1
    error = capsys.readouterr().err
    assert str(copy / "step-00000004" / name) in error and error.count("\n") == 1


@pytest.mark.parametrize("single", [False, True])
def test_export_gives_the_folder_that_was_saved(
    run: Path, tmp_path: Path, single: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new/model"
    assert main(["checkpoint", "export", str(run), str(out), *["--single"] * single]) == 0
    assert "every block checked" in capsys.readouterr().out
    saved = run / "step-00000004/model"
    if not single:
        assert {path.name: path.read_bytes() for path in out.iterdir()} == {
            path.name: path.read_bytes() for path in saved.iterdir()
        }
        return
    assert [path.name for path in out.iterdir()] == ["model.safetensors"]
    given, wanted = load_file(out / "model.safetensors"), load_file(saved / "model-00001-of-00001.safetensors")
    assert given.keys() == wanted.keys() and len(given) == 10
    assert all(given[key].dtype == wanted[key].dtype and torch.equal(given[key], wanted[key]) for key in wanted)


def test_export_keeps_what_is_there(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full/notes.txt").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("full", "full/notes.txt", "link"):
        assert main(["checkpoint", "export", str(run), str(tmp_path / name)]) == 1
        assert "nothing is overwritten" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["notes.txt"]
    (tmp_path / "empty").mkdir()
    assert main(["checkpoint", "export", str(run), str(tmp_path / "empty")]) == 0
    assert (tmp_path / "empty/model.safetensors.index.json").exists()


@pytest.mark.parametrize("single", [False, True])
def test_a_damaged_model_is_not_exported(
    copy: Path, tmp_path: Path, single: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    flip(copy / "step-00000004/model/model-00001-of-00001.safetensors", -1)
    assert main(["checkpoint", "export", str(copy), str(tmp_path / "out"), *["--single"] * single]) == 1
    assert "tensor 'param/" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["run"], "neither the folder nor a part of it"


@pytest.mark.parametrize(("name", "why"), [("", "has no checkpoint"), ("nothing", "is not a folder")])
@pytest.mark.parametrize("action", [["info"], ["verify"], ["verify", "--all"], ["export"]])
def test_no_checkpoint_is_one_sentence(
    tmp_path: Path, action: list[str], name: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = [str(tmp_path / "out")] if action == ["export"] else []
    assert main(["checkpoint", *action, str(tmp_path / name), *out]) == 1
    error = capsys.readouterr().err
    assert why in error and "step-N" in error and error.count("\n") == 1


def test_a_step_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for action in ("info", "verify"):
        assert main(["checkpoint", action, str(tmp_path / "step-00000007")]) == 1
        error = capsys.readouterr().err
        assert "step-00000007" in error and "No such file" in error and error.count("\n") == 1


def test_torch_is_not_imported(run: Path) -> None:
    code = "import sys; sys.modules['torch'] = None; from engine.launch.cli import main; main(['checkpoint', *{}])"
    for action in (["info", str(run)], ["verify", str(run)]):
        done = subprocess.run(
            [sys.executable, "-c", code.format(action)], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0 and str(run) in done.stdout, done.stderr
