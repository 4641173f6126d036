"""DeepSpeed's keys: those that it declares, and all of real configurations, are acted on, noted or refused."""

import ast
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from engine.config import Config, load_config
from engine.config.deepspeed.keys import KEYS, TABLE, Moved
from engine.config.reader import paths
from engine.errors import ConfigError
from engine.launch.cli import main
from tests.engine.config.deepspeed_outcomes import FOLDER, files, outcomes, told

SECTIONS = {
    "DeepSpeedFP16Config": "fp16", "DeepSpeedBF16Config": "bf16", "DeepSpeedZeroConfig": "zero_optimization",
    "DeepSpeedZeroOffloadParamConfig": "zero_optimization.offload_param",
    "DeepSpeedZeroOffloadOptimizerConfig": "zero_optimization.offload_optimizer", "CompileConfig": "compile",
    "TPTrainingConfig": "tensor_parallel", "TensorBoardConfig": "tensorboard", "CSVConfig": "csv_monitor",
    "WandbConfig": "wandb", "CometConfig": "comet", "CommsLoggerConfig": "comms_logger",
    "DeepSpeedMonitorConfig": "", "HybridEngineConfig": "hybrid_engine",
}  # fmt: skip
"""DeepSpeed's classes of sections, and where they stand in a configuration."""
INSIDE = {"tensor_parallel.tensor_parallel": "its alias is tp"}


def declared(root: Path) -> Iterator[str]:
    """Dotted paths of the keys that the classes declare."""
    for file in sorted(root.rglob("*config*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and (at := SECTIONS.get(node.name)) is not None:
                for line in node.body:
                    if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                        yield f"{at}.{line.target.id}".removeprefix(".")


@pytest.mark.peers
def test_every_key_that_deepspeed_declares_is_known() -> None:
    found = importlib.util.find_spec("deepspeed")
    assert found is not None
    keys = set(declared(Path(str(found.origin)).parent))
    known = {*KEYS, *paths(Config), *INSIDE}
    # a section without an entry for each key is noted as a whole
    unknown = {key for key in keys - known if not any(key.startswith(f"{whole}.") for whole in TABLE)}
    assert len(keys) > 100 and not unknown


FILES: Mapping[str, Any] = files()
REFUSED = {name for name, raw in FILES.items() if told(raw).refusals}


def test_all_but_a_few_are_accepted() -> None:
    assert len(FILES) >= 75 and len(FILES) - len(REFUSED) >= 72 and len(REFUSED) >= 2


@pytest.mark.parametrize("name", FILES)
def test_every_key_has_an_outcome(name: str) -> None:
    assert not [path for path, became in outcomes(FILES[name]).items() if became is None]


@pytest.mark.parametrize("name", sorted(set(FILES) - REFUSED))
def test_what_is_acted_on_acts_and_nothing_else_does(name: str) -> None:
    """Without a key that acts the configuration is another one or none, unless the value is the default."""
    config = load_config(FILES[name]).to_json()
    for path, became in outcomes(FILES[name]).items():
        without = deepcopy(FILES[name])
        *parents, leaf = path.split(".")
        value = at(without, parents).pop(leaf)
        try:
            same = load_config(without).to_json() == config
        except ConfigError:
            assert became == "acted on", "others need it"
            continue
        if became != "acted on":
            assert same, path
        elif same and leaf != "adam_w_mode":
            entry = TABLE.get(path)
            there = entry.target if isinstance(entry, Moved) else path
            assert at(config, there.split(".")) in (value, "AdamW" if value == "Adam" else value), path


def at(tree: Any, path: Sequence[str]) -> Any:
    for part in path:
        tree = tree[part]
    return tree


@pytest.mark.parametrize("name", ["zero2_offload.json", min(REFUSED)])
def test_the_command_reports_notes_or_refusals_of_a_file(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = told(FILES[name])
    assert main(["check", str(FOLDER / name)]) == (1 if said.refusals else 0)
    shown = capsys.readouterr()
    text = shown.err if said.refusals else shown.out
    assert all(line in text for line in said.refusals or said.notes)
