"""Every ZeRO stage on every grid gives the losses, norms and weights of one process, in all its modes.

``-m long`` runs every model on every grid in all of them; by default ``test_covering_array`` stands for them.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import pytest

from engine.models.decoder import loss_sum
from engine.verify import Parity, TrainingRecord, VerifyOptions, train_alone, train_on_grid
from tests import models
from tests.engine.parity.test_parity import config_for
from tests.engine.parity.test_parity_axes import ALL, SHARED
from tests.tables import Table

RunRanks = Callable[..., list[Any]]

GRIDS = {
    "dp2": {"data": 2},
    "dp4": {"data": 4},
    "dp2 x tp2": {"data": 2, "tensor": 2},
    "dp2 x pp2": {"data": 2, "pipeline": 2},
    "dp2 x pp4": {"data": 2, "pipeline": 4},
    "dp2 x tp2 x pp2": {"data": 2, "tensor": 2, "pipeline": 2},
}
Way = dict[str, Any]
"""``zero_optimization``, and what else a way of running it changes."""
WAYS: list[Way] = [
    {"stage": 0},
    {"stage": 1},
    {"stage": 2},
    {"stage": 2, "reduce": "microbatch"},
    {"stage": 3},
    {"stage": 3, "gather": "step"},
    {"stage": 3, "reduce": "microbatch"},
    {"stage": 3, "reduce": "microbatch", "gather": "step"},
]
CASES = [(name, grid) for name in ALL for grid in GRIDS if name in SHARED or "tp" not in grid]


def settings(grid: str, way: Way, number: int) -> dict[str, Any]:
    """8 microbatches of two rows in all (of one row on four data ranks); schedule and recomputation take turns."""
    sizes = {"data": 1} | GRIDS[grid]
    return config_for(
        sizes["data"],
        0,
        zero_optimization=way | {"reduce_bucket_size": 6000},
        parallel=sizes | {"schedule": ("1f1b", "gpipe")[number % 2 if "pp" in grid else 0]},
        activation_checkpointing={"mode": ("none", "full")[number % 4 == 2]},
    )


def train_all(name: str, grid: str, ways: Sequence[int]) -> list[TrainingRecord]:
    """Body of a rank: every way on the grid, and at the end once in one process."""
    wishes = VerifyOptions(loss_sum if name.startswith("decoder") else None)
    batches = models.batches_for(name.split()[0], 16)
    runs = [train_on_grid(ALL[name], settings(grid, WAYS[way], way), batches, wishes) for way in ways]
    if not runs[0].weights:
        return []
    return [*runs, train_alone(ALL[name], settings(grid, WAYS[0], 0), batches, wishes)]


def check(run_ranks: RunRanks, table: Table, name: str, grid: str, ways: Sequence[int]) -> None:
    """All ways hold and agree with each other; the table keeps the worst of each stage."""
    *runs, alone = run_ranks(train_all, prod(GRIDS[grid].values()), name, grid, ways, seconds=600.0)[0]
    worst: dict[int, float] = {}
    for way, run in zip(ways, runs, strict=True):
        result = Parity(run, alone)
        assert result.holds(), f"{name} on {grid}, {WAYS[way]}: {result}"
        stage = WAYS[way]["stage"]
        worst[stage] = max(worst.get(stage, 0.0), result.loss)
        assert run.losses == pytest.approx(runs[0].losses, rel=1e-6), f"{WAYS[way]}: stages agree"
        assert run.norms == pytest.approx(runs[0].norms, rel=1e-6), f"{WAYS[way]}: stages agree"
    assert all(norm > 0.25 for norm in alone.norms), "clipping must be active"
    table.cells[name, grid] = " / ".join(f"{worst[stage]:.0e}" for stage in sorted(worst))


@pytest.mark.long
@pytest.mark.parametrize(("name", "grid"), CASES)
def test_every_model_on_every_grid_in_all_modes(run_ranks: RunRanks, zero_table: Table, name: str, grid: str) -> None:
    check(run_ranks, zero_table, name, grid, range(len(WAYS)))
