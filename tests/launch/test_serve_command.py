"""``trine serve`` as a job of two ranks: it serves a folder, survives SIGKILL, and ends at SIGTERM."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from engine.web.remote_model import RemoteModel
from tests import models

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
ADAM = {"lr": 1e-2, "eps": 1e-8}


def make_files(folder: Path) -> Path:
    """Write a model and a configuration; return the configuration."""
    folder.mkdir(exist_ok=True)
    models.llama().save_pretrained(folder / "model")  # type: ignore[operator]
    config = folder / "config.json"
    serve = {"port": 0, "folder": str(folder / "service"), "journal": {"snapshot_every": 4}}
    config.write_text(json.dumps({"parallel": {"tensor": 2}, "serve": serve}), encoding="utf-8")
    return config


@contextmanager
def served(config: Path, log: Path) -> Iterator[tuple[str, "subprocess.Popen[bytes]"]]:
    """Serve on two ranks; yield the address and the launcher."""
    command = (*TORCHRUN, "-m", "engine.launch.cli", "serve", str(config), "--model", str(config.parent / "model"))
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with (
        log.open("wb") as out,
        subprocess.Popen(command, stdout=out, stderr=out, env=environment, start_new_session=True) as job,
    ):
        try:
            until = time.monotonic() + 240
            while "service at " not in (text := log.read_text(encoding="utf-8", errors="replace")):
                assert job.poll() is None and time.monotonic() < until, text[-3000:]
                time.sleep(0.2)
            yield text.partition("service at ")[2].partition(": ")[0], job
        finally:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)


def train(model: RemoteModel, steps: int) -> list[float]:
    """Train the shared model on the same rows; return the losses."""
    losses = []
    for _ in range(steps):
        loss = model(input_ids=torch.arange(12).reshape(2, 6))["logits"].square().mean()
        loss.backward()
        model.step(**ADAM)
        losses.append(loss.item())
    return losses


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_folder_on_two_ranks_goes_on_after_a_kill(tmp_path: Path) -> None:
    config = make_files(tmp_path)
    with served(config, tmp_path / "first.txt") as (url, job):
        begun = train(RemoteModel(url), 3)
        os.killpg(job.pid, signal.SIGKILL)
    with served(config, tmp_path / "second.txt") as (url, job):
        model = RemoteModel(url)
        gone_on = train(model, 2)
        assert model.version == 5
        job.send_signal(signal.SIGTERM)
        job.wait(60)
    other = make_files(tmp_path / "other")
    with served(other, tmp_path / "third.txt") as (url, _):
        assert train(RemoteModel(url), 5) == [*begun, *gone_on], "the same bits as without a kill"
