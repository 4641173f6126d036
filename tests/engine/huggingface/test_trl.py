"""Trainers of TRL behind the engine's Trainer train as they do alone, where their fused head has whole weights."""

from pathlib import Path
from typing import Any

import pytest

from tests.engine.huggingface.trl_runs import LOGGED, Tuning, run_tuning

pytestmark = pytest.mark.long


@pytest.fixture(scope="module", params=list(LOGGED))
def host(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """A trainer of TRL, and what it logs alone."""
    folder = tmp_path_factory.mktemp("host")
    return request.param, run_tuning(Tuning(folder=str(folder), kind=request.param), 1)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_run_on_data_ranks_is_that_of_trl_alone(stage: int, host: tuple[str, dict[str, Any]], tmp_path: Path) -> None:
    kind, alone = host
    config = {"zero_optimization": {"stage": stage}}
    found = run_tuning(Tuning(folder=str(tmp_path), kind=kind, config=config, rows=2), 2)
    assert len(alone["loss"]) == 4 and alone.keys() == found.keys()
    for name, values in alone.items():
        exact = 1e-5 if name.endswith("loss") else 1e-4
        assert found[name] == pytest.approx(values, rel=exact, abs=1e-6), name


@pytest.mark.parametrize(
    ("axis", "sentence"),
    [
        (
            "tensor",
            "{kind}Trainer of TRL with parallel.tensor 2: its loss multiplies by the whole weight of the head, of "
            "which a tensor rank has a part; leave parallel.tensor out.",
        ),
        (
            "pipeline",
            "{kind}Trainer of TRL with parallel.pipeline 2: its loss multiplies by the weight of the head, which the "
            "last stage alone has; leave parallel.pipeline out.",
        ),
    ],
)
@pytest.mark.parametrize("kind", list(LOGGED))
def test_tensor_ranks_and_pipelines_are_refused(kind: str, axis: str, sentence: str, tmp_path: Path) -> None:
    found = run_tuning(Tuning(folder=str(tmp_path), kind=kind, config={"parallel": {axis: 2}}), 2)
    assert found == sentence.format(kind=kind)
