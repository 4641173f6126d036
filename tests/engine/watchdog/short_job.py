"""One rank of two that ends soon: ``short_job.py HOW SECONDS`` builds an engine that is watched, and ends by HOW.

``close``, ``raise``, ``drop`` (the script ends without closing) or ``kill``, so many seconds after the engine is built.
"""

import os
import signal
import sys
import time

import torch
from torch import nn

import engine


def main() -> None:
    """Run the rank."""
    how, seconds = sys.argv[1], float(sys.argv[2])
    os.environ["TRINE_WATCHDOG_SECONDS"] = "1"
    torch.manual_seed(0)
    config = {
        "parallel": {"data": 2},
        "optimizer": {"type": "adamw"},
        "train_micro_batch_size_per_gpu": 1,
    }
    eng = engine.initialize(nn.Linear(4, 4), config, loss_fn=lambda output, batch: output.square().mean())
    eng.complete(torch.ones(1, 4))
    time.sleep(seconds)
    match how:
        case "raise":
            raise ValueError("odd input")
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "close":
            eng.close()


main()
