"""A job whose nodes come and go: ``elastic.py FOLDER STEPS [SECONDS [memory]]`` goes on when it is started again.

With ``memory`` the state of every second step is kept in memory, and none on disk.

``metrics.jsonl`` has the loss of every update, which depends on the rows of all updates before it; ``times.txt`` when
it was made, and by which process.
"""

import logging
import os
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn

import engine
from engine.data import Sampler

FOLDER, STEPS = Path(sys.argv[1]), int(sys.argv[2])
PAUSE = float(sys.argv[3]) if len(sys.argv) > 3 else 0.0
"""Seconds that a step takes beside its computation, the same on every grid."""
SAVES = {"memory_every": 2} if sys.argv[4:] == ["memory"] else {"every": 5}
ROWS, WINDOWS = 8, 100


class Net(nn.Module):
    """Three layers, with a loss of their own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layers(x)
        return output.square().mean()


def main() -> None:
    """Train to the last step from the newest checkpoint."""
    logging.basicConfig(format="%(message)s", level=logging.INFO, stream=sys.stdout)
    os.environ["TRINE_WATCHDOG_SECONDS"] = "3"
    config = {
        "train_batch_size": ROWS,
        "train_micro_batch_size_per_gpu": 1,
        "parallel": {"data": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 1},
        "checkpoint": {"folder": str(FOLDER), **SAVES},
        "monitor": {"jsonl": str(FOLDER / "metrics.jsonl"), "every": 1},
    }
    table = torch.randn(WINDOWS, 16, generator=torch.Generator().manual_seed(1))
    with engine.initialize(Net, config, example_batch=torch.ones(1, 16)) as eng:
        sampler = Sampler(WINDOWS, ROWS, eng.config.seed, eng.grid.coord().dp, eng.grid.dp)
        eng.register_for_checkpointing(data=sampler)
        eng.load_checkpoint(missing_ok=True)
        while eng.step_count < STEPS:
            report = eng.train_batch(table[torch.from_numpy(next(sampler))])
            time.sleep(PAUSE)
            if eng.grid.rank == 0:
                with (FOLDER / "times.txt").open("a") as times:
                    times.write(f"{os.getpid()} {report.step} {time.time()}\n")
                if report.step % 10 == 0:
                    print(f"step {report.step} on {eng.grid.world_size} ranks", flush=True)


main()
