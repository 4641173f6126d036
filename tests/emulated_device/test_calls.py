"""What else a user does with an engine, on one emulated device: the same to the bit as on the CPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import engine
from engine.models.decoder import loss_sum
from engine.parallel.comm.world import World
from tests import models
from tests.emulated_device.device import NAME, load, policy
from tests.emulated_device.training import ROWS, Trial

RunRanks = Callable[..., list[Any]]
BATCHES = models.batches_for("decoder", ROWS, 3)


def evaluated(eng: Any, folder: str) -> list[Any]:
    """A step, an evaluation, and outputs."""
    report = eng.train_batch(BATCHES[0])
    output = eng.predict({"input_ids": BATCHES[1]["input_ids"]})
    return [report.loss, eng.eval_batch(BATCHES[1]).loss, output.double().sum().item()]


def own_loop(eng: Any, folder: str) -> list[Any]:
    """The loop of three calls; its loss is made on the device of the engine."""
    for row in range(ROWS):
        micro = {name: rows[row : row + 1] for name, rows in BATCHES[0].items()}
        total, weight = loss_sum(eng(micro), {name: rows.to(eng.device) for name, rows in micro.items()})
        eng.backward(total / weight)
    eng.step()
    return [eng.step_count, eng.train_batch(BATCHES[1]).loss]


def saved(eng: Any, folder: str) -> list[Any]:
    """A checkpoint that is written behind a step, and loaded again."""
    eng.train_batch(BATCHES[0])
    handle = eng.save_checkpoint(folder)
    first = eng.train_batch(BATCHES[1]).loss
    handle.wait()
    eng.load_checkpoint(folder)
    return [first, eng.step_count, eng.train_batch(BATCHES[1]).loss]


CALLS = {"evaluated": evaluated, "own loop": own_loop, "saved": saved}


def on_both(name: str, folder: str) -> list[list[Any]]:
    """Body of a process: what a call gives on the CPU and on the device."""
    load()
    found = []
    for device in ("cpu", f"{NAME}:0"):
        trial = Trial(dropout=0.1)
        micro = {key: rows[:1] for key, rows in BATCHES[0].items()}
        with policy("late"), sdpa_kernel(SDPBackend.MATH):
            world = World(0, 1, 0, torch.device(device))
            with engine.initialize(trial.build(), trial.config, loss_sum, micro, world=world) as eng:
                found.append(CALLS[name](eng, f"{folder}/{device}"))
    return found


@pytest.mark.long
@pytest.mark.parametrize("name", CALLS)
def test_other_calls_equal_those_on_the_cpu(run_ranks: RunRanks, name: str, tmp_path: Any) -> None:
    (((*here,), (*there,)),) = run_ranks(on_both, 1, name, str(tmp_path))
    assert there == here


def sizes() -> list[int]:
    """Body of a process: elements of a bucket on the CPU and on the device."""
    load()
    found, trial = [], Trial(changes={"zero_optimization": {"stage": 1}})
    micro = {key: rows[:1] for key, rows in BATCHES[0].items()}
    for device in ("cpu", f"{NAME}:0"):
        world = World(0, 1, 0, torch.device(device))
        with engine.initialize(trial.build(), trial.config, loss_sum, micro, world=world) as eng:
            found.append(eng.config.zero_optimization.bucket_elements)
    return found


def test_buckets_of_a_device_are_larger_than_those_of_the_host(run_ranks: RunRanks) -> None:
    assert run_ranks(sizes, 1) == [[4_000_000, 64_000_000]]
