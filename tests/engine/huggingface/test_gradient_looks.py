"""Callbacks and loops that look for gradients on their parameters learn where they are, on every rank."""

from pathlib import Path
from typing import Any

import pytest

from tests.engine.huggingface.gradient_looks import Look, looks

GRIDS: dict[str, dict[str, Any]] = {
    "zero3": {"zero_optimization": {"stage": 3}}, "tp2": {"parallel": {"tensor": 2}},
    "pp2": {"parallel": {"pipeline": 2}},
}  # fmt: skip
pytestmark = pytest.mark.long  # every run imports transformers' Trainer in each rank


@pytest.mark.parametrize("grid", GRIDS)
def test_callbacks_of_the_trainer(grid: str, tmp_path: Path) -> None:
    """Over a pipeline ``on_pre_optimizer_step`` comes after the update, and is told the same."""
    run = Look(folder=str(tmp_path), config=GRIDS[grid], hooks=("on_pre_optimizer_step", "on_optimizer_step"))
    for said in looks(run, 2):
        assert len(said) == 2
        assert all(each.startswith("EngineError: param.grad was read or written") for each in said), said


@pytest.mark.parametrize("grid", GRIDS)
def test_a_loop_of_accelerate(grid: str, tmp_path: Path) -> None:
    for before, after, dropped in looks(Look(folder=str(tmp_path), config=GRIDS[grid], hooks=()), 2):
        assert before.startswith("EngineError: param.grad was read or written") and after == before
        assert dropped == "0 gradients"
