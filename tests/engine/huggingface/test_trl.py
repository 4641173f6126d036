"""TRL's SFTTrainer behind the engine's Trainer trains as it does alone, where its fused head has whole weights."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.engine.huggingface.trl_runs import Tuning, run_tuning

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(find_spec("trl") is None, reason="TRL brings pandas and pyarrow, and is in no extra"),
]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_sft_on_data_ranks_is_that_of_trl_alone(stage: int, tmp_path: Path) -> None:
    host = run_tuning(Tuning(folder=str(tmp_path / "host")), 1)
    config: dict[str, Any] = {"zero_optimization": {"stage": stage}}
    found = run_tuning(Tuning(folder=str(tmp_path / "engine"), config=config, rows=2), 2)
    assert len(host["loss"]) == 4 and host.keys() == found.keys()
    for name, values in host.items():
        assert found[name] == pytest.approx(values, rel=1e-4 if name == "grad_norm" else 1e-5), name
