"""The script of docs/hosts.md, as it stands there, on its grids."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.engine.huggingface.host_runs import ENVIRONMENT
from tests.launches import Launch
from tests.test_examples import ROOT, in_a_process, load_folders, run_as_rank, write_inputs

PAGE = (ROOT / "docs/hosts.md").read_text(encoding="utf-8")
(SCRIPT,) = re.findall(r"<!-- example: trainer -->\n```python\n(.*?)```", PAGE, re.DOTALL)
CONFIGS = dict(re.findall(r"<!-- config: ([\w.]+) -->\n```jsonc\n(.*?)```", PAGE, re.DOTALL))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    in_a_process(write_inputs, str(folder))
    return folder


def evaluations(config: str, inputs: Path, folder: Path) -> dict[int, float]:
    """Run the script; step -> loss of evaluation."""
    folder.mkdir(exist_ok=True)
    (folder / "trainer.py").write_text(SCRIPT)
    for name, text in CONFIGS.items():
        (folder / name).write_text(text)
    arguments = [config, str(inputs / "MODEL"), str(inputs / "text.txt"), str(folder / "tuned")]
    with Launch(run_as_rank, 2, "trainer.py", arguments, str(folder), env=ENVIRONMENT) as job:
        ended = job.end(240)
    assert [end.code for end in ended] == [0, 0], "\n".join(end.error for end in ended)
    said: Any = ended[0].said[0]
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
