"""The door to devices, on one that is no GPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from engine.kernels.device import (
    ACCELERATORS,
    SideStream,
    collectives_for,
    compiles_triton,
    device_generator,
    device_name,
    find_accelerator,
    finish,
    is_host,
    peak_allocated,
    record_event,
    use_device,
)
from engine.kernels.optim.update_rules import AdamRule, adam_
from engine.parallel.model.rng_streams import generators_of, keyed_generators
from engine.parallel.model.side_effects import restoring_state
from engine.step.update import Condition, DeviceDecidedUpdate
from tests.emulated_device.device import NAME, host_waits, load, policy

RunRanks = Callable[..., list[Any]]
CPU = torch.device("cpu")


def test_the_host_has_nothing_to_wait_for_and_no_name() -> None:
    use_device(CPU)
    finish(CPU)
    assert is_host(CPU) and record_event(CPU) is None and device_generator(CPU) is None
    assert peak_allocated(CPU) is None and device_name(CPU) == "cpu" and collectives_for(CPU) == "gloo"
    assert generators_of(torch.device("meta")) == [torch.default_generator] and not is_host(torch.device("meta"))


def test_each_accelerator_has_its_collectives() -> None:
    assert {name: row.collectives for name, row in ACCELERATORS.items()} == {"cuda": "nccl", "xpu": "xccl"}
    assert [compiles_triton(torch.device(name)) for name in ("cuda", "xpu", "cpu")] == [True, False, False]


def test_a_rank_takes_the_first_accelerator_that_it_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: False)
    assert find_accelerator() is None
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    assert find_accelerator() == "xpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert find_accelerator() == "cuda"


def used() -> dict[str, Any]:
    """What the door says of a device that it has no row for."""
    load()
    device = torch.device(NAME, 3)
    use_device(device)
    with policy("late"), host_waits(3) as waits:
        held = torch.zeros(1000, device=device)
        copied = (held + 1).to("cpu", non_blocking=True)
        event = record_event(device)
        assert event is not None
        early = bool(copied.isnan().all())
        event.synchronize()
        finish(device)
        return {
            "early": early, "copied": copied.sum().item(), "name": device_name(device), "waits": dict(waits.kinds),
            "peak": peak_allocated(device), "collectives": collectives_for(device),
        }  # fmt: skip


def test_another_device_is_used_by_its_name(run_ranks: RunRanks) -> None:
    (found,) = run_ranks(used, 1)
    assert found.pop("peak") >= 8000
    assert found == {
        "early": True, "copied": 1000.0, "name": "emulated device", "waits": {"event": 1, "device": 1},
        "collectives": "gloo",
    }  # fmt: skip


def streamed() -> list[float]:
    """What the current stream sees of a tensor that side streams change, on a device whose streams are late."""
    load()
    device = torch.device(NAME, 1)
    use_device(device)
    with policy("late"):
        held, seen = torch.zeros(100, device=device), []
        first, second = SideStream(device), SideStream(device)
        with first.behind():
            held.add_(1)
            ready = record_event(device)
        with second.after([ready, None]):
            held.mul_(3)
        second.join()
        seen.append(held.sum().item())
        first.join()
    with SideStream(CPU).behind(), SideStream(CPU).after([None]):
        seen.append(torch.ones(1).item())
    SideStream(CPU).join()
    return seen


def test_side_streams_begin_and_end_where_they_are_told(run_ranks: RunRanks) -> None:
    assert run_ranks(streamed, 1) == [[300.0, 1.0]]


def drawn() -> tuple[list[float], list[float], bool]:
    """Numbers that the keyed streams give on device and CPU, and whether a trial run puts the generator back."""
    load()
    device = torch.device(NAME, 2)
    numbers = []
    for where in (device, CPU):
        with keyed_generators(where, 7, 1):
            numbers.append(torch.rand(3, device=where).tolist())
    own = generators_of(device)[1]
    before = own.get_state()
    with restoring_state(torch.nn.Module(), device):
        torch.rand(3, device=device)
        assert not torch.equal(own.get_state(), before)
    return numbers[0], numbers[1], torch.equal(own.get_state(), before)


def test_random_streams_reach_the_generator_of_any_device(run_ranks: RunRanks) -> None:
    ((there, here, restored),) = run_ranks(drawn, 1)
    assert there == here and restored


class NoOptimizer:
    """Has nothing to update."""

    inner = torch.optim.SGD([torch.zeros(1)], lr=0.1)


def decided() -> tuple[list[float], bool]:
    """The control sums that the host reads while the device is late."""
    load()
    device: Any = torch.device(NAME, 0)
    with policy("late"):
        values = torch.arange(9.0, dtype=torch.float64, device=device) * 0 + 2
        condition = Condition(scale=1.0, max_norm=1.0, finite=True, loss=True)
        optimizer: Any = NoOptimizer()
        return DeviceDecidedUpdate(values, condition, optimizer).read()


def test_the_host_reads_a_decision_when_it_has_come(run_ranks: RunRanks) -> None:
    ((values, _),) = run_ranks(decided, 1)
    assert values == [2.0] * len(values) and len(values) == 9


def updated() -> dict[str, int]:
    """The host's waits in an update of several tensors."""
    load()
    weights, grads, first, second = ([torch.ones(4, device=NAME) for _ in range(3)] for _ in range(4))
    rule = AdamRule(lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0, decoupled=True)
    with host_waits() as waits:
        adam_(weights, grads, first, second, 1, rule)
    return dict(waits.kinds)


def test_an_update_of_adam_lets_the_host_go_on(run_ranks: RunRanks) -> None:
    assert run_ranks(updated, 1) == [{}]
