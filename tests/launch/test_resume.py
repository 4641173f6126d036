"""Runs of ``train.py`` that are stopped or killed in the middle and started again, on the same grid and on others."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
STEPS, EVERY, INTERRUPTED = 120, 10, 25
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TRINE_TIMEOUT_SECONDS": "60"}
BATCH = {"train_batch_size": 8, "monitor": {"every": 1}, "checkpoint": {"every": EVERY}}
GRIDS: dict[int, dict[str, Any]] = {
    1: BATCH | {"zero_optimization": {"stage": 0}},
    2: BATCH | {"zero_optimization": {"stage": 2}},
    4: BATCH | {"gradient_accumulation_steps": 2, "parallel": {"tensor": 2, "pipeline": 2}},
}
"""Processes -> configuration: everything changes but the global batch."""
STOPPED, ALL_STOPPED, KILLED = "SIGTERM to torchrun", "SIGTERM to all processes", "SIGKILL to a rank"
SAME = ("step", "loss", "grad_norm", "lr", "weight", "tokens", "skipped")


def begin(folder: Path, out: str, ranks: int) -> subprocess.Popen[str]:
    config = folder / f"{ranks}.json"
    config.write_text(json.dumps(GRIDS[ranks]))
    size = ["--layers", "2", "--width", "16", "--heads", "2", "--context", "16", "--sample", "5"]
    options = [str(ROOT / "train.py"), "--steps", str(STEPS), "--out", out, "--config", str(config), *size]
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *launcher, *options]
    with open(folder / f"{out}.log", "a") as log:
        return subprocess.Popen(command, cwd=folder, env=ENVIRONMENT, text=True, stdout=log, stderr=subprocess.STDOUT)


def end(process: subprocess.Popen[str], folder: Path, out: str) -> None:
    assert process.wait(timeout=180) == 0, (folder / f"{out}.log").read_text()[-3000:]


def rows(folder: Path, out: str) -> list[dict[str, Any]]:
    """What was logged; a row that is being written does not count."""
    path = folder / out / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def interrupt(process: subprocess.Popen[str], folder: Path, out: str, how: str) -> int:
    """End a run once some steps are made; the last step that it has logged."""
    deadline = time.monotonic() + 120
    while len(rows(folder, out)) < INTERRUPTED:
        assert process.poll() is None and time.monotonic() < deadline, (folder / f"{out}.log").read_text()[-3000:]
        time.sleep(0.01)
    children = [int(child) for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    for pid in {STOPPED: [process.pid], ALL_STOPPED: [*children, process.pid], KILLED: children[-1:]}[how]:
        os.kill(pid, signal.SIGKILL if how == KILLED else signal.SIGTERM)
    assert process.wait(timeout=120) != 0
    made = int(rows(folder, out)[-1]["step"])
    assert INTERRUPTED <= made < STEPS, "in the middle"
    if how != KILLED:
        assert (folder / out / f"checkpoints/step-{made:08d}").is_dir(), (folder / f"{out}.log").read_text()[-3000:]
    return made


def check_whole(given: list[dict[str, Any]]) -> None:
    assert [row["step"] for row in given] == list(range(1, STEPS + 1)), "every step once, in order"


def check_same(given: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    """To the bit."""
    check_whole(given)
    for left, right in zip(given, wanted, strict=True):
        assert {name: left[name] for name in SAME} == {name: right[name] for name in SAME}


@pytest.mark.long
def test_one_process_stopped_by_sigterm_goes_on_to_the_bit(tmp_path: Path) -> None:
    whole, stopped = begin(tmp_path, "whole", 1), begin(tmp_path, "stopped", 1)
    made = interrupt(stopped, tmp_path, "stopped", STOPPED)
    assert stopped.returncode == 128 + signal.SIGTERM
    end(begin(tmp_path, "stopped", 1), tmp_path, "stopped")
    assert f"step-{made:08d}, {made} updates made" in (tmp_path / "stopped.log").read_text()
    end(whole, tmp_path, "whole")
    check_same(rows(tmp_path, "stopped"), rows(tmp_path, "whole"))
    assert sorted(path.name for path in (tmp_path / "stopped/checkpoints").glob("*")) == [
        ".trine.lock", "latest", f"step-{STEPS - EVERY:08d}", f"step-{STEPS:08d}",
    ]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("how", [STOPPED, ALL_STOPPED, KILLED])
def test_a_grid_goes_on_to_the_bit(tmp_path: Path, ranks: int, how: str) -> None:
    end(begin(tmp_path, "whole", ranks), tmp_path, "whole")
    interrupt(begin(tmp_path, "broken", ranks), tmp_path, "broken", how)
    end(begin(tmp_path, "broken", ranks), tmp_path, "broken")
    check_same(rows(tmp_path, "broken"), rows(tmp_path, "whole"))


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("how", [STOPPED, KILLED])
def test_two_processes_go_on_as_another_grid(tmp_path: Path, ranks: int, how: str) -> None:
    end(begin(tmp_path, "whole", 2), tmp_path, "whole")
    interrupt(begin(tmp_path, "broken", 2), tmp_path, "broken", how)
    end(begin(tmp_path, "broken", ranks), tmp_path, "broken")
    given, wanted = rows(tmp_path, "broken"), rows(tmp_path, "whole")
    check_whole(given)
    off = max(abs(left["loss"] / right["loss"] - 1) for left, right in zip(given, wanted, strict=True))
    print(f"{how}, 2 -> {ranks} processes: losses within {off:.1e}")
    assert off < 1e-5
