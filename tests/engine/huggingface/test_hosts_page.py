"""The scripts of docs/guides/hosts, on their grids."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.engine.huggingface.host_runs import ENVIRONMENT
from tests.launches import Launch
from tests.test_examples import ROOT, in_a_process, load_folders, run_as_rank, write_inputs

FOLDER = ROOT / "docs/guides/hosts"
SCRIPTS = {file.stem: file.read_text(encoding="utf-8") for file in FOLDER.glob("*.py")}
CONFIGS = {file.name: file.read_text(encoding="utf-8") for file in FOLDER.glob("*.json")}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    in_a_process(write_inputs, str(folder))
    return folder


def printed(name: str, arguments: list[str], folder: Path) -> str:
    """Run a script of the folder on two ranks; what rank 0 prints."""
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.py").write_text(SCRIPTS[name])
    for file, text in CONFIGS.items():
        (folder / file).write_text(text)
    under_torchrun = ENVIRONMENT | {
        "TORCHELASTIC_RUN_ID": "page", "GROUP_RANK": "0", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_OFFLINE": "1"
    }  # fmt: skip
    with Launch(run_as_rank, 2, f"{name}.py", arguments, str(folder), env=under_torchrun) as job:
        ended = job.end(240)
    assert [end.code for end in ended] == [0, 0], "\n".join(end.error for end in ended)
    said: Any = ended[0].said[0]
    assert not ended[1].said[0] or name == "trainer", "only rank 0 prints"
    return str(said)


def validation(text: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"validation loss ([\d.]+)", text)]


def evaluations(config: str, inputs: Path, folder: Path) -> dict[int, float]:
    """Run the script; step -> loss of evaluation."""
    said = printed("trainer", [config, str(inputs / "MODEL"), str(inputs / "text.txt"), str(folder / "tuned")], folder)
    assert "'eval_accuracy'" in said
    found = re.findall(r"'eval_loss': '?([\d.]+)'?", said)
    return dict(enumerate(map(float, found)))


@pytest.mark.long
def test_the_script_prints_the_same_losses_on_its_grids_and_goes_on(inputs: Path, tmp_path: Path) -> None:
    pipeline = evaluations("pp2.json", inputs, tmp_path / "pp2")
    tensor = evaluations("tp2.json", inputs, tmp_path / "tp2")
    assert len(pipeline) == 2 and pipeline[1] < pipeline[0]
    assert tensor == pytest.approx(pipeline, rel=1e-3), "they are printed with four digits"
    evaluations("zero3.json", inputs, tmp_path / "zero3")
    ((lacks, layers, _),) = in_a_process(load_folders, str(tmp_path / "pp2/tuned"))
    assert not lacks and layers == 4
    newest = max((tmp_path / "pp2/tuned").glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    shutil.rmtree(newest)
    again = evaluations("tp2.json", inputs, tmp_path / "pp2")
    assert again == {0: pytest.approx(pipeline[1], rel=1e-3)}, "it goes on after the first epoch, on another grid"


def test_the_guide_links_every_script_and_each_stays_short() -> None:
    page = FOLDER.with_suffix(".md").read_text(encoding="utf-8")
    linked = set(re.findall(r"\]\(hosts/(\w+)\.py\)", page))
    assert linked == set(SCRIPTS) == {"trainer", "accelerated", "lit", "sft", "grpo"}
    assert all(len(script.splitlines()) < 60 for script in SCRIPTS.values())


@pytest.mark.long
def test_a_loop_of_accelerate_prints_the_same_and_goes_on(inputs: Path, tmp_path: Path) -> None:
    def run(config: str, folder: Path) -> list[float]:
        given = [config, str(inputs / "MODEL"), str(inputs / "text.txt"), str(folder / "tuned")]
        return validation(printed("accelerated", given, folder))

    tensor, sharded = run("tp2.json", tmp_path / "tp2"), run("zero3.json", tmp_path / "zero3")
    assert len(tensor) == len(sharded) == 1 and max(tensor + sharded) < 5, "it has learnt"
    ((lacks, layers, _),) = in_a_process(load_folders, str(tmp_path / "tp2/tuned"))
    assert not lacks and layers == 4
    assert run("pp2.json", tmp_path / "pp2") == pytest.approx(tensor, rel=1e-5)
    shutil.rmtree(tmp_path / "tp2/tuned/1")
    assert run("pp2.json", tmp_path / "tp2") == pytest.approx(tensor, rel=1e-5), "it goes on on another grid"
    assert run("tp2.json", tmp_path / "tp2") == pytest.approx(tensor, rel=1e-5), "nothing is left to train"


@pytest.mark.long
def test_a_script_of_lightning_prints_the_same_and_goes_on(inputs: Path, tmp_path: Path) -> None:
    def run(config: str, folder: Path) -> list[float]:
        return validation(printed("lit", [config, str(inputs / "text.txt"), str(folder / "tuned")], folder))

    sharded, tensor = run("zero3.json", tmp_path / "zero3"), run("tp2.json", tmp_path / "tp2")
    assert len(sharded) == len(tensor) == 1
    pipeline = run("pp2.json", tmp_path / "pp2")
    assert pipeline == pytest.approx(tensor, rel=1e-3), "tensor ranks add in another order"
    assert run("tp2.json", tmp_path / "zero3") == pytest.approx(sharded, rel=1e-5), "nothing is left to train"
    tuned = tmp_path / "zero3/tuned"
    (tuned / "last.ckpt").unlink()
    (tuned / "last.ckpt").symlink_to("epoch=0.ckpt")
    assert run("zero3.json", tmp_path / "zero3") == pytest.approx(sharded, rel=1e-5)
    tuned = tmp_path / "pp2/tuned"
    (tuned / "last.ckpt").unlink()
    (tuned / "last.ckpt").symlink_to("epoch=0.ckpt")
    assert run("tp2.json", tmp_path / "pp2") == pytest.approx(pipeline, rel=1e-3), "it goes on on another grid"


@pytest.mark.long
def test_a_script_of_trl_prints_the_same_and_goes_on(inputs: Path, tmp_path: Path) -> None:
    def run(config: str, folder: Path) -> list[float]:
        given = [config, str(inputs / "MODEL"), str(inputs / "text.txt"), str(folder / "tuned")]
        return validation(printed("sft", given, folder))

    first, third = run("zero1.json", tmp_path / "zero1"), run("zero3.json", tmp_path / "zero3")
    assert len(first) == 1 and third == pytest.approx(first, rel=1e-5)
    newest = max((tmp_path / "zero1/tuned").glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    shutil.rmtree(newest)
    assert run("zero3.json", tmp_path / "zero1") == pytest.approx(first, rel=1e-5), "it goes on on another grid"


@pytest.mark.long
def test_a_script_of_rewards_prints_the_same_and_goes_on(inputs: Path, tmp_path: Path) -> None:
    def run(config: str, folder: Path) -> list[float]:
        given = [config, str(inputs / "MODEL"), str(inputs / "text.txt"), str(folder / "tuned")]
        said = re.findall(r"^rewards \[(.*)\]$", printed("grpo", given, folder), re.MULTILINE)
        return [float(reward) for reward in said[0].split(",")]

    first, third = run("zero1.json", tmp_path / "zero1"), run("zero3.json", tmp_path / "zero3")
    assert len(first) == 4 and third == pytest.approx(first, rel=1e-5)
    shutil.rmtree(tmp_path / "zero1/tuned/checkpoint-4")
    assert run("zero3.json", tmp_path / "zero1") == pytest.approx(first, rel=1e-5), "it goes on on another grid"
