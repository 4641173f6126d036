"""A job that is slow but sound: ``slow_steps.py SECONDS TIMEOUT SHARE FOLDER`` trains for about ``SECONDS``.

In one step of eight, one rank or all of them take up to ``SHARE`` of the watchdog's timeout longer, in any of the
places where a user's code is called.
"""

import os
import random
import sys
import time
from typing import Any

import torch
from torch import Tensor, nn

import engine

SECONDS, TIMEOUT, SHARE = (float(given) for given in sys.argv[1:4])
FOLDER, RANK = sys.argv[4], int(os.environ["RANK"])
PLACES = ("forward", "loss", "hook", "data", "evaluation")
PAUSE = 0.05
"""Seconds that every step lasts beside its computation."""


class Delays:
    """Where this rank loses time in a step; all ranks draw the same numbers, and so end after the same step."""

    def __init__(self) -> None:
        self._chance, self._place, self._seconds = random.Random(0), "", 0.0
        self.drawn = 0.0
        """Seconds that all steps together were to last, whichever rank is slow."""

    def draw(self, ranks: int) -> None:
        """Choose for the next step."""
        place, slow = self._chance.choice(PLACES), self._chance.choice([*range(ranks), -1])
        seconds = self._chance.uniform(0.2, SHARE) * TIMEOUT if self._chance.random() < 1 / 8 else 0.0
        self._place, self._seconds = place, seconds if slow in (RANK, -1) else 0.0
        self.drawn += PAUSE + seconds

    def take(self, place: str) -> None:
        """Lose the time that was drawn for this place, once."""
        if place == self._place:
            seconds, self._seconds = self._seconds, 0.0
            time.sleep(seconds)


DELAYS = Delays()


class Net(nn.Module):
    """Four layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        DELAYS.take("forward")
        for layer in self.layers:
            x = layer(x).relu()
        return x


def loss_fn(output: Tensor, batch: Any) -> Tensor:
    """The mean square."""
    DELAYS.take("loss")
    if output.requires_grad:
        output.register_hook(lambda grad: DELAYS.take("hook"))  # type: ignore[no-untyped-call]
    return output.square().mean()


def main() -> None:
    """Train, evaluate and save until the time is over."""
    os.environ["TRINE_WATCHDOG_SECONDS"] = f"{TIMEOUT:.0f}"
    config = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "parallel": {"data": 2, "pipeline": 2},
        "checkpoint": {"folder": FOLDER, "every": 50, "keep": 2},
        "watchdog": {"straggler_factor": None},
    }
    with engine.initialize(Net, config, loss_fn, torch.ones(2, 16)) as eng:
        while DELAYS.drawn < SECONDS:
            DELAYS.draw(eng.grid.world_size)
            DELAYS.take("data")
            time.sleep(PAUSE)
            report = eng.train_batch(torch.ones(4, 16))
            if report.step % 10 == 0:
                eng.eval_batch(torch.ones(4, 16))
            DELAYS.take("evaluation")
        if RANK == 0:
            print(f"{eng.step_count} steps, the last one with loss {report.loss:g}", flush=True)


main()
