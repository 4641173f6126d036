"""Script that sweeps run unchanged, and functions of ranks that run it."""

import contextlib
import io
import json
from pathlib import Path
from typing import Any

from tests.launches import Line

STEPS = 27
RATES = [1e-5, 1e-4, 1e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0, 3.0]
SCRIPT = """
import json, sys, time
from pathlib import Path

import torch

import engine

steps, pause = int(sys.argv[1]), float(sys.argv[2])
torch.manual_seed(len(sys.argv))
target = torch.randn(8, 1, generator=torch.Generator().manual_seed(1))


def batch(step, rank, ranks):
    rows = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))[rank::ranks]
    return rows, rows @ target


def loss(output, batch):
    return (output - batch[1]).square().mean()


config = {"train_batch_size": 16, "optimizer": {"type": "AdamW"}, "checkpoint": {"every": 2 * (pause > 0)}}
with engine.initialize(torch.nn.Linear(8, 1), config, loss, inputs=[0]) as eng:
    eng.load_checkpoint(missing_ok=True)
    begun = eng.step_count
    try:
        while eng.step_count < steps:
            eng.train_batch(batch(eng.step_count, eng.grid.coord().dp, eng.grid.dp))
            time.sleep(pause)
    finally:
        sent = {row.label: (row.calls, row.bytes) for row in eng.comm.tally.rows()}
        line = {"begun": begun, "updates": eng.step_count, "control": sent.get("control"), "labels": sorted(sent)}
        with Path(sys.argv[3]).with_suffix(f".{eng.grid.rank}").open("a") as file:
            file.write(json.dumps(line) + "\\n")
"""


def write(folder: Path, **changes: Any) -> Path:
    """Writes the script and the settings of a sweep; returns the settings' path."""
    (folder / "train.py").write_text(SCRIPT)
    settings = {
        "space": {"optimizer.params.lr": {"choices": RATES}},
        "grid": True,
        "pruner": {"type": "successive_halving", "params": {"min_resource": 3, "reduction_factor": 3}},
        "journal": str(folder / "journal"),
    }
    (folder / "sweep.json").write_text(json.dumps(settings | changes))
    return folder / "sweep.json"


def words(settings: Path, *options: str, steps: int = STEPS, pause: float = 0.0) -> list[str]:
    """Returns the arguments of trine for this sweep."""
    folder = settings.parent
    return ["sweep", *options, str(settings), "--", str(folder / "train.py"), str(steps), str(pause), str(folder / "x")]


def lines(folder: Path, rank: int) -> list[dict[str, Any]]:
    """Returns what the script has written on a rank at each end."""
    return [json.loads(line) for line in (folder / f"x.{rank}").read_text().splitlines()]


def run(arguments: list[list[str]]) -> list[str]:
    """Body of a rank: runs commands one after another; returns what each prints."""
    from engine.launch.cli import main

    printed = []
    for one in arguments:
        with contextlib.redirect_stdout(io.StringIO()) as caught:
            assert main(one) == 0
        printed.append(caught.getvalue())
    return printed


def run_until_killed(line: Line, arguments: list[str]) -> None:
    """Body of a rank that a test kills."""
    from engine.launch.cli import main

    assert main(arguments) == 0
    line("done")
