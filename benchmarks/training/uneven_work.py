"""Seconds of steps in which data ranks have different numbers of microbatches, beside the slowest rank's own work.

    python -m benchmarks uneven_work [--seconds 0.2] [--rounds 3]                  starts three ranks under torchrun

A block sleeps in proportion to the rows of a microbatch, so that a small machine measures how long ranks wait for each
other. The work of a rank is the time that it has slept; each row of the table is the median of its rounds.
Exit code 1 when a step of ranks that meet once exceeds 1.05 times the slowest rank's work.
"""

import argparse
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import engine
from benchmarks.harness.startup import torchrun
from benchmarks.training.sleeping_blocks import Sleep

RANKS, BLOCKS, WIDTH = 3, 4, 64
LIMIT = 1.05
"""Maximum ratio of a step to the slowest rank's work, where ranks meet once a step."""
WORK: Mapping[str, Sequence[Sequence[int]]] = {
    "1 : 2 : 4 rows": ((1,), (1, 1), (1, 1, 1, 1)),
    "6 rows each, in other orders": ((4, 1, 1), (1, 4, 1), (1, 1, 4)),
}
"""Rows of each microbatch of each data rank."""
WAYS: Mapping[str, dict[str, Any]] = {
    "ZeRO 0": {"stage": 0},
    "ZeRO 1": {"stage": 1},
    "ZeRO 2": {"stage": 2},
    "ZeRO 3, gather step": {"stage": 3, "gather": "step"},
    "ZeRO 2, reduce microbatch": {"stage": 2, "reduce": "microbatch"},
    "ZeRO 3, gather microbatch": {"stage": 3},
}


class LateRows(nn.Module):
    """Model of linear blocks that sleep in proportion to the rows; returns the loss."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))
        self.seconds = seconds / BLOCKS
        self.asleep: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        """Computes x [B, WIDTH] -> loss, 0-dim, after the delays."""
        x = self.first(x)
        for block in self.blocks:
            seconds = self.seconds * len(x)
            x = block(Sleep.apply(x, seconds, 2 * seconds, self.asleep))  # type: ignore[no-untyped-call]
        return x.square().mean()


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds of a step of one way, beside the work of the slowest rank."""

    way: str
    work: str
    step: float
    slowest: float

    @property
    def ratio(self) -> float:
        """Ratio of the step to the slowest rank's work."""
        return self.step / self.slowest

    @property
    def passed(self) -> bool:
        """True if the ratio is within the limit, or ranks meet in every microbatch."""
        return "microbatch" in self.way or self.ratio <= LIMIT

    def __str__(self) -> str:
        return f"| {self.way} | {self.work} | {self.slowest:.3f} s | {self.step:.3f} s | {self.ratio:.3f} |"


def main(command: Sequence[str] | None = None) -> int:
    """Measures on every rank; rank 0 prints."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks uneven_work", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=0.2, help="what a row takes forward; backward twice that")
    parser.add_argument("--rounds", type=int, default=3, help="steps of each way")
    arguments = parser.parse_args(command)
    if "RANK" not in os.environ:
        told = ["--seconds", str(arguments.seconds), "--rounds", str(arguments.rounds)]
        return subprocess.run(torchrun(RANKS, "benchmarks", "uneven_work", *told), check=False).returncode
    found = [each for way in WAYS for each in measure(way, arguments.seconds, arguments.rounds)]
    if int(os.environ["RANK"]) == 0:
        print("| way | work | slowest rank | step | ratio |", "|---|---|---|---|---|", *found, sep="\n")
        print(f"limit {LIMIT} where ranks meet once a step")
    return 0 if all(each.passed for each in found) else 1


def measure(way: str, seconds: float, rounds: int) -> list[Measured]:
    """Measures the steps of one way as one rank; a first step is not counted."""
    torch.manual_seed(1)
    torch.set_num_threads(1)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "parallel": {"data": RANKS},
        "zero_optimization": WAYS[way],
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "uneven_microbatches": True,
    }
    found = []
    model = LateRows(seconds)
    with engine.initialize(model, config, example_batch=torch.randn(1, WIDTH)) as eng:
        eng.train_batch([torch.randn(1, WIDTH)])
        for work, rows in WORK.items():
            steps = [_step(eng, model, rows[eng.grid.row_rank]) for _ in range(rounds)]
            step, slowest = sorted(steps, key=lambda one: one[0] / one[1])[rounds // 2]
            found.append(Measured(way, work, step, slowest))
    return found


def _step(eng: engine.Engine, model: LateRows, rows: Sequence[int]) -> tuple[float, float]:
    """Returns the seconds of a step, and the seconds of the slowest rank's own work in it."""
    microbatches = [torch.randn(count, WIDTH) for count in rows]
    model.asleep.clear()
    dist.barrier()
    began = time.perf_counter()
    eng.train_batch(microbatches)
    both = torch.tensor([time.perf_counter() - began, sum(model.asleep)], dtype=torch.float64)
    dist.all_reduce(both, dist.ReduceOp.MAX)
    return float(both[0]), float(both[1])
