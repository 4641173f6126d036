"""TRL's functions over all processes count data ranks while a trainer runs over the engine."""

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from engine.config import load_config
from engine.huggingface import accelerator as accelerators
from engine.huggingface import trl_loop
from engine.huggingface.accelerator import EngineAccelerator

SIZES = {"train_batch_size": 16}


def accelerator_of(rank: int) -> EngineAccelerator:
    """An accelerator of dp2 x tp2 that has not met the others."""
    made: Any = EngineAccelerator.__new__(EngineAccelerator)
    made.grid = load_config(SIZES | {"parallel": {"data": 2, "tensor": 2}}, 4).grid(rank)
    return made  # type: ignore[no-any-return]


@pytest.fixture
def trl() -> Iterator[Any]:
    """A module of TRL with the names that its trainers have."""
    module: Any = ModuleType("trl.trainer.stub")
    module.gather = module.gather_object = module.VLLMGeneration = None

    class GRPOTrainer:
        def _generate_and_score_completions(self, rows: list[str]) -> Any:
            if not rows:
                raise ValueError("no rows")
            return module.gather_object(rows), module.gather

    GRPOTrainer.__module__ = module.__name__
    module.GRPOTrainer = GRPOTrainer
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


def tuner_of(module: Any, rank: int) -> Any:
    """A trainer over the engine that was not constructed."""
    kind: Any = type("Tuner", (trl_loop.TrlLoop, module.GRPOTrainer), {})
    tuner: Any = kind.__new__(kind)
    tuner.accelerator, tuner.args = accelerator_of(rank), SimpleNamespace(seed=5)
    return tuner


def test_rows_are_gathered_once_for_each_data_rank(trl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerators, "gather_object", lambda lists: [["a"], ["a"], ["b"], ["b"]])
    tuner = tuner_of(trl, 0)
    assert tuner._generate_and_score_completions(["a"]) == (["a", "b"], tuner.accelerator.gather)
    with pytest.raises(ValueError, match="no rows"):
        tuner._generate_and_score_completions([])
    assert trl.gather is trl.gather_object is trl.VLLMGeneration is None


def test_ranks_of_a_replica_draw_the_same_and_data_ranks_do_not(trl: Any) -> None:
    drawn = []
    for rank in range(4):
        with tuner_of(trl, rank)._making_trl():
            torch.manual_seed(5 + rank)  # as TRL does
        drawn.append(torch.rand(3).tolist())
    assert drawn[0] == drawn[1] != drawn[2] == drawn[3]


def test_vllm_of_trl_is_made_over_the_servers_of_the_configuration(trl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trl_loop, "ServedGeneration", lambda servers, **given: (servers, given))
    tuner = tuner_of(trl, 0)
    with tuner._making_trl():
        tuner._servers = ("http://a",)
        assert trl.VLLMGeneration(mode="server") == (("http://a",), {"mode": "server"})
    assert trl.VLLMGeneration is None
