"""Ranks that are threads and share one device: equal to the CPU to the bit, whenever the device does its work."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from engine.errors import GridError
from engine.models.decoder import loss_sum
from engine.parallel.comm.world import World
from engine.verify import verify
from tests import models
from tests.emulated_device.device import NAME, POLICIES, Policy, load, policy
from tests.emulated_device.streamed_backend import streamed
from tests.emulated_device.test_training import TRIALS
from tests.emulated_device.training import Enter, Trial, on_cpu, on_devices
from tests.engine.parity.test_parity import config_for
from tests.selection import wide

RunRanks = Callable[..., list[Any]]

DROPOUT = Trial({"tensor": 2, "sequence_parallel": True}, dropout=0.2)
"""Two ranks draw from the generator of one device, and wait for each other between two draws of a block."""
SHARED = {
    **{name: TRIALS[name] for name in TRIALS if name.startswith(("dp2 ZeRO", "tp2", "pp2 1f1b", "pp2 zb", "dp2 x"))},
    "dropout": DROPOUT,
    "offloaded": TRIALS["offloaded"],
    "parameters on the host": TRIALS["parameters on the host"],
    "activations on the host": TRIALS["activations on the host"],
}


def plain(world: World) -> World:
    """Return ``world``: collectives run on the stream of the rank that waits for them."""
    return world


def compared(trial: Trial, policies: tuple[Policy, ...], ways: tuple[Enter, ...]) -> list[str]:
    """Body of a process: what differs from the CPU under each policy and way of the collectives."""
    expected, found = on_cpu(trial), []
    for name in policies:
        for enter in ways:
            with policy(name, seed=11):
                found.append(expected.differs_from(on_devices(trial, enter, shared=True)))
    return found


@pytest.mark.parametrize(
    ("name", "policies", "ways"),
    [
        ("dp2 ZeRO-3", ("late",), (streamed,)),
        ("dropout", ("random",), (plain,)),
        *(wide(name, POLICIES, (plain,), id=f"{name}, every order") for name in SHARED),
    ],
)
def test_ranks_that_share_a_device_train_to_the_bits_of_the_cpu(
    run_ranks: RunRanks, name: str, policies: tuple[Policy, ...], ways: tuple[Enter, ...]
) -> None:
    (found,) = run_ranks(compared, 1, SHARED[name], policies, ways)
    assert found == [""] * len(policies) * len(ways)


def verified() -> bool:
    """Body of a process: the grid of threads on one device beside plain torch on that device."""
    load()
    config = config_for(4, 3, parallel={"data": 2, "pipeline": 2}, kernels="reference")
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        found = verify(models.decoder, config, models.batches_for("decoder", 16), loss_sum, threads=4, device=NAME)
    return found is not None and found.holds()


@pytest.mark.long
def test_verify_trains_threads_on_the_device_that_it_is_given(run_ranks: RunRanks) -> None:
    assert run_ranks(verified, 1) == [True]


def test_verify_refuses_a_device_that_no_threads_share() -> None:
    with pytest.raises(GridError, match=r"device='cuda' without threads.*give threads=N"):
        verify(models.decoder, config_for(1, 0), models.batches_for("decoder", 16), loss_sum, device="cuda")
