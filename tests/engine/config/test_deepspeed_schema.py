"""Every key that DeepSpeed declares for its configuration is known: acted on, noted or refused with the way."""

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.config import Config
from engine.config.deepspeed.keys import KEYS, TABLE
from engine.config.reader import paths

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
