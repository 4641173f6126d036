"""What the user writes between steps reaches buckets that the host updates, as it reaches others."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from engine.engine import Engine
from tests.zero.offload.test_offloaded_training import Case, bits, settings, unequal
from tests.zero.small import batch, start

RunRanks = Callable[..., list[Any]]
FP32: Case = ("AdamW", "fp32", (0, "step"), 1.0)
BF16: Case = ("AdamW", "bf16", (0, "step"), 1.0)


def both(case: Case, train: Callable[[Engine], None], **changes: Any) -> list[str]:
    """Names of what differs between a run with state on the device and one with state on the host."""
    found = []
    for device in ("none", "cpu"):
        with start(settings(case, device, **changes)) as eng:
            train(eng)
            found.append(bits(eng))
    return unequal(*found)


def backwards(eng: Engine, step: int) -> None:
    for half in batch(eng, step).chunk(2):
        eng.backward(eng(half))


@pytest.mark.parametrize("case", [FP32, BF16], ids=["fp32", "bf16"])
def test_written_gradients_are_used(case: Case) -> None:
    def train(eng: Engine) -> None:
        for step in range(3):
            backwards(eng, step)
            with eng.gradients("up.*") as gradients:
                for gradient in gradients.values():
                    gradient.mul_(3.0)
            eng.step()

    assert not both(case, train)


@pytest.mark.parametrize("case", [FP32, BF16], ids=["fp32", "bf16"])
def test_written_weights_are_used(case: Case) -> None:
    def train(eng: Engine) -> None:
        eng.train_batch(batch(eng, 0))
        with torch.no_grad():
            eng.module.get_parameter("up.weight").clamp_(-0.1, 0.1)
        eng.train_batch(batch(eng, 1))
        with eng.masters("down.*") as masters:
            for master in masters.values():
                master.mul_(0.5)
        eng.train_batch(batch(eng, 2))

    assert not both(case, train)


def test_written_masters_keep_the_gradients_of_an_unfinished_step() -> None:
    def train(eng: Engine) -> None:
        eng.train_batch(batch(eng, 0))
        backwards(eng, 1)
        with eng.gradients():
            pass
        with eng.masters("down.*") as masters:
            for master in masters.values():
                master.mul_(0.5)
        eng.step()

    assert not both(BF16, train)


@pytest.mark.parametrize("case", [FP32, BF16], ids=["fp32", "bf16"])
def test_gradients_after_a_step_are_those_that_its_update_used(case: Case) -> None:
    found = []
    for device in ("none", "cpu"):
        with start(settings(case, device)) as eng:
            eng.train_batch(batch(eng, 0))
            with eng.gradients() as gradients:
                found.append({name: gradient.clone() for name, gradient in gradients.items()})
    assert not unequal(*found)


@pytest.mark.long
@pytest.mark.parametrize("stage", [0, 1])
def test_an_optimizer_of_torch_updates_on_the_host(stage: int) -> None:
    found = []
    for device in ("none", "cpu"):
        changes = settings(("AdamW", "bf16", (stage, "step"), 0.5), device) | {"optimizer": None}
        with start(changes, lambda groups: torch.optim.Adagrad(groups, lr=0.1)) as eng:
            for step in range(3):
                eng.train_batch(batch(eng, step))
            found.append(bits(eng))
    assert not unequal(*found)


def test_skipped_steps_and_unused_parameters() -> None:
    def train(eng: Engine) -> None:
        skipped = 0
        for step in range(6):
            skipped += eng.train_batch(batch(eng, step)).skipped
        assert skipped

    fp16: Case = ("AdamW", "fp16", (1, "step"), 1.0)
    assert not both(fp16, train, fp16={"enabled": True, "initial_scale_power": 40, "hysteresis": 1})
