"""Process of one site of outer loops, one after the other: trains the small decoder, and writes a line for each step.

python -m benchmarks.outer.live_site FOLDER SITE        trains FOLDER/0/job.json, then FOLDER/1/job.json, ...
"""

import json
import sys
import time
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import engine
from benchmarks.outer.text import ROWS, make_model, training_rows, validation_loss
from engine.models.decoder import loss_sum

POLL = 0.005
"""Seconds between two looks for a file of the parent."""


@dataclass(frozen=True, slots=True)
class Job:
    """Training of several sites; the parent and its sites share it as JSON.

    Args:
        folder: folder of logs, and of the files "go" and "stop".
        outer: section of the configuration.
        optimizer: optimizer of the configuration.
        pauses: seconds that each site sleeps in a step.
    """

    folder: str
    outer: dict[str, Any]
    optimizer: dict[str, Any]
    steps: int
    pauses: tuple[float, ...]
    scheduler: dict[str, Any] | None = None

    def config_of(self, site: int) -> dict[str, Any]:
        """Returns the configuration of a site."""
        outer = {"outer": self.outer | {"site": site, "sites": len(self.pauses)}} if self.outer else {}
        rates = {"scheduler": self.scheduler} if self.scheduler else {}
        return {"train_batch_size": ROWS, "gradient_clipping": 1.0, "optimizer": self.optimizer} | rates | outer

    def write(self) -> Path:
        """Writes the job for its sites; returns its path."""
        path, new = Path(self.folder) / "job.json", Path(self.folder) / "new"
        new.write_text(json.dumps(asdict(self)))
        new.rename(path)
        return path


def read_job(path: Path) -> Job:
    """Returns the job of a file."""
    found = Job(**json.loads(path.read_text()))
    return replace(found, pauses=tuple(found.pauses))


def main(folder: Path, site: int) -> None:
    """Trains the jobs in the folder until the parent ends the process."""
    torch.set_num_threads(1)
    for number in count():
        path = folder / str(number) / "job.json"
        while not path.exists():
            time.sleep(POLL)
        train_site(read_job(path), site)
        (path.parent / f"ended-{site}").touch()


def train_site(job: Job, site: int) -> None:
    """Trains one site; the last line has the validation loss of its weights, its bytes and its moments."""
    if site >= len(job.pauses):
        return
    folder, model = Path(job.folder), make_model()
    eng = engine.initialize(model, job.config_of(site), loss_fn=loss_sum)
    rows = [training_rows(site, step) for step in range(1, job.steps + 1)]
    (folder / f"ready-{site}").touch()
    while not (folder / "go").exists():
        time.sleep(POLL)
    with (folder / f"site{site}.jsonl").open("w") as log:
        for each in rows:
            if (folder / "stop").exists():
                break
            began, waited = time.time(), 0.0 if eng.outer is None else eng.outer.waited
            time.sleep(job.pauses[site])
            report = eng.train_batch({"input_ids": each[:, :-1], "labels": each[:, 1:]})
            waited = 0.0 if eng.outer is None else eng.outer.waited - waited
            _write(log, {"began": began, "ended": time.time(), "waited": waited, "loss": report.loss})
        moved = (0, 0) if eng.outer is None else (eng.outer.pushed_bytes, eng.outer.pulled_bytes)
        state = [value for each in eng.optimizer.state.values() for value in each.values()]
        moments = sum(value.numel() for value in state if isinstance(value, Tensor) and value.dim())
        planned = eng.plan.state(eng.grid.coord()).device["optimizer"]
        _write(log, {"validation": validation_loss(model), "moved": moved, "moments": moments, "planned": planned})
    eng.close()


def _write(log: Any, line: dict[str, Any]) -> None:
    log.write(json.dumps(line) + "\n")
    log.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
