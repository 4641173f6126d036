"""The moving average of sharded weights: that of the full ones, bytes as planned, kept in checkpoints on any grid."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.config import load_config
from engine.engine import Engine
from engine.errors import EngineError
from engine.models.decoder import loss_sum
from tests import models
from tests.parallel.comm.small_decoder import batch, on_threads
from tests.resumed_runs import second_half
from tests.selection import wide
from tests.zero.small import batch as rows
from tests.zero.small import start

RunRanks = Callable[..., list[Any]]
DECAY = 0.75
EMA: dict[str, Any] = {"ema": {"decay": DECAY}}
BF16: dict[str, Any] = {"bf16": {"enabled": True}}


def averaged(states: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The average of full weights after each update, as torch makes it."""
    found = {name: value.clone() for name, value in states[0].items()}
    for state in states[1:]:
        for name, value in state.items():
            found[name].lerp_(value, 1 - DECAY)
    return found


def history(eng: Engine) -> list[str]:
    """What the average of three updates is not."""
    states = []
    for step in range(3):
        eng.train_batch(batch(eng, step))
        states.append(eng.full_state_dict())
    found = eng.full_state_dict(ema=True)
    wrong = [name for name, value in averaged(states).items() if not torch.equal(value, found[name])]
    average = eng._runtime.average
    assert average is not None
    values = [value for each in average.tensors().values() for value in each.values()]
    held, planned = sum(value.nbytes for value in values), eng.plan.rank(eng.grid.rank).state_bytes["average"]
    moved = not found or any(not torch.equal(found[name], value) for name, value in states[-1].items())
    return wrong + [f"held {held}, planned {planned}"] * (held != planned) + ["it is the weights"] * (not moved)


@pytest.mark.parametrize(
    ("ranks", "parallel", "zero", "changes"),
    [
        (2, {"data": 2}, {"stage": 1}, BF16),
        wide(2, {"data": 2}, {"stage": 3}, {}),
        wide(2, {"data": 2}, {"stage": 0}, {}),
        wide(2, {"tensor": 2}, {"stage": 0}, BF16),
        wide(2, {"pipeline": 2}, {"stage": 0}, BF16),
        wide(4, {"data": 2, "tensor": 2}, {"stage": 2}, {}),
        wide(4, {"data": 4}, {"stage": 3, "shard_size": 2}, BF16),
        wide(2, {"data": 2}, {"stage": 3}, {"optimizer": [{"match": "blocks.*", "type": "Muon"}, {"type": "SGD"}]}),
    ],
)
def test_the_average_is_that_of_the_full_weights_after_each_update(
    ranks: int, parallel: dict[str, Any], zero: dict[str, Any], changes: dict[str, Any]
) -> None:
    settings = {"parallel": parallel, "zero_optimization": zero} | EMA | changes
    assert on_threads(ranks, settings, history) == [[]] * ranks


def test_a_run_without_an_average_says_so() -> None:
    def body(eng: Engine) -> str:
        with pytest.raises(EngineError) as caught:
            eng.full_state_dict(ema=True)
        return str(caught.value)

    (said,) = on_threads(1, {}, body)
    assert said.startswith("full_state_dict(ema=True) was called in a run without an average of its weights; give ")


def train(folder: str, ranks: int, parallel: dict[str, Any], zero: dict[str, Any], load: bool) -> dict[str, Tensor]:
    """Body of a rank: two steps and a checkpoint, or its load; then a step more. The average on rank 0."""
    batches = models.batches_for("decoder", 8)
    raw = {"train_batch_size": 8, "parallel": {"data": 1} | parallel, "zero_optimization": zero} | EMA
    adamw = {"type": "AdamW", "params": {"lr": 3e-3, "eps": 1e-5}}
    config = load_config(raw | {"optimizer": adamw}, ranks)
    example = models.take_rows(batches[0], 0, config.micro)
    with engine.initialize(models.decoder, config, loss_sum, example) as eng:
        second_half(eng, batches[:3], folder, load)
        return eng.full_state_dict(ema=True)


def test_a_process_goes_on_with_its_average(tmp_path: Path) -> None:
    whole, found = (train(str(tmp_path), 1, {}, {"stage": 0}, load) for load in (False, True))
    assert all(torch.equal(found[name], value) for name, value in whole.items())


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "parallel", "zero"),
    [
        (2, {"data": 2}, {"stage": 1}),
        (2, {"data": 2}, {"stage": 3}),
        (2, {"tensor": 2}, {"stage": 0}),
        (2, {"pipeline": 2}, {"stage": 0}),
    ],
)
def test_a_run_goes_on_with_its_average_on_another_grid(
    run_ranks: RunRanks, tmp_path: Path, ranks: int, parallel: dict[str, Any], zero: dict[str, Any]
) -> None:
    whole = run_ranks(train, 2, str(tmp_path), 2, {"data": 2}, {"stage": 1}, False)[0]
    found = run_ranks(train, ranks, str(tmp_path), ranks, parallel, zero, True)[0]
    assert whole.keys() == found.keys()
    worst = max(float((found[name] - value).abs().max()) for name, value in whole.items())
    assert worst <= (0 if (parallel, zero) == ({"data": 2}, {"stage": 1}) else 1e-6)


def differing_after_a_load(folder: str) -> list[str]:
    """Body of a rank at ZeRO 0: the averages that a load changes."""
    changes = {"parallel": {"data": 2}, "zero_optimization": {"stage": 0}} | EMA
    found = []
    for load in (False, True):
        with start(changes) as eng:
            if load:
                eng.load_checkpoint(folder)
            else:
                for step in range(2):
                    eng.train_batch(rows(eng, step))
                eng.save_checkpoint(folder).wait()
            average = eng._runtime.average
            assert average is not None
            found.append([each["ema"].clone() for each in average.tensors().values()])
    return [str(number) for number, pair in enumerate(zip(*found, strict=True)) if not torch.equal(*pair)]


def test_every_data_rank_loads_the_whole_average_at_stage_0(run_ranks: RunRanks, tmp_path: Path) -> None:
    assert run_ranks(differing_after_a_load, 2, str(tmp_path)) == [[], []]


class Grown(nn.Module):
    """Two layers, and a third one if it is the larger model."""

    def __init__(self, larger: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        if larger:
            self.third = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.children():
            x = layer(x).tanh()
        return x.square().mean()


def test_a_larger_model_keeps_the_average_of_the_smaller_one(tmp_path: Path) -> None:
    config = {"train_micro_batch_size_per_gpu": 2} | EMA
    with engine.initialize(Grown(larger=False), config) as eng:
        for _ in range(2):
            eng.train_batch(torch.ones(2, 8))
        eng.save_checkpoint(str(tmp_path)).wait()
        before = eng.full_state_dict(ema=True)
    with engine.initialize(Grown(larger=True), config) as eng:
        eng.load_checkpoint(str(tmp_path), strict=False)
        found, weights = eng.full_state_dict(ema=True), eng.full_state_dict()
    assert all(torch.equal(found.pop(name), value) for name, value in before.items())
    assert found and all(torch.equal(weights[name], value) for name, value in found.items())


def test_a_larger_model_evaluates_its_new_weights_with_a_schedule_free_optimizer(tmp_path: Path) -> None:
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "ScheduleFreeAdamW"}}
    with engine.initialize(Grown(larger=False), config) as eng:
        eng.train_batch(torch.ones(2, 8))
        eng.save_checkpoint(str(tmp_path)).wait()
    with engine.initialize(Grown(larger=True), config) as eng:
        eng.load_checkpoint(str(tmp_path), strict=False)
        found = eng.full_state_dict()
    assert all(torch.equal(found[f"third.{name}"], value) for name, value in Grown(True).third.state_dict().items())
