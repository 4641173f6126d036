"""A rank that fails in the middle of a step: the job is down within seconds, and its last traceback is the cause."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import engine
from engine.errors import EngineError
from engine.models.decoder import loss_sum
from engine.parallel.comm import comm
from engine.parallel.comm.comm import Pending
from tests import models
from tests.launches import Launch, Line
from tests.warm_python import warm_torchrun

ROOT = Path(__file__).parents[2]
SECONDS = 60

SCRIPT = """
import os, sys, time
import torch
import engine
from engine.models.decoder import Decoder, DecoderConfig, loss_sum
from engine.parallel.comm.world import leave_traceback

where, rank = sys.argv[1], int(os.environ["RANK"])
grid = {"loss": {"tensor": 2, "pipeline": 2}, "block": {"pipeline": 4}, "tensor": {"data": 2, "tensor": 2}}[where]
failing = {"loss": 3, "block": 0, "tensor": 1}[where]

def fail():
    if rank == failing and eng.step_count == 1:
        print("FAILS AT", time.time(), file=sys.stderr, flush=True)
        raise ValueError("the user's own mistake")

def loss(output, batch):
    if where == "loss" and output.requires_grad:
        fail()
    return loss_sum(output, batch)

def main():
    global eng
    torch.manual_seed(1)
    model = Decoder(DecoderConfig(vocabulary=31, layers=4, width=16, heads=2, context=6))
    tokens = torch.arange(56).remainder(31).view(8, 7)
    batch = {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "parallel": grid,
              "checkpoint": {"folder": "run" if where == "block" else None},  # with one, SIGTERM is a wish
              "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    example = {key: value[:2] for key, value in batch.items()}
    eng = None
    eng = engine.initialize(model, config, loss_fn=lambda o, b: loss(o, b) if eng else loss_sum(o, b),
                            example_batch=example)
    if where != "loss":
        model.blocks[0].register_forward_pre_hook(lambda *_: fail())
    for _ in range(3):
        eng.train_batch(batch)

if sys.argv[2] == "plain":
    main()
else:
    leave_traceback(main)
"""


def run(python: str, folder: Path, where: str, how: str) -> tuple[int, float, str]:
    """(exit code, seconds from the mistake to the end of the job, what was printed)."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TORCHELASTIC")}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [*warm_torchrun(python), "--standalone", "--nproc_per_node", "4", str(script)]
    done = subprocess.run(
        [*command, where, how], env=environment, cwd=folder, text=True, timeout=240,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip
    ended = time.time()
    failed = [float(line.split()[-1]) for line in done.stdout.splitlines() if "FAILS AT" in line]
    assert len(failed) == 1, done.stdout
    return done.returncode, ended - failed[0], done.stdout


@pytest.mark.parametrize(
    ("where", "how"),
    [
        ("loss", "plain"),
        pytest.param("block", "traceback", marks=pytest.mark.long),
        pytest.param("tensor", "plain", marks=pytest.mark.long),
    ],
)
def test_job_goes_down_and_the_last_traceback_is_the_cause(
    tmp_path: Path, warm_python: str, where: str, how: str
) -> None:
    code, seconds, printed = run(warm_python, tmp_path, where, how)
    assert code != 0
    assert seconds < SECONDS
    print(f"the job was down {seconds:.1f} s after the mistake")
    of_ranks = [line for line in printed.splitlines() if line.startswith("[rank")]
    tracebacks = {line.split("]")[0] for line in of_ranks if "Traceback (most recent call last)" in line}
    failing = {"loss": 3, "block": 0, "tensor": 1}[where]
    assert tracebacks == {f"[rank{failing}"}, printed
    assert of_ranks[-1] == f"[rank{failing}]: ValueError: the user's own mistake"
    if how == "traceback":
        summary = printed.split("Root Cause (first observed failure)")[-1]
        assert summary.rstrip("= \n").endswith("ValueError: the user's own mistake"), "torchrun ends with the cause"


@pytest.mark.parametrize("launched", [True, False])
def test_a_broken_collective_waits_for_the_launcher_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch, launched: bool
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(comm, "sleep", slept.append)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if launched:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")

    def broken() -> None:
        raise RuntimeError("Connection closed by peer")

    with pytest.raises(EngineError, match="look for the first traceback of the job"):
        Pending(broken, lambda: "collective #1").wait()
    assert slept == ([10.0] if launched else [])


# a rank that stands still


def trains(line: Line, parallel: dict[str, Any], stage: int) -> None:
    """Train until a step fails, and say why."""
    torch.manual_seed(7)
    settings = {
        "train_batch_size": 8, "gradient_accumulation_steps": 2, "parallel": parallel,
        "zero_optimization": {"stage": stage}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }  # fmt: skip
    example, rows = models.batches_for("decoder", 2, 1)[0], 8 // parallel["data"]
    eng = engine.initialize(models.decoder(), settings, loss_fn=loss_sum, example_batch=example)
    eng.train_batch(models.batches_for("decoder", rows, 1)[0])
    line("ready")
    line.hear()
    try:
        while True:
            eng.train_batch(models.batches_for("decoder", rows, 1)[0])
    except EngineError as error:
        line(str(error))
    os._exit(0)


ALONE = {"TRINE_TIMEOUT_SECONDS": "15", "TRINE_WATCHDOG_SECONDS": "300"}
"""Communication gives up by itself: the watchdog, which would end the job after half of the timeout, waits longer."""


@pytest.mark.long
@pytest.mark.parametrize(
    ("parallel", "stage"),
    [({"pipeline": 2, "data": 2}, 3), ({"data": 2, "tensor": 2}, 3), ({"data": 2, "tensor": 2}, 1)],
)
def test_all_ranks_end_soon_after_one_stands_still(parallel: dict[str, int], stage: int) -> None:
    """Its neighbours are named by rank; SIGSTOP closes nothing, so only the timeout can tell."""
    with Launch(trains, 4, parallel, stage, env=ALONE) as launch:
        launch.hear("ready", seconds=200)
        launch.send(signal.SIGSTOP, 3)
        launch.tell("go")
        began = time.monotonic()
        for process in launch.processes[:3]:
            process.join(120)
        print(f"over after {time.monotonic() - began:.0f} s")
        launch.processes[3].kill()
        ended = launch.end()
    assert [rank.code for rank in ended] == [0, 0, 0, -signal.SIGKILL], [rank.error for rank in ended]
    said = [rank.said[-1] for rank in ended[:3]]
    assert all("A peer has probably stopped: " in text for text in said), said
    assert any("rank 3 did not come, ended or hangs" in text for text in said), "\n".join(said)
    assert all(place not in text for text in said for place in (".cc:", "frame #")), said


# a mistake on all ranks, and a job that torchrun restarts

MISTAKE = """
import engine
from torch import nn

settings = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "Addam"}}
engine.initialize(nn.Linear(4, 4), settings, loss_fn=lambda output, batch: output.square().mean())
"""
RESTART = """
import os, time
from engine.api import _open_comm
from engine.config import load_config
from engine.parallel.comm.world import read_world

rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if attempt and rank:
    time.sleep(3)
comm = _open_comm(load_config({"train_batch_size": 2}, 2), read_world(), {})
if not attempt:
    if rank:
        os._exit(3)
    time.sleep(100)
print(f"rank {rank} of attempt {attempt} has come", flush=True)
"""


def launch_two(python: str, folder: Path, script_text: str) -> str:
    """What a job of two ranks under torchrun prints, which may restart it once."""
    script = folder / "script.py"
    script.write_text(script_text)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TORCHELASTIC")}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment |= {"TRINE_TIMEOUT_SECONDS": "60"}
    restarts = ["--max_restarts", "1"] if script_text == RESTART else []
    done = subprocess.run(
        [*warm_torchrun(python), "--standalone", "--nproc_per_node", "2", *restarts, str(script)],
        env=environment, cwd=folder, text=True, timeout=240, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        check=False,
    )  # fmt: skip
    return done.stdout


@pytest.mark.long
def test_a_job_that_torchrun_restarts_finds_its_ranks_though_one_is_late(tmp_path: Path, warm_python: str) -> None:
    printed = launch_two(warm_python, tmp_path, RESTART)
    assert all(f"rank {rank} of attempt 1 has come" in printed for rank in (0, 1)), printed


@pytest.mark.long
def test_a_mistake_on_all_ranks_is_printed_once_and_ends_torchruns_summary(tmp_path: Path, warm_python: str) -> None:
    printed = launch_two(warm_python, tmp_path, MISTAKE)
    ranks, summary = printed.split(" FAILED\n")  # before it the name of what torchrun started
    ranks = "\n".join(line for line in ranks.splitlines() if "torch/distributed/" not in line)
    sentence = next(line for line in ranks.splitlines() if "ConfigError" in line)
    assert ranks.count("ConfigError: ") == 1 and '"Addam"' in sentence, printed
    assert "Traceback" not in ranks.split('File "')[0], printed
    assert summary.rstrip("= \n").endswith(sentence), printed


def dies() -> None:
    """Rank 1 leaves the process group; there is no launcher."""
    import torch.distributed as dist

    from engine.parallel.comm.comm import Comm
    from engine.parallel.comm.torch_backend import TorchBackend
    from engine.parallel.grid import Grid

    made = Comm(Grid(dp=2, rank=dist.get_rank()), TorchBackend(Grid(dp=2, rank=dist.get_rank()), torch.device("cpu")))
    if dist.get_rank():
        made.close()
        dist.destroy_process_group()
        time.sleep(30)
    began = time.monotonic()
    with pytest.raises(EngineError, match="A peer has probably stopped"):
        made.all_reduce(torch.ones(3), "dp", "test").wait()
    raise TimeoutError(f"told after {time.monotonic() - began:.0f} s")


def test_without_a_launcher_a_dead_peer_is_told_at_once(run_ranks: Callable[..., list[Any]]) -> None:
    from tests.ranks import RankError

    with pytest.raises(RankError, match=r"told after [01] s"):
        run_ranks(dies, 2, seconds=60.0)
