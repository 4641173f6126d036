"""The emulated device itself: it computes as the CPU does, and finds what it is there to find."""

import copy
import ctypes
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.emulated_device import device as emulated
from tests.emulated_device.device import POLICIES, Policy, host_waits, load, policy

RunRanks = Callable[..., list[Any]]
ONE = "emulated:1"


def small_model() -> nn.Module:
    """Layers that torch computes in several ways: with a kernel of their own, by views, in place, at random."""
    torch.manual_seed(3)
    layers = [nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Dropout(0.1), nn.Linear(16, 5)]
    return nn.Sequential(nn.Embedding(7, 8), nn.Flatten(0, 1), *layers)


def losses_on(device: str, start: nn.Module) -> list[float]:
    """Losses of three steps."""
    model, found = copy.deepcopy(start).to(device), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    for seed in range(3):
        ids, target = torch.randint(0, 7, (2, 4), generator=generator), torch.randint(0, 5, (8,), generator=generator)
        torch.manual_seed(seed)  # the CPU's generator and those of all devices
        loss = F.cross_entropy(model(ids.to(device)), target.to(device))
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def trained_under_each_policy() -> tuple[list[float], dict[Policy, list[float]]]:
    """On the CPU, and on the device."""
    load()
    start = small_model()
    found = {}
    for name in POLICIES:
        with policy(name):
            found[name] = losses_on(ONE, start)
    return losses_on("cpu", start), found


def test_it_trains_to_the_bits_of_the_cpu_whenever_tasks_run(run_ranks: RunRanks) -> None:
    ((expected, found),) = run_ranks(trained_under_each_policy, 1)
    assert found == dict.fromkeys(POLICIES, expected) and len(set(expected)) == 3


def ones_by_a_side_stream(waits: bool) -> list[float]:
    """What the host sees of ones that a side stream wrote, by policy."""
    load()
    main, found = torch.device("emulated", 0), []
    for name in POLICIES:
        with policy(name, seed=5):
            side = torch.Stream(device=main)
            written = torch.zeros(1, device=main)
            if waits:
                side.wait_stream(torch.accelerator.current_stream(main))
            with side:
                written += 1
            if waits:
                torch.accelerator.current_stream(main).wait_stream(side)
            found.append(written.item())
    return found


def test_a_missing_wait_shows_and_one_that_is_made_holds(run_ranks: RunRanks) -> None:
    assert run_ranks(ones_by_a_side_stream, 1, True) == [[1.0] * 4]
    ((at_once, late, early, _),) = run_ranks(ones_by_a_side_stream, 1, False)
    assert (at_once, late) == (1.0, 0.0), "the main stream does not wait for the side stream"
    assert early == 0.0, "the side stream does not wait for the zeros, which come after its one"


def reused_memory() -> tuple[float, float]:
    """What a side stream reads of memory that its owner frees, without and with ``record_stream``."""
    load()
    main, found = torch.device("emulated", 0), []
    for recorded in (False, True):
        with policy("late"):
            side, given = torch.Stream(device=main), torch.ones(1, device=main)
            side.wait_stream(torch.accelerator.current_stream(main))
            with side:
                taken = given + 1
            if recorded:
                given.record_stream(side)
            del given
            torch.full((1,), 7.0, device=main)  # takes the memory, unless somebody else uses it
            torch.accelerator.synchronize(main)
            found.append(taken.item())
    return found[0], found[1]


def test_memory_is_given_away_while_another_stream_reads_it_unless_that_is_recorded(run_ranks: RunRanks) -> None:
    assert run_ranks(reused_memory, 1) == [(8.0, 2.0)]


def mix_ups() -> list[str]:
    """What is said of operators whose tensors are on two devices."""
    load()
    here, there, cpu = torch.ones(3, device="emulated:0"), torch.ones(3, device="emulated:1"), torch.ones(3)
    found = []
    calls: list[Callable[[], Tensor]] = [
        lambda: here + there,
        lambda: here + cpu,
        lambda: here.dot(there),
        lambda: F.embedding(torch.tensor([0]), here.view(3, 1)),
        lambda: here.view(3, 1)[torch.tensor([0])],
    ]
    for call in calls:
        with pytest.raises(RuntimeError) as caught:
            call()
        found.append(str(caught.value))
    assert (here + torch.tensor(1.0)).tolist() == [2.0] * 3, "a number may be on the CPU"
    return found


def test_tensors_of_two_devices_do_not_meet(run_ranks: RunRanks) -> None:
    (found,) = run_ranks(mix_ups, 1)
    assert all("device" in sentence and "emulated" in sentence for sentence in found)


def counted() -> tuple[dict[str, int], list[bool]]:
    """The host's waits of calls that are known to wait, and whether a copy has come before its event."""
    load()
    with policy("late"), host_waits() as waits:
        x = torch.arange(4.0).to("emulated:0", non_blocking=True)  # a staged copy
        y = torch.arange(4.0).to("emulated:0")
        (x * y).sum().item()
        x.cpu()
        x.nonzero()
        torch.equal(x, y)
        copied = (x + y).to("cpu", non_blocking=True)
        event = torch.Event("emulated")
        event.record()
        before = bool(copied.isnan().all())
        event.synchronize()
        torch.accelerator.synchronize(x.device)
        return dict(waits.kinds), [before, copied.tolist() == [0.0, 2.0, 4.0, 6.0]]


def test_every_wait_of_the_host_is_counted(run_ranks: RunRanks) -> None:
    (found,) = run_ranks(counted, 1)
    kinds = {"copy to device": 1, "item": 1, "copy to host": 1, "content": 2, "event": 1, "device": 1, "staged copy": 1}
    assert found == (kinds, [True, True])


def touched() -> tuple[int, str]:
    """The signal that ends a process which reads device memory, and its words."""
    load()
    x = torch.ones(4, device="emulated:0")
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        os.dup2(writing, 2)
        ctypes.string_at(x.data_ptr(), 4)
        os._exit(0)
    os.close(writing)
    _, status = os.waitpid(child, 0)
    return os.WTERMSIG(status), os.read(reading, 200).decode()


def test_the_host_cannot_read_its_memory(run_ranks: RunRanks) -> None:
    ((ended, words),) = run_ranks(touched, 1)
    assert ended == signal.SIGSEGV
    assert words.startswith("the host touched memory of the emulated device; copy it with .cpu() first.")


def seeded() -> bool:
    """Whether the generator of a device is its own."""
    load()
    module: Any = torch.get_device_module(emulated.NAME)
    torch.manual_seed(4)
    state, before = torch.get_rng_state(), module.get_rng_state(ONE)
    torch.rand(3, device=ONE)
    same = torch.equal(torch.get_rng_state(), state) and not torch.equal(module.get_rng_state(ONE), before)
    module.set_rng_state(before, ONE)
    return same and torch.equal(torch.rand(3, device=ONE).cpu(), torch.rand(3))


def test_it_draws_from_a_generator_of_its_own(run_ranks: RunRanks) -> None:
    assert run_ranks(seeded, 1) == [True]
