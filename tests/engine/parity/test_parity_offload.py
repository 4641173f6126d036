"""Optimizer state on the host, or on disk, on every kind of grid: the promise of the project holds."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from engine.models.decoder import loss_sum
from engine.verify import Parity, verify
from tests import models
from tests.engine.parity.test_axes import GRIDS, ranks
from tests.engine.parity.test_parity import config_for
from tests.zero.offload.failing_disk import EIO, failing

RunRanks = Callable[..., list[Any]]


def train(config: dict[str, Any]) -> Parity | None:
    """Body of a rank."""
    return verify(lambda: models.decoder(layers=4, tied=True), config, models.batches_for("decoder", 16), loss_sum)


def train_once_more(config: dict[str, Any]) -> tuple[Parity | None, int]:
    """Body of a rank: the disk of the last one fails in one update; the result, and how often it did."""
    fails = dist.get_rank() == dist.get_world_size() - 1
    with failing("write", EIO, "bucket-0-", 2 * fails) as met:
        return train(config), len(met)


@pytest.mark.long
@pytest.mark.parametrize("device", ["cpu", "nvme"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("grid", ["dp2", "tp2 x pp2", "dp2 x tp2", "dp2 x pp2", "dp2 x tp2 x pp2"])
def test_every_grid_equals_one_process(run_ranks: RunRanks, tmp_path: Path, grid: str, stage: int, device: str) -> None:
    offload = {"device": device, "ratio": 0.7, "nvme_path": str(tmp_path)}
    reduce = "microbatch" if stage >= 2 else "step"
    zero = {"stage": stage, "reduce": reduce, "reduce_bucket_size": 6000, "offload_optimizer": offload}
    config = config_for(1, stage, parallel={"data": 1} | GRIDS[grid], zero_optimization=zero)
    result = run_ranks(train, ranks(grid), config)[0]
    assert result.holds(), str(result)
    assert all(norm > 0.25 for norm in result.reference.norms), "clipping must be active"


@pytest.mark.long
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("grid", ["dp2 x pp2", "dp2 x tp2", "dp2 x tp2 x pp2"])
def test_every_grid_repeats_an_update_that_one_disk_breaks_off(
    run_ranks: RunRanks, tmp_path: Path, grid: str, stage: int
) -> None:
    offload = {"device": "nvme", "ratio": 0.7, "nvme_path": str(tmp_path)}
    zero = {"stage": stage, "reduce_bucket_size": 6000, "offload_optimizer": offload}
    config = config_for(1, stage, parallel={"data": 1} | GRIDS[grid], zero_optimization=zero)
    answers = run_ranks(train_once_more, ranks(grid), config)
    assert [met for _, met in answers] == [0] * (ranks(grid) - 1) + [2]
    assert answers[0][0].holds(), str(answers[0][0])
