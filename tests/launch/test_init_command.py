"""``trine init``: what it writes trains as it stands, on several ranks, and goes on from its checkpoint."""

import ast
import json
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from engine.config import load_config
from engine.launch.cli import main
from engine.launch.init_command import CONFIG, SCRIPT, _folder_words
from tests.launches import Launch
from tests.selection import wide
from tests.test_examples import QUIET, in_a_process, run_as_rank, write_inputs

HERE = "tests.launch.test_init_command"


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).square().mean()  # type: ignore[no-any-return]


def with_rows() -> tuple[nn.Module, dict[str, Tensor]]:
    return Small(), {"x": torch.arange(64.0).view(16, 4) / 64}


def with_loss() -> tuple[nn.Module, Tensor, object]:
    return nn.Linear(4, 4), torch.arange(64.0).view(16, 4) / 64, squares


def squares(output: Tensor, batch: Tensor) -> Tensor:
    return output.square().mean()


def alone() -> nn.Module:
    return Small()


def losses(folder: Path, steps: int, *words: str, ranks: int = 2) -> list[float]:
    """What the script prints when it runs as torchrun would run it."""
    with Launch(run_as_rank, ranks, SCRIPT, list(words), str(folder), env=QUIET) as job:
        ended = job.end(120)
    assert [end.code for end in ended] == [0] * ranks, "\n".join(end.error for end in ended)
    found = re.findall(r"^step (\d+) loss ([\d.]+)$", ended[0].said[0], re.MULTILINE)
    assert [int(step) for step, _ in found][-1] == steps
    return [float(loss) for _, loss in found]


def shortened(folder: Path, steps: int) -> None:
    script = folder / SCRIPT
    assert "STEPS = " in script.read_text()
    script.write_text(re.sub(r"\b1000$", str(steps), script.read_text(), flags=re.MULTILINE))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    in_a_process(write_inputs, str(folder))
    return folder


def test_a_folder_with_tokenizer_trains_and_goes_on(
    inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", str(inputs / "MODEL"), "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert f"torchrun --nproc_per_node 2 {tmp_path / SCRIPT} FILE.txt" in said
    assert load_config(tmp_path / CONFIG, 2).dp == 2, "the configuration has comments and fits"
    assert len((tmp_path / SCRIPT).read_text().splitlines()) < 60
    shortened(tmp_path, 4)
    text = str(inputs / "text.txt")
    losses(tmp_path, 4, text, "optimizer.params.lr=1e-2", "checkpoint.every=2")
    assert (tmp_path / "trained/model.safetensors.index.json").is_file() and (
        tmp_path / "trained/tokenizer.json"
    ).is_file()
    shortened(tmp_path, 4)
    (tmp_path / SCRIPT).write_text((tmp_path / SCRIPT).read_text().replace("64, 4\n", "64, 6\n"))
    assert len(losses(tmp_path, 6, text, "parallel.tensor=2", "checkpoint.every=0")) == 2


@pytest.mark.parametrize("name", ["with_rows", wide("with_loss")])
def test_a_function_with_rows_trains(tmp_path: Path, name: str) -> None:
    assert main(["init", f"{HERE}:{name}", "--out", str(tmp_path)]) == 0
    shortened(tmp_path, 6)
    found = losses(tmp_path, 6, "scheduler=null", "optimizer.params.lr=1e-2")
    assert len(found) == 6 and found[-1] < found[0]


@pytest.mark.parametrize("run", [False, wide(True)])
def test_a_script_elsewhere_finds_a_module_of_this_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: bool
) -> None:
    name = f"model_of_this_folder_{run}"
    (tmp_path / f"{name}.py").write_text(f"from {HERE} import with_rows as build\n")
    monkeypatch.chdir(tmp_path)
    assert main(["init", f"{name}:build", "--out", "beside"]) == 0 and main(["init", f"{name}:build"]) == 0
    line = f"sys.path.insert(0, {json.dumps(str(tmp_path))})  # the folder of {name}"
    assert line in (tmp_path / "beside" / SCRIPT).read_text().splitlines()
    assert "sys.path" not in (tmp_path / SCRIPT).read_text(), "Python looks beside the script"
    if run:
        shortened(tmp_path / "beside", 2)
        assert len(losses(tmp_path / "beside", 2, "scheduler=null")) == 2


def test_a_model_alone_asks_for_its_rows(tmp_path: Path) -> None:
    assert main(["init", f"{HERE}:alone", "--out", str(tmp_path)]) == 0
    text = (tmp_path / SCRIPT).read_text()
    assert "def all_rows():" in text and f"from {HERE} import alone" in text
    compile(text, SCRIPT, "exec")


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ("nowhere", "nowhere has no config.json; give the folder of a Hugging Face model, or module:function."),
        ("tests.launch.nowhere:build", "MODEL tests.launch.nowhere:build is not found ("),
    ],
)
def test_what_is_no_model_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str, sentence: str
) -> None:
    assert main(["init", model, "--out", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert said.startswith(sentence) and said.count("\n") == 1 and not list(tmp_path.iterdir())


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / CONFIG).write_text("mine")
    assert main(["init", f"{HERE}:alone", "--out", str(tmp_path)]) == 1
    assert (
        "engine.json exists and is not overwritten; remove it, or pass another folder with --out."
        in capsys.readouterr().err
    )
    assert (tmp_path / CONFIG).read_text() == "mine" and not (tmp_path / SCRIPT).exists()


def test_a_folder_of_any_name_is_a_literal_of_python(tmp_path: Path) -> None:
    for name in ('it\'s \N{GRINNING FACE} "a\\b"', os.fsdecode(b"\xff")):
        folder = tmp_path / name
        folder.mkdir()
        written = _folder_words(folder, SimpleNamespace(vocab_size=256), "Any")["folder"]
        assert ast.literal_eval(written.encode().decode()) == str(folder)
