"""Every kind of rank on one GPU: as threads that share it, and as processes of a gloo group."""

from collections.abc import Callable, Mapping
from math import prod
from types import MappingProxyType
from typing import Any

import pytest
import torch

from engine.models.decoder import loss_sum
from engine.verify import Parity, verify
from tests import models
from tests.engine.parity.test_parity import config_for

pytestmark = pytest.mark.gpu

RunRanks = Callable[..., list[Any]]

GRIDS: Mapping[str, tuple[Mapping[str, Any], int]] = MappingProxyType(
    {
        **{f"dp2 ZeRO-{stage}": ({"data": 2}, stage) for stage in range(4)},
        "tp2": ({"tensor": 2}, 0),
        "tp2 in sequence": ({"tensor": 2, "sequence_parallel": True}, 0),
        "pp2 1f1b": ({"pipeline": 2, "schedule": "1f1b"}, 0),
        "pp2 zb-h1": ({"pipeline": 2, "schedule": "zb-h1"}, 0),
        "dp2 x tp2 x pp2": ({"data": 2, "tensor": 2, "pipeline": 2}, 1),
        "dp2 x tp2 x pp2 ZeRO-3": ({"data": 2, "tensor": 2, "pipeline": 2}, 3),
    }
)
"""Sizes of the axes, and the ZeRO stage."""


def trained(name: str, threads: int | None) -> Parity | None:
    """Compare a grid with one process on the same GPU; TF32 would hide in the comparison."""
    torch.backends.cuda.matmul.allow_tf32 = False
    parallel, stage = GRIDS[name]
    config = config_for(parallel.get("data", 1), stage, parallel=dict(parallel))
    device = None if threads is None else "cuda"
    batches = models.batches_for("decoder", 16)
    return verify(models.decoder, config, batches, loss_sum, threads=threads, device=device)


def ranks_of(name: str) -> int:
    """Return the number of ranks of a grid."""
    return prod(GRIDS[name][0].get(axis, 1) for axis in ("data", "tensor", "pipeline"))


@pytest.mark.parametrize("name", GRIDS)
def test_threads_that_share_a_gpu_equal_one_process(name: str) -> None:
    result = trained(name, ranks_of(name))
    assert result is not None and result.holds(), str(result)


@pytest.mark.parametrize("name", ["dp2 ZeRO-1", "dp2 ZeRO-3", "tp2", "pp2 1f1b"])
def test_processes_of_a_gloo_group_that_share_a_gpu_equal_one_process(run_ranks: RunRanks, name: str) -> None:
    result = run_ranks(trained, ranks_of(name), name, None)[0]
    assert result is not None and result.holds(), str(result)
