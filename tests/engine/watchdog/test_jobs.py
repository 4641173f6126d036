"""A job that stands still or dies: the one to blame is named in time, in the launcher's summary and in a report."""

import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.selection import wide
from tests.warm_python import warm_torchrun

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "tests/cluster/faulty.py"
TIMEOUT = 3.0
GRIDS = ("data=2", "tensor=2", "pipeline=2", "data=2,tensor=2", "tensor=2,pipeline=2", "data=2,pipeline=2")
FAULTS = {
    "forward-stop": "has been stopped, by SIGSTOP or a debugger, for ",
    "forward-loop": "has computed for ",
    "hook-loop": "has computed for ",
    "loss-loop": "has computed for ",
    "between-leave": "has been in the user's code for ",
    "forward-kill": "has ended: signal 9 (SIGKILL)",
    "hook-raise": "ValueError: odd input",
    "loss-raise": "ValueError: odd input",
    "forward-memory": "OutOfMemoryError: no memory left",
}
OFTEN = (("forward-loop", "tensor=2,pipeline=2"), ("forward-kill", "data=2"))
CASES = [(fault, grid) for fault in FAULTS for grid in GRIDS]


class Started:
    """A job under torchrun that trains, and goes wrong once ``armed`` exists."""

    def __init__(self, launcher: "subprocess.Popen[bytes]", output: Path, armed: Path) -> None:
        self.launcher, self.armed, self._output = launcher, armed, output

    def said(self) -> str:
        """Everything that it has printed."""
        return self._output.read_text(errors="replace")

    def wait_for(self, words: str, seconds: float, times: int = 1) -> None:
        """Return once it has printed ``words`` so many times."""
        deadline = time.monotonic() + seconds
        while self.said().count(words) < times:
            assert time.monotonic() < deadline, self.said()[-3000:]
            time.sleep(0.02)


@contextmanager
def started(fault: str, victim: int, grid: str, folder: Path, python: str) -> Iterator[Started]:
    """A job of all ranks of ``grid``, once it trains and is watched."""
    ranks = 2 ** (1 + grid.count(","))
    armed = folder / "armed"
    command = [*warm_torchrun(python), "--nproc-per-node", str(ranks), "--standalone", str(SCRIPT)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "0"}
    with (folder / "out").open("wb") as output:
        launcher = subprocess.Popen(
            [*command, fault, str(victim), str(armed), grid], stdout=output, stderr=output, env=environment
        )
    job = Started(launcher, folder / "out", armed)
    try:
        job.wait_for("trains", 60, ranks)
        time.sleep(TIMEOUT / 4 + 0.5)  # the monitor has begun
        yield job
    finally:
        launcher.terminate()
        launcher.wait(60)


@pytest.mark.parametrize(("fault", "grid"), [case if case in OFTEN else wide(*case) for case in CASES])
def test_the_one_to_blame_is_named_in_time(fault: str, grid: str, tmp_path: Path, warm_python: str) -> None:
    ranks = 2 ** (1 + grid.count(","))
    victim = ranks - 1  # the last rank has the last stage, and so the loss
    with started(fault, victim, grid, tmp_path, warm_python) as job:
        job.armed.touch()
        began = time.monotonic()
        job.wait_for(f"trine watchdog: rank {victim} (", TIMEOUT + 3)
        took = time.monotonic() - began
        assert job.launcher.wait(30) != 0
        said = job.said()
    (line,) = [line for line in said.splitlines() if line.startswith("trine watchdog: ")]
    assert FAULTS[fault] in line, line
    # the ranks have to come to the place first, and this machine may be busy
    assert took < TIMEOUT + 1 + 0.5, f"{took:.1f} s"
    report = json.loads((tmp_path / "report" / "watchdog_report.json").read_text())
    assert report["ranks"] == [victim] and report["sentence"] in line
    assert [view["rank"] for view in report["views"]] == list(range(ranks))
    events = (tmp_path / "report" / "watchdog_events.txt").read_text()
    assert "not ended" in events and all(f"  rank {rank}  " in events for rank in range(ranks))
    trace = json.loads((tmp_path / "report" / "watchdog_trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in trace} == set(range(ranks))
    if fault.endswith("loop"):
        assert "go_wrong" in report["views"][victim]["stack"], "the Python stack of a rank that runs"
    if fault == "forward-kill":
        assert f"rank {victim} (" in said.rpartition("Root Cause")[2], "the launcher's last words"


@pytest.mark.long
@pytest.mark.parametrize("grid", ["data=2,tensor=2", "data=2,pipeline=2"])
def test_a_slow_rank_is_named_and_the_job_goes_on(grid: str, tmp_path: Path, warm_python: str) -> None:
    with started("forward-slow", 3, grid, tmp_path, warm_python) as job:
        job.armed.touch()
        job.wait_for("trine watchdog: rank 3 (", 40)
        assert " is slow: it computed " in job.said() and job.launcher.poll() is None
