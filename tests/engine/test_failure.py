"""A rank that fails in the middle of a step: the job is down within seconds, and its last traceback is the cause."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.errors import EngineError
from engine.parallel.comm import comm
from engine.parallel.comm.comm import Pending

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


def run(folder: Path, where: str, how: str) -> tuple[int, float, str]:
    """(exit code, seconds from the mistake to the end of the job, what was printed)."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TORCHELASTIC")}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "4", str(script)]
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
        ("block", "traceback"),
        pytest.param("tensor", "plain", marks=pytest.mark.long),
    ],
)
def test_job_goes_down_and_the_last_traceback_is_the_cause(tmp_path: Path, where: str, how: str) -> None:
    code, seconds, printed = run(tmp_path, where, how)
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


def dies() -> None:
    """Rank 1 leaves the process group; there is no launcher."""
    import torch.distributed as dist

    from engine.parallel.comm.comm import Comm
    from engine.parallel.comm.torch_backend import TorchBackend
    from engine.parallel.grid import Grid

    made = Comm(Grid(1, 2, 1, dist.get_rank()), TorchBackend(Grid(1, 2, 1, dist.get_rank()), torch.device("cpu")))
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
