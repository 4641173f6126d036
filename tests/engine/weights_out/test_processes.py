"""Trainings and receivers as processes, killed at random moments."""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.weights_out.killed_trainer import PARTS, digest_of
from tests.engine.weights_out.test_kills import SLACK

ROOT, SCRIPT = Path(__file__).parents[3], Path(__file__).with_name("killed_trainer.py")
DEADLINE = 2.0
KILLS = int(os.environ.get("TRINE_PROCESS_KILLS", "12"))


class Job:
    """A training and its receivers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.trained = folder / "trained.jsonl"
        self.trained.touch()

    def start(self, name: str) -> None:
        """Starts "train", or the receiver "0" or "1"."""
        words = ["train", str(self.trained)]
        if name != "train":
            words = ["follow", str(self.trained), str(self.log(name)), name, str(self.folder / "group"), str(DEADLINE)]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        with (self.folder / f"{name}.err").open("ab") as errors:
            self.running[name] = subprocess.Popen(
                [sys.executable, str(SCRIPT), *words], env=environment, cwd=ROOT, stdout=errors, stderr=errors
            )

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.jsonl"

    def lines(self, path: Path) -> list[Any]:
        return (
            [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []
        )

    def kill(self, name: str) -> None:
        self.running[name].kill()
        self.running[name].wait()

    def wait_for_versions(self, count: int) -> None:
        """Waits until each receiver has taken over as many more versions."""
        before = {str(part): len(self.taken(str(part))) for part in range(PARTS)}
        until = time.monotonic() + 90
        while any(len(self.taken(name)) < count + before[name] for name in before):
            assert time.monotonic() < until, (self.folder / "0.err").read_text()[-2000:]
            time.sleep(0.05)

    def taken(self, name: str) -> list[Any]:
        return [line for line in self.lines(self.log(name)) if line["name"] is not None]


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_killed_processes_leave_whole_versions(tmp_path: Path) -> None:
    job, dice = Job(tmp_path), random.Random(7)
    names = ["train", *map(str, range(PARTS))]
    try:
        for name in names:
            job.start(name)
        job.wait_for_versions(2)
        for index in range(KILLS):
            time.sleep(dice.uniform(0, 0.5))
            victim = names[index % len(names)]
            job.kill(victim)
            job.start(victim)
            job.wait_for_versions(1)
    finally:
        for process in job.running.values():
            process.kill()
            process.wait()
    digests = {line["name"]: line["digests"] for line in job.lines(job.trained)}
    for part in range(PARTS):
        lines = job.lines(job.log(str(part)))
        whole = {found[part] for found in digests.values()} | {lines[0]["digest"] if lines[0]["name"] is None else ""}
        for line in lines:
            if line["name"] is not None:
                assert line["digest"] == digests[line["name"]][part], "a mix of two versions"
            assert line["digest"] in whole or line["error"] or line["name"] is None
            assert line["seconds"] < DEADLINE + SLACK
        assert any(line["error"] for line in lines), "no kill has hit a transfer"
    orders = [[line["name"] for line in job.taken(str(part))] for part in range(PARTS)]
    shared = [[name for name in order if name in orders[1 - part]] for part, order in enumerate(orders)]
    assert list(dict.fromkeys(shared[0])) == list(dict.fromkeys(shared[1])), "the group takes the same versions"
    assert digest_of({"x": torch.zeros(1)})
