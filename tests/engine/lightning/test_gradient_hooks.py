"""Hooks of Lightning that look for gradients learn where they are, on every grid, and what they write there counts."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.engine.lightning.lightning_runs import LitCase, errors_of, run_lit

GRIDS: Mapping[str, tuple[int, int, Mapping[str, Any]]] = {
    "dp2": (2, 2, {}),
    "zero3": (2, 2, {"zero_optimization": {"stage": 3}}),
    "tp2": (2, 4, {"parallel": {"tensor": 2}}),
    "pp2": (2, 4, {"parallel": {"pipeline": 2}}),
    "tp2 x pp2": (4, 4, {"parallel": {"tensor": 2, "pipeline": 2}}),
}
"""Ranks, rows of a data rank in a microbatch, configuration."""
HOOKS = ("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping", "on_train_batch_end")
pytestmark = pytest.mark.long  # every run imports Lightning in each rank


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("grid", ["zero3", "pp2", "dp2"])
def test_a_hook_that_looks_for_gradients_is_refused_on_every_rank(grid: str, hook: str, tmp_path: Path) -> None:
    ranks, rows, config = GRIDS[grid]
    for said in errors_of(LitCase(folder=str(tmp_path), config=config, rows=rows, hook=hook), ranks):
        assert said.startswith("EngineError: param.grad was read or written") and "eng.gradients()" in said


@pytest.mark.parametrize("grid", GRIDS)
def test_what_a_hook_writes_into_the_gradients_of_the_engine_counts(grid: str, tmp_path: Path) -> None:
    ranks, rows, config = GRIDS[grid]
    changes: dict[str, Any] = {"halves": True}
    host = run_lit(LitCase(folder=str(tmp_path / "host"), rows=4, **changes), 1)
    plain = run_lit(LitCase(folder=str(tmp_path / "plain"), rows=4), 1)
    found = run_lit(LitCase(folder=str(tmp_path / "found"), config=config, rows=rows, **changes), ranks)
    assert found.losses == pytest.approx(host.losses, rel=1e-5) and host.losses != plain.losses
