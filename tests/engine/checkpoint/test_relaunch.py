"""A run that is saved on one grid goes on on another, in another launch, as if nobody had touched it.

Two sampled matrices: pairs of grids, where reductions add in another order (losses within 1e-6, relative), and the
same grid with everything that a run can hold beside weights, where nothing may differ by a bit.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.models.decoder import loss_sum
from engine.optim.lr_schedules import SchedulerArgument
from engine.program.batch import Batch
from engine.program.loss import LossFunction
from engine.zero.optim.inner_optimizer import OptimizerFactory
from tests import models
from tests.engine.checkpoint.lasting import digest
from tests.models import take_rows
from tests.resumed_runs import own_rows

RunRanks = Callable[..., list[Any]]
ROWS, MICRO = 16, 2
ADAM = {"type": "AdamW", "params": {"lr": 3e-3, "eps": 1e-5, "weight_decay": 0.1}}


@dataclass(frozen=True)
class Grid:
    """Sizes and ZeRO stage; as the id of a test "dp2 tp1 pp2 z1"."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    zero: int = 0

    def __str__(self) -> str:
        return f"dp{self.dp} tp{self.tp} pp{self.pp} z{self.zero}"

    @property
    def ranks(self) -> int:
        return prod((self.dp, self.tp, self.pp))

    def settings(self, **changes: Any) -> dict[str, Any]:
        """Every grid has the same microbatches, two a data rank or more."""
        return {
            "train_batch_size": ROWS, "train_micro_batch_size_per_gpu": MICRO, "gradient_clipping": 0.1,
            "parallel": {"data": self.dp, "tensor": self.tp, "pipeline": self.pp},
            "zero_optimization": {"stage": self.zero, "reduce_bucket_size": 6000}, "optimizer": ADAM,
        } | changes  # fmt: skip


@dataclass(frozen=True)
class Case:
    """What is trained, beside the grid."""

    model: Callable[[], nn.Module]
    batches: str = "decoder"
    """Of which model."""
    loss: LossFunction | None = loss_sum
    changes: dict[str, Any] = field(default_factory=dict)
    optimizer: OptimizerFactory | None = None
    schedule: SchedulerArgument | None = None

    def start(self, grid: Grid) -> engine.Engine:
        """A fresh engine."""
        example = take_rows(self.data()[0], 0, MICRO)
        settings = grid.settings(**self.changes)
        return engine.initialize(self.model(), settings, self.loss, example, self.optimizer, self.schedule)

    def data(self) -> list[Batch]:
        """A global batch for each step."""
        if self.batches == "image":
            generator = torch.Generator().manual_seed(4)
            return [torch.randn(ROWS, 3, 4, 4, generator=generator) for _ in range(6)]
        return models.batches_for(self.batches, ROWS, 6)

    def train(self, eng: engine.Engine, stop: int) -> list[tuple[float, float]]:
        """(loss, gradient norm) up to this attempt, skipped ones among them."""
        done, data = eng.step_count + eng.skipped_steps, self.data()
        parts = [own_rows(eng, data[index]) for index in range(done, stop)]
        return [(report.loss, report.grad_norm) for report in map(eng.train_batch, parts)]


# ------------------------------------------------------------------------------------------------ another grid


CASES = {
    "decoder": Case(partial(models.decoder, layers=4)),
    "repeated": Case(models.repeated),
    "nano": Case(partial(models.nano, layers=4), "nano", None),
    "gpt2 dropout": Case(partial(models.gpt2, layers=4), "gpt2", None),
}
PAIRS: list[tuple[str, Grid, Grid]] = [
    ("decoder", Grid(dp=2, tp=2, zero=1), Grid(pp=4)),
    ("gpt2 dropout", Grid(dp=4, zero=3), Grid(dp=2, pp=2)),
    ("nano", Grid(pp=2), Grid(dp=2, zero=3)),
    ("repeated", Grid(tp=2, pp=2), Grid(dp=2, tp=2, zero=2)),
    ("decoder", Grid(dp=4, zero=2), Grid(tp=4)),
    ("decoder", Grid(tp=4), Grid(dp=4, zero=1)),
    ("repeated", Grid(dp=2, pp=2, zero=3), Grid(tp=2, pp=2)),
    ("nano", Grid(dp=4, zero=1), Grid(pp=4)),
    ("gpt2 dropout", Grid(pp=4), Grid(dp=4, zero=2)),
    ("decoder", Grid(), Grid(dp=2, tp=2, zero=3)),
    ("repeated", Grid(dp=2, tp=2, zero=3), Grid()),
    ("gpt2 dropout", Grid(dp=2, pp=2, zero=2), Grid(dp=4, zero=0)),
]
Losses = list[tuple[float, float]]


def saves_and_goes_on(name: str, grid: Grid, folder: str) -> Losses:
    """Body of a rank: what follows the save."""
    case = CASES[name]
    with case.start(grid) as eng:
        case.train(eng, 2)
        pending = eng.save_checkpoint(folder)
        losses = case.train(eng, 6)
        pending.wait()
        return losses


def goes_on(name: str, grid: Grid, folder: str) -> Losses:
    """Body of a rank: the same from the checkpoint."""
    case = CASES[name]
    with case.start(grid) as eng:
        assert eng.load_checkpoint(folder) == {}
        return case.train(eng, 6)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "first", "then"),
    [pytest.param(*pair, marks=[pytest.mark.long] * (index > 0)) for index, pair in enumerate(PAIRS)],
    ids=str,
)
def test_goes_on_on_another_grid(run_ranks: RunRanks, tmp_path: Path, name: str, first: Grid, then: Grid) -> None:
    expected: Losses = run_ranks(saves_and_goes_on, first.ranks, name, first, str(tmp_path))[0]
    found: Losses = run_ranks(goes_on, then.ranks, name, then, str(tmp_path))[0]
    assert len(found) == len(expected) == 4 and len(set(expected)) == 4
    worst = max(abs(one - other) / other for (one, _), (other, _) in zip(found, expected, strict=True))
    print(f"{name}, {first} -> {then}: largest deviation of a loss {worst:.1e}")
    assert worst <= 1e-6
    assert all(abs(one - other) <= 1e-5 * other for (_, one), (_, other) in zip(found, expected, strict=True))
    assert all(norm > 0.1 for _, norm in expected), "clipping must be active"


# ------------------------------------------------------------------------------------------------ the same grid


class Normed(nn.Module):
    """Convolutions and batch norms; every data rank has running statistics of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(32, 5), nn.BatchNorm1d(5)
        )

    def forward(self, image: Tensor) -> Tensor:
        out: Tensor = self.body(image)
        return (out.cos() - 0.3).square().mean()


def torch_adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-3)


def torch_schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=9)


def torch_schedules(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Two, one after the other; each computes the next rate from the last."""
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.3, total_iters=3)
    cool = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, cool], [1])


decoder = Case(models.decoder)
ALIKE: dict[str, tuple[Case, Grid]] = {
    "fp32": (decoder, Grid(dp=2, zero=1)),
    "bf16, masters": (Case(models.decoder, changes={"bf16": {"enabled": True}}), Grid(dp=2, zero=1)),
    "bf16 alone": (
        Case(models.decoder, changes={"bf16": {
            "enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True
        }}),
        Grid(dp=2, zero=2),
    ),
    "fp16, scale moves": (
        Case(models.decoder, changes={"fp16": {
            "enabled": True, "initial_scale_power": 13, "hysteresis": 1, "loss_scale_window": 1
        }}),
        Grid(dp=2, zero=1),
    ),
    "SGD, momentum": (
        Case(models.decoder, changes={"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}}),
        Grid(dp=2, zero=1),
    ),
    "Lion": (Case(models.decoder, changes={"optimizer": {"type": "Lion", "params": {"lr": 1e-3}}}), Grid(dp=2)),
    "torch AdamW": (Case(models.decoder, optimizer=torch_adam), Grid(dp=2, zero=1)),
    "LRScheduler": (Case(models.decoder, schedule=torch_schedule), Grid(dp=2)),
    "two LRSchedulers": (Case(models.decoder, schedule=torch_schedules), Grid(dp=2)),
    "LRScheduler, torch AdamW": (
        Case(models.decoder, optimizer=torch_adam, schedule=torch_schedule),
        Grid(dp=2, zero=3),
    ),
    "batch norm": (Case(Normed, "image", None), Grid(dp=2)),
    "dropout": (Case(partial(models.decoder, dropout=0.2)), Grid(dp=2)),
    "ZeRO 3": (decoder, Grid(dp=2, zero=3)),
    "pp2": (decoder, Grid(pp=2)),
    "tp2": (decoder, Grid(tp=2)),
}  # fmt: skip


def twice(case: Case, grid: Grid, folder: Path) -> dict[str, Any]:
    """A run in one piece, and in two with a save between them."""
    with case.start(grid) as eng:
        whole = case.train(eng, 4)
        end, attempts = digest(eng), (eng.step_count, eng.skipped_steps)
        statistics = {name: buffer.clone() for name, buffer in eng.module.named_buffers()}
    with case.start(grid) as eng:
        parts = case.train(eng, 2)
        saved = digest(eng)
        eng.save_checkpoint(folder).wait()
    with case.start(grid) as eng:
        eng.load_checkpoint(folder)
        loaded = digest(eng)
        parts += case.train(eng, 4)
        return {
            "whole": whole, "parts": parts, "ends alike": digest(eng) == end, "loads alike": loaded == saved,
            "changed": end != saved, "attempts": attempts, "statistics": statistics,
        }  # fmt: skip


def all_twice(names: list[str], folder: str) -> dict[str, Any]:
    """Body of a rank: every case by its name."""
    return {name: twice(*ALIKE[name], Path(folder) / str(index)) for index, name in enumerate(names)}


PLAIN = ("fp32", "bf16, masters", "ZeRO 3", "pp2", "tp2")
"""Rows of ``test_covering_array`` go on from a save too; with these they would do so to the bit."""


@pytest.mark.long
@pytest.mark.parametrize(
    "names",
    [
        pytest.param([name for name in ALIKE if name not in PLAIN], id="odd", marks=pytest.mark.long),
        pytest.param(["ZeRO 3"], id="ZeRO 3"),
        pytest.param(list(PLAIN), id="plain", marks=pytest.mark.long),
    ],
)
def test_the_same_grid_goes_on_to_the_bit(run_ranks: RunRanks, tmp_path: Path, names: list[str]) -> None:
    ranks: list[dict[str, Any]] = run_ranks(all_twice, 2, names, str(tmp_path), seconds=280.0)
    for name in names:
        for found in (rank[name] for rank in ranks):
            finite = [pair for pair in found["whole"] if pair[1] < float("inf")]
            assert repr(found["parts"]) == repr(found["whole"]), name  # by repr: nan is not equal to itself
            assert len(set(finite)) == len(finite) >= 2, f"{name}: every step counts"
            assert found["loads alike"] and found["ends alike"] and found["changed"], name
    if "batch norm" not in names:
        return
    made, skipped = ranks[0]["fp16, scale moves"]["attempts"]
    assert made and skipped, "the loss scale must have moved"
    means = [rank["batch norm"]["statistics"]["body.1.running_mean"] for rank in ranks]
    assert not torch.equal(*means), "every data rank has its own"
