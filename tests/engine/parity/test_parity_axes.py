"""Data, tensor and pipeline parallelism, alone and together, give the losses, norms and weights of one process.

``-m long`` runs every model on every grid in all ways; by default the rows of ``test_covering_array`` stand for them.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from math import prod
from typing import Any

import pytest
from torch import nn

from engine.models.decoder import loss_sum
from engine.verify import Parity, VerifyOptions, train_alone, train_on_grid, verify
from tests import models
from tests.engine.parity.test_parity import config_for
from tests.kernels.interpreter import repair
from tests.selection import wide
from tests.tables import Table

RunRanks = Callable[..., list[Any]]

# Dropout draws other masks inside tensor-parallel layers than one process does, so it is off where they are tried.
SHARED: dict[str, Callable[[], nn.Module]] = {
    "decoder": partial(models.decoder, layers=4),
    "decoder tied": partial(models.decoder, tied=True, layers=4),
    "decoder repeated": models.repeated,
    "llama": partial(models.llama, layers=4),
    "qwen3": partial(models.qwen3, layers=4),
    "gpt2": partial(models.gpt2, layers=4, dropout=0.0),
}
CHAINED: dict[str, Callable[[], nn.Module]] = {
    "decoder dropout": partial(models.decoder, dropout=0.2, layers=4),
    "nano": partial(models.nano, layers=4),
    "t5": models.t5,
    "crossing": models.crossing,
}
ALL = SHARED | CHAINED
GRIDS = {
    "dp2": {"data": 2},
    "tp2": {"tensor": 2},
    "tp4": {"tensor": 4},
    "pp2": {"pipeline": 2},
    "pp4": {"pipeline": 4},
    "dp2 x tp2": {"data": 2, "tensor": 2},
    "dp2 x pp2": {"data": 2, "pipeline": 2},
    "tp2 x pp2": {"tensor": 2, "pipeline": 2},
    "dp2 x tp2 x pp2": {"data": 2, "tensor": 2, "pipeline": 2},
}
CASES = [(name, grid) for name in ALL for grid in GRIDS if name in SHARED or "tp" not in grid]
Way = tuple[int, str, str]
"""ZeRO stage, schedule, activation checkpointing."""
WAYS: list[Way] = list(product((0, 1), ("1f1b", "gpipe"), ("none", "full")))


def settings(grid: str, way: Way) -> dict[str, Any]:
    """The configuration of a case: 8 microbatches of two rows in all, at least 4 a data rank."""
    stage, schedule, recompute = way
    sizes = {"data": 1} | GRIDS[grid]
    changes = {"parallel": sizes | {"schedule": schedule}, "activation_checkpointing": {"mode": recompute}}
    return config_for(sizes["data"], stage, **changes)


def train_all(name: str, grid: str, ways: Sequence[Way]) -> list[Parity]:
    """Body of a rank: every way on the grid, and once in one process."""
    wishes = VerifyOptions(loss_sum if name.startswith("decoder") else None)
    batches = models.batches_for(name.split()[0], 16)
    runs = [train_on_grid(ALL[name], settings(grid, way), batches, wishes) for way in ways]
    if not runs[0].weights:
        return []
    alone = train_alone(ALL[name], settings(grid, ways[0]), batches, wishes)
    return [Parity(run, alone) for run in runs]


def check(run_ranks: RunRanks, table: Table, name: str, grid: str, ways: Sequence[Way]) -> None:
    """All ways hold; the table keeps the worst."""
    results = run_ranks(train_all, prod(GRIDS[grid].values()), name, grid, ways, seconds=300.0)[0]
    for way, result in zip(ways, results, strict=True):
        assert result.holds(), f"{name} on {grid}, {way}: {result}"
        assert all(norm > 0.25 for norm in result.reference.norms), "clipping must be active"
    table.cells[name, grid] = f"{max(result.loss for result in results):.0e}"


def train_interpreted(name: str, grid: str, short: bool) -> Parity | None:
    """Body of a rank: every kernel is Triton's, interpreted, which takes time by the row: four microbatches."""
    repair()
    batches, model = models.batches_for(name.split()[0], 8, 2), ALL[name]
    config = settings(grid, WAYS[0]) | {"kernels": "triton", "train_batch_size": 8}
    if short:
        batches = [{key: tokens[:4, :6].contiguous() for key, tokens in batch.items()} for batch in batches]
        config, model = config | {"train_batch_size": 4}, partial(models.decoder, layers=1)
    return verify(model, config, batches, loss_sum if name.startswith("decoder") else None)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("name", "grid", "short"),
    [
        wide("decoder", "tp2", True),
        wide("decoder", "dp2", True),
        *(pytest.param(n, g, False, marks=pytest.mark.long) for n, g in CASES if g in ("dp2 x tp2", "tp2", "pp2")),
    ],
)
def test_triton_kernels_on_a_grid(run_ranks: RunRanks, name: str, grid: str, short: bool) -> None:
    result = run_ranks(train_interpreted, prod(GRIDS[grid].values()), name, grid, short, seconds=800.0)[0]
    assert result.holds(), str(result)


@pytest.mark.long
@pytest.mark.parametrize(("name", "grid"), CASES)
def test_every_way_of_running_it(run_ranks: RunRanks, axes_table: Table, name: str, grid: str) -> None:
    pipelined = "pp" in grid
    check(run_ranks, axes_table, name, grid, [way for way in WAYS if pipelined or way[1] == "1f1b"])
