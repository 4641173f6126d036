"""Where the host waits for the device in a step: in exactly these places, so many times a rank."""

from collections import Counter
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import pytest
from torch.nn.attention import SDPBackend, sdpa_kernel

import engine
from engine.models.decoder import loss_sum
from engine.parallel.comm.world import World
from engine.zero.optim import sharded_optimizer
from tests import models
from tests.emulated_device.device import host_waits, policy
from tests.emulated_device.test_training import TRIALS
from tests.emulated_device.training import ROWS, Trial, on_devices
from tests.parallel.context.test_context_training import batches_of, llama
from tests.selection import wide

RunRanks = Callable[..., list[Any]]
Waits = Mapping[str, int]

ON_HOST: Waits = MappingProxyType({"engine/step/update.py _decide: copy to host": 1})
"""The control sums, from which the host decides on the update."""
ON_DEVICE: Waits = MappingProxyType({"engine/step/update.py read: event": 1})
"""The same when the device decides: the update is launched before the host waits."""
BATCH_CHECK: Waits = MappingProxyType(
    {
        "parallel/comm/agreement.py gather_from_all: copy to device": 1,
        "parallel/comm/agreement.py gather_from_all: copy to host": 1,
    }
)
"""Before the first forward, where several ranks are given the same batch."""


def waits_of_steps(trial: Trial, world: World) -> list[dict[str, int]]:
    """Body of a rank: its waits in each of four steps."""
    found = []
    batches = models.batches_for("decoder", ROWS, 4)
    micro = {name: rows[:1] for name, rows in batches[0].items()}
    with engine.initialize(trial.build(), trial.config, loss_sum, micro, world=world) as eng:
        share = ROWS // eng.grid.dp
        rows = slice(eng.grid.coord().dp * share, (eng.grid.coord().dp + 1) * share)
        for batch in batches:
            with host_waits(world.rank) as waits:
                eng.train_batch({name: all_[rows] for name, all_ in batch.items()})
            found.append(dict(waits.places))
    return found


def measured(trial: Trial, on_device: bool) -> list[dict[str, int]]:
    """Body of a process."""
    with pytest.MonkeyPatch.context() as patch, policy("late"):
        if on_device:  # what the Triton kernel does is done by its reference
            patch.setattr(sharded_optimizer, "fits_adamw_kernel", lambda weights, kernels: weights.numel() > 0)
        found: list[dict[str, int]] = on_devices(trial, body=waits_of_steps)
    return found


CASES = (
    ("dp2 ZeRO-3", True),
    wide("dp2 ZeRO-0", False),
    wide("dp2 ZeRO-1", False),
    wide("dp2 ZeRO-1", True),
    wide("dp2 ZeRO-2 by microbatch", False),
    wide("dp2 ZeRO-3", False),
    wide("tp2", False),
    wide("tp2 in sequence", True),
    wide("pp2 1f1b", True),
    wide("pp2 zb-v", False),
    wide("dp2 x tp2 x pp2 ZeRO-1", True),
    wide("dp2 x tp2 x pp2 ZeRO-3", True),
    wide("recomputed", False),
    wide("bf16", True),
)


@pytest.mark.parametrize(("name", "on_device"), CASES)
def test_the_host_waits_once_a_step(run_ranks: RunRanks, name: str, on_device: bool) -> None:
    trial = TRIALS[name]
    ((_, *later),) = run_ranks(measured, 1, trial, on_device)
    replica = trial.ranks > trial.parallel.get("data", 1)
    expected = Counter(ON_DEVICE if on_device else ON_HOST) + Counter(BATCH_CHECK if replica else {})
    assert later == [dict(expected)] * 3, "batches in pageable memory wait for nothing either"


def measured_transformers(form: str) -> dict[str, int]:
    """Body of a process: the waits of the second step of one rank."""
    trial, batches = Trial(changes={"kernels": "auto", "train_batch_size": 4}), batches_of(form)

    def body(trial: Trial, world: World) -> dict[str, int]:
        with engine.initialize(llama(), trial.config, None, batches[0], world=world) as eng:
            eng.train_batch(batches[0])
            with host_waits(world.rank) as waits:
                eng.train_batch(batches[1])
        return dict(waits.places)

    with policy("late"), sdpa_kernel(SDPBackend.MATH):
        found: dict[str, int] = on_devices(trial, body=body)
    return found


@pytest.mark.long
@pytest.mark.parametrize("form", ["plain", "left", "right"])
def test_the_host_waits_for_no_mask_of_transformers(run_ranks: RunRanks, form: str) -> None:
    """transformers asks in each forward if positions hold several documents, or if a mask hides anything."""
    assert run_ranks(measured_transformers, 1, form) == [dict(ON_HOST)]
