"""A job that one rank spoils: ``faulty.py WHAT RANK ARMED GRID TIMEOUT`` trains, says so, and goes wrong later.

It goes wrong once the file ARMED is there, and writes the moment of ``time.monotonic`` into the file ``fault`` beside.
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import engine

WHAT, VICTIM = sys.argv[1], int(sys.argv[2])
RANK = int(os.environ["RANK"])
ARMED = Path(sys.argv[3])
SIZES = {key: int(size) for key, _, size in (part.partition("=") for part in sys.argv[4].split(","))}
TIMEOUT = float(sys.argv[5])
PAUSE = 0.02 if WHAT.endswith("-slow") else 0.1
"""Seconds between steps; a straggler is found in forty of them."""


def note_fault() -> None:
    """Write the moment in which the job goes wrong; once, and whole or not at all."""
    moment = ARMED.with_name("fault")
    if not moment.exists():
        written = moment.with_suffix(".new")
        written.write_text(str(time.monotonic()))
        written.rename(moment)


def go_wrong(place: str) -> None:
    """What happens to the victim, where it happens."""
    if RANK != VICTIM or not ARMED.exists() or not WHAT.startswith(place):
        return
    if not WHAT.endswith("-slow"):
        note_fault()
    match WHAT.removeprefix(f"{place}-"):
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "loop":
            while True:
                pass
        case "raise":
            raise ValueError("odd input")
        case "memory":
            raise torch.OutOfMemoryError("no memory left")
        case "slow":
            time.sleep(0.05)
        case "leave":
            time.sleep(1000)
        case "alone":
            torch.distributed.all_reduce(torch.ones(1))


class Net(nn.Module):
    """Four layers, of which the victim may never come back."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        go_wrong("forward")
        for layer in self.layers:
            x = layer(x).relu()
        return x


def loss_fn(output: Tensor, batch: Any) -> Tensor:
    """The mean square; the victim may not come back from here, nor from its backward."""
    go_wrong("loss")
    if output.requires_grad:
        output.register_hook(lambda grad: go_wrong("hook"))  # type: ignore[no-untyped-call]
    return output.square().mean()


def main() -> None:
    """Train until something goes wrong."""
    os.environ["TRINE_WATCHDOG_SECONDS"] = f"{TIMEOUT:.0f}"
    config = {
        "train_batch_size": 4 * SIZES.get("data", 1),
        "train_micro_batch_size_per_gpu": 2,
        "parallel": SIZES,
        "watchdog": {
            "folder": str(ARMED.parent / "report"),
            "straggler_factor": 2.0 if WHAT.endswith("slow") else None,
            "straggler_steps": 20,
        },
    }
    with engine.initialize(Net, config, loss_fn, torch.ones(2, 16)) as eng:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            go_wrong("between")
            armed = RANK == VICTIM and ARMED.exists()
            if armed and WHAT in ("other-call", "known-call", "other-shape"):
                note_fault()
            if (WHAT in ("other-call", "known-call") and armed) or (WHAT == "known-call" and eng.step_count < 3):
                eng.eval_batch(torch.ones(4, 16))
            eng.train_batch(torch.ones(4, 8 if WHAT == "other-shape" and armed else 16))
            if eng.step_count == 3:
                print(f"trains {RANK}", flush=True)
            if eng.step_count % 10 == 0:
                print(f"step {eng.step_count}", flush=True)
            time.sleep(PAUSE)


main()
