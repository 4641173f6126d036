"""The main job under real torchrun: one node, two nodes, the user's own text, and a rank that fails."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engine.launch.reference_run import read_settings
from engine.launch.run_folder import training_options
from tests.warm_python import warm_torchrun

ROOT = Path(__file__).parents[2]
SMALL = ["--steps", "3", "--layers", "2", "--width", "32", "--context", "32", "--sample", "20"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
}
"""As a user has it: interpreted kernels, which tests switch on, would take most of the time."""


def run(command: list[str], folder: Path, seconds: float = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=seconds, check=False
    )


def test_one_command_trains_and_reports(tmp_path: Path) -> None:
    # torchrun and ranks are cold here, as a user has them: what they import is part of the test.
    # every option goes through torchrun, whose parser trips over names that abbreviate its own
    given = ["--out", "runs/train", "--config", str(ROOT / "configs/dp_zero1.json"), "--heads", "2"]
    done = run([*TORCHRUN, "--nproc_per_node", "2", str(ROOT / "train.py"), *SMALL, *given], tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    for expected in ("2 ranks = 1 pipeline x 2 data x 1 tensor", "step 1/3", "step 3/3 100%", "bpb", "eta 0s",
                     "bits per byte", "--- sample", "gradients", "clipped at 1", "digest"):  # fmt: skip
        assert expected in done.stdout, expected
    assert "Warning" not in done.stderr
    assert done.stdout.count("step 3/3") == 1, "one progress line, from rank 0"
    for line in done.stdout.splitlines():
        if line.strip().startswith(("dp ", "world ")):
            planned, measured = line.split("call")[:2]
            assert planned.split()[-3:] == measured.split()[-3:], f"plan and measurement differ: {line}"
    lines = [json.loads(line) for line in (tmp_path / "runs/train/metrics.jsonl").read_text().splitlines()]
    assert lines and lines[0]["step"] == 1
    record = json.loads((tmp_path / "runs/train/run.json").read_text())
    assert len(record["corpus"]["digest"]) == 16 and record["config"]["zero_optimization"]["stage"] == 1


def test_a_second_run_goes_on_and_a_fresh_one_keeps_it(tmp_path: Path, warm_python: str) -> None:
    text = tmp_path / "mine.txt"
    text.write_text("to be or not to be, that is the question\n" * 400)
    command = [warm_python, str(ROOT / "train.py"), *SMALL, "--data", str(text)]
    starts = [run([*command, *more], tmp_path) for more in ([], [], ["--fresh"])]
    for done in starts:
        assert done.returncode == 0, done.stderr[-3000:]
    first, again, fresh = (done.stdout for done in starts)
    assert "nothing to train: runs/train has made 3 steps, and --steps is 3" in again
    assert "step 3/3" in first and "step 3/3" not in again and "bytes sent by rank 0" not in first + again
    assert "step 1/3" in fresh and "checkpoint loaded" not in fresh
    for folder in ("train", "train.1"):
        assert (tmp_path / "runs" / folder / "run.json").exists()
        assert [path.name for path in (tmp_path / "runs" / folder / "checkpoints").glob("step-*")] == ["step-00000003"]
        assert len((tmp_path / "runs" / folder / "metrics.jsonl").read_text().splitlines()) == 1
    losses = [[line for line in text.splitlines() if line.startswith("validation")] for text in (first, again, fresh)]
    assert losses[0] == losses[1] == losses[2], "what was trained is kept, and the same seed gives the same run"


@pytest.mark.long
def test_two_nodes(tmp_path: Path, warm_python: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    nodes = []
    for node in range(2):
        place = ["--nnodes", "2", "--node_rank", str(node), "--nproc_per_node", "2"]
        address = ["--master_addr", "127.0.0.1", "--master_port", str(port)]
        command = [*warm_torchrun(warm_python), *place, *address, str(ROOT / "train.py"), *SMALL]
        nodes.append(
            subprocess.Popen(
                command, cwd=tmp_path, env=ENVIRONMENT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
        )
    try:
        outputs = [node.communicate(timeout=120) for node in nodes]
    finally:
        for process in nodes:
            process.kill()
            process.communicate()
    assert [node.returncode for node in nodes] == [0, 0], outputs[0][1][-2000:]
    assert "4 ranks = 2 pipeline x 1 data x 2 tensor" in outputs[0][0] and "step 3/3" in outputs[0][0]
    assert "step" not in outputs[1][0], "only rank 0 speaks"


FAILING = """
import sys, torch, engine
from torch import nn

def loss(output, batch):
    if torch.distributed.get_rank() == 1:
        raise RuntimeError("the user's own mistake")
    return output.mean()

with engine.initialize(lambda: nn.Linear(4, 4), {"train_batch_size": 4}, loss_fn=loss) as eng:
    eng.train_batch(torch.ones(2, 4))
"""


@pytest.mark.long
def test_a_rank_that_raises_brings_the_job_down_with_its_traceback(tmp_path: Path, warm_python: str) -> None:
    (tmp_path / "fail.py").write_text(FAILING)
    started = time.monotonic()
    done = run([*warm_torchrun(warm_python), "--nproc_per_node", "2", "fail.py"], tmp_path)
    assert done.returncode != 0 and "the user's own mistake" in done.stderr
    assert time.monotonic() - started < 60


def test_settings_take_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    options = training_options(["zero_optimization.stage=2", "checkpoint.every=7", "--steps", "3"])
    settings = read_settings(options, ROOT)
    assert settings["zero_optimization"]["stage"] == 2 and settings["checkpoint"]["every"] == 7


@pytest.mark.parametrize("arguments", [["--steps", "0"], ["--data", "missing.txt"], ["--config", "missing.json"]])
def test_wrong_options_are_named(tmp_path: Path, arguments: list[str], warm_python: str) -> None:
    done = run([warm_python, str(ROOT / "train.py"), *arguments], tmp_path)
    assert done.returncode != 0 and (arguments[0] in done.stderr or arguments[1] in done.stderr)
