"""Processes with accelerators and a gloo group: what they send goes through memory of the host.

The addresses of an emulated device cannot be read, so that a rank whose gloo is given one of them ends.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from engine.parallel.comm.world import World
from tests.emulated_device.device import NAME, load
from tests.emulated_device.training import Trial, train
from tests.selection import wide

RunRanks = Callable[..., list[Any]]

TRIALS = {
    "dp2 ZeRO-0": Trial({"data": 2}, 0),
    "dp2 ZeRO-1": Trial({"data": 2}, 1, {"zero_optimization": {"stage": 1}}),
    "dp2 ZeRO-3": Trial({"data": 2}, 3),
    "tp2": Trial({"tensor": 2}),
    "tp2 in sequence": Trial({"tensor": 2, "sequence_parallel": True}),
    "pp2": Trial({"pipeline": 2}),
    "pp2 tied": Trial({"pipeline": 2, "schedule": "zb-h1"}, tied=True),
    "dp2 x tp2 x pp2": Trial({"data": 2, "tensor": 2, "pipeline": 2}, 1),
}


def compared(trial: Trial) -> str:
    """Body of a rank: what differs from the same ranks on the CPU."""
    load()
    rank, size = dist.get_rank(), dist.get_world_size()
    devices = torch.device(NAME, 0), torch.device("cpu")
    found, expected = (train(trial, World(rank, size, rank, device)) for device in devices)
    return expected.differs_from(found)


@pytest.mark.parametrize("name", ["dp2 ZeRO-1", "pp2", *(wide(name, id=f"{name}, every") for name in TRIALS)])
def test_ranks_of_a_gloo_group_train_on_devices_to_the_bits_of_the_cpu(run_ranks: RunRanks, name: str) -> None:
    trial = TRIALS[name]
    assert run_ranks(compared, trial.ranks, trial) == [""] * trial.ranks
