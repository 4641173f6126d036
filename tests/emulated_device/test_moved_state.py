"""State that leaves a device with memory of its own between steps, in any order of its queues, and comes back."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import engine
from engine.models.decoder import loss_sum
from engine.parallel.comm.world import World
from tests import models
from tests.emulated_device.device import NAME, POLICIES, Policy, policy
from tests.emulated_device.training import ROWS, STEPS, Trained, Trial, on_devices
from tests.selection import wide

RunRanks = Callable[..., list[Any]]


def with_breaks(trial: Trial, world: World) -> tuple[Trained, int, int, int]:
    """Body of a rank: training whose state is away between steps; (result, bytes copied, planned, left in buckets)."""
    batches = models.batches_for("decoder", ROWS, STEPS)
    with sdpa_kernel(SDPBackend.MATH):
        micro = {name: rows[:1] for name, rows in batches[0].items()}
        with engine.initialize(trial.build(), trial.config, loss_sum, micro, world=world) as eng:
            share, place = ROWS // eng.grid.dp, eng.grid.coord().dp
            rows, reports, copied, left = slice(place * share, (place + 1) * share), [], 0, 0
            for batch in batches:
                reports.append(eng.train_batch({name: all_[rows] for name, all_ in batch.items()}))
                eng.offload_states(non_blocking=True)
                copied = eng._runtime.offloaded.bytes
                left = sum(flat.params.untyped_storage().nbytes() for flat in eng._runtime.buckets)
                eng.reload_states(non_blocking=True)
            planned = sum(eng.plan.rank(eng.grid.rank).state_bytes.values())
            weights = eng.full_state_dict()
    return Trained([one.loss for one in reports], [one.grad_norm for one in reports], weights), copied, planned, left


def compared(trial: Trial, policies: tuple[Policy, ...]) -> list[str]:
    """Body of a process: what differs from training without a break, and from the plan, under each policy."""
    expected, found = on_devices(trial), []
    for name in policies:
        with policy(name, seed=11):
            trained, copied, planned, left = on_devices(trial, body=with_breaks)
        bytes_ = "" if (copied, left) == (planned, 0) else f"copied {copied}, planned {planned}, left {left}"
        found.append(expected.differs_from(trained) or bytes_)
    return found


TRIALS = {
    "one rank, bf16": Trial({"data": 1}, 0, {"bf16": {"enabled": True}}),
    "dp2 ZeRO-1, bf16": Trial({"data": 2}, 1, {"bf16": {"enabled": True}}),
    "dp2 x tp2 ZeRO-3": Trial({"data": 2, "tensor": 2}, 3),
    "pp2": Trial({"pipeline": 2}, 0),
    "pp2, messages in int8": Trial({"pipeline": 2}, 0, {"wire": {"pipeline": "int8", "error_feedback": True}}),
}


@pytest.mark.parametrize(("name", "policies"), [wide(name, POLICIES, id=name) for name in TRIALS])
def test_state_leaves_and_comes_back_to_the_bit(run_ranks: RunRanks, name: str, policies: tuple[Policy, ...]) -> None:
    (found,) = run_ranks(compared, 1, TRIALS[name], policies)
    assert found == [""] * len(policies)


def on_device() -> int:
    """Bytes of all storages on devices, each once."""
    gc.collect()
    found = (thing for thing in gc.get_objects() if issubclass(type(thing), Tensor) and thing.device.type == NAME)
    storages = [tensor.untyped_storage() for tensor in found]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}.values())


def measured(trial: Trial, world: World) -> tuple[int, int, int]:
    """Body of a rank: (bytes on the device between steps, those left while all state is away, planned ones)."""
    batches = models.batches_for("decoder", ROWS, STEPS)
    with sdpa_kernel(SDPBackend.MATH):
        micro = {name: rows[:1] for name, rows in batches[0].items()}
        with engine.initialize(trial.build(), trial.config, loss_sum, micro, world=world) as eng:
            for batch in batches:
                eng.train_batch(batch)
            held = on_device()
            eng.offload_states()
            left = on_device()
            return held, left, sum(eng.plan.rank(0).state_bytes.values())


HOSTED = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}


def measured_alone() -> list[tuple[int, int, int]]:
    """Body of a process: one device without and with state on the host."""
    bf16 = {"bf16": {"enabled": True}}
    changes: list[dict[str, Any]] = [bf16, bf16 | {"zero_optimization": HOSTED}]
    return [on_devices(Trial({}, 0, each), body=measured) for each in changes]


@pytest.mark.long
def test_a_walk_over_a_devices_memory_finds_what_the_plan_counts(run_ranks: RunRanks) -> None:
    ((plain, hosted),) = run_ranks(measured_alone, 1)
    for held, left, planned in (plain, hosted):
        assert held - left == planned  # what is left is no state: buffers and scalars
    assert plain[1] == hosted[1] and plain[2] > hosted[2] > 0
