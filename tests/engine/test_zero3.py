"""ZeRO 3: sharded parameters on every grid give what one process gives, and bytes, order and memory are as planned."""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import pytest

from engine.decoder import loss_sum
from engine.verify import Parity, Wishes, train_alone, train_on_grid
from tests import models
from tests.engine.test_parity import config_for
from tests.engine.test_parity_axes import ALL, SHARED

RunRanks = Callable[..., list[Any]]

GRIDS = {
    "dp2": {"data": 2},
    "dp4": {"data": 4},
    "dp2 x tp2": {"data": 2, "tensor": 2},
    "dp2 x pp2": {"data": 2, "pipeline": 2},
}
Way = tuple[str, str, str, str]
"""reduce, gather, schedule, activation checkpointing."""
WAYS: list[Way] = [
    ("step", "microbatch", "1f1b", "none"),
    ("microbatch", "step", "1f1b", "none"),
    ("microbatch", "microbatch", "gpipe", "full"),
]


def settings(grid: str, way: Way) -> dict[str, Any]:
    """8 microbatches of two rows in all (one row on four data ranks)."""
    reduce, gather, schedule, recompute = way
    sizes = {"data": 1} | GRIDS[grid]
    zero = {"stage": 3, "reduce": reduce, "gather": gather}
    changes = {
        "parallel": sizes | {"schedule": schedule},
        "activation_checkpointing": {"mode": recompute},
        "zero_optimization": zero,
    }
    return config_for(sizes["data"], 3, **changes)


def train_all(name: str, grid: str, ways: Sequence[Way]) -> list[Parity]:
    """Body of a rank: every way on the grid, and once in one process."""
    wishes = Wishes(loss_sum if name.startswith("decoder") else None)
    batches = models.batches_for(name.split()[0], 16)
    runs = [train_on_grid(ALL[name], settings(grid, way), batches, wishes) for way in ways]
    if not runs[0].weights:
        return []
    alone = train_alone(ALL[name], settings(grid, ways[0]), batches, wishes)
    return [Parity(run, alone) for run in runs]


CASES = [
    (name, grid)
    for name in ALL
    for grid in GRIDS
    if (name in SHARED or "tp" not in grid) and (name == "decoder" or grid == "dp2" or grid == "dp2 x pp2")
]


@pytest.mark.parametrize(("name", "grid"), CASES)
def test_sharded_parameters_equal_one_process(run_ranks: RunRanks, name: str, grid: str) -> None:
    results = run_ranks(train_all, prod(GRIDS[grid].values()), name, grid, WAYS, seconds=300.0)[0]
    for way, result in zip(WAYS, results, strict=True):
        assert result.holds(), f"{name} on {grid}, {way}: {result}"
