"""A job that stands still or dies: the one to blame is named in time, in the launcher's summary and in a report."""

import json
import os
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cluster.jobs import TIMEOUT
from tests.selection import wide
from tests.tables import Table
from tests.warm_python import warm_torchrun

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "tests/cluster/faulty.py"
BOUND = TIMEOUT + 1.0
"""Seconds from the fault to the sentence."""
GRIDS = ("data=2", "tensor=2", "pipeline=2", "data=2,tensor=2", "tensor=2,pipeline=2", "data=2,pipeline=2")
FAULTS = {  # words of the sentence; "|" stands between two of which one is there
    "forward-stop": "has been stopped, by SIGSTOP or a debugger, for ",
    "forward-loop": "has computed for ",
    "hook-loop": "has computed for ",
    "loss-loop": "has computed for ",
    "between-leave": "has run the user's code for ",
    "between-alone": "has run the user's code for |has ended: signal 6 (SIGABRT)",
    "other-call": " is in eval_batch, while rank",
    "known-call": " is in eval_batch, while rank|has ended: signal 6 (SIGABRT), in control over world",
    "forward-kill": "has ended: signal 9 (SIGKILL)",
    "forward-raise": "ValueError: odd input",
    "hook-raise": "ValueError: odd input",
    "loss-raise": "ValueError: odd input",
    "forward-memory": "OutOfMemoryError: no memory left",
}
_SHAPES = "{} were given different batches"
_CALLS = "{} make different calls of the engine"
REFUSED = {
    ("other-shape", "data=2"): "[rank1]: RuntimeError: mat1 and mat2 shapes cannot be multiplied",
    ("other-shape", "tensor=2"): _SHAPES.format("rank 0 and rank 1"),
    ("other-shape", "pipeline=2"): _SHAPES.format("rank 0 and rank 1"),
    ("other-shape", "data=2,tensor=2"): _SHAPES.format("rank 2 and rank 3"),
    ("other-shape", "tensor=2,pipeline=2"): _SHAPES.format("rank 0 and rank 3"),
    ("other-shape", "data=2,pipeline=2"): _SHAPES.format("rank 1 and rank 3"),
    ("known-call", "tensor=2"): _CALLS.format("rank 0 and rank 1"),
    ("known-call", "pipeline=2"): _CALLS.format("rank 0 and rank 1"),
    ("known-call", "tensor=2,pipeline=2"): _CALLS.format("rank 0 and rank 3"),
}
"""What ends by a sentence of the engine, or of torch, before anybody waits."""
OFTEN = (("forward-loop", "pipeline=2"), ("forward-kill", "data=2"))
ABOUT = {
    "forward-stop": "SIGSTOP in a forward",
    "forward-loop": "`while True` in a forward",
    "hook-loop": "`while True` in a hook of the backward",
    "loss-loop": "`while True` in the loss",
    "between-leave": "skips what the others do",
    "between-alone": "makes a collective of torch alone",
    "other-call": "evaluates while the others train, for the first time",
    "known-call": "the same after some evaluations",
    "other-shape": "a batch of another shape",
    "forward-kill": "`kill -9`",
    "forward-raise": "raises in a forward",
    "hook-raise": "raises in a hook of the backward",
    "loss-raise": "raises in the loss",
    "forward-memory": "runs out of memory",
}
CASES = [(fault, grid) for fault in FAULTS for grid in GRIDS if (fault, grid) not in REFUSED]


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

    def arm(self) -> None:
        """Let it go wrong."""
        self.armed.touch()

    def seconds_to(self, words: str) -> float:
        """Wait until it has printed ``words``; the seconds since it went wrong."""
        self.wait_for(words, BOUND + 3)
        return time.monotonic() - float(self.armed.with_name("fault").read_text())


@contextmanager
def started(fault: str, victim: int, grid: str, folder: Path, python: str) -> Iterator[Started]:
    """A job of all ranks of ``grid``, once it trains and is watched."""
    ranks = 2 ** (1 + grid.count(","))
    armed = folder / "armed"
    command = [*warm_torchrun(python), "--nproc-per-node", str(ranks), "--standalone", str(SCRIPT)]
    job_of = [fault, str(victim), str(armed), grid, str(TIMEOUT)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "0"}
    with (folder / "out").open("wb") as output:
        launcher = subprocess.Popen([*command, *job_of], stdout=output, stderr=output, env=environment)
    job = Started(launcher, folder / "out", armed)
    try:
        job.wait_for("trains", 60, ranks)
        time.sleep(TIMEOUT / 4 + 0.5)  # the monitor has begun
        yield job
    finally:
        launcher.terminate()
        launcher.wait(60)


def last_of(said: str) -> int:
    """The rank with which the launcher's summary ends."""
    found = re.search(r"^ +rank +: (\d+) ", said.rpartition("Root Cause")[2], flags=re.MULTILINE)
    assert found is not None, said[-2000:]
    return int(found[1])


@pytest.mark.parametrize(("fault", "grid"), [case if case in OFTEN else wide(*case) for case in CASES])
def test_the_one_to_blame_is_named_in_time(
    fault: str, grid: str, tmp_path: Path, warm_python: str, faults_table: Table
) -> None:
    ranks = 2 ** (1 + grid.count(","))
    victim = ranks - 1  # the last rank has the last stage, and so the loss
    with started(fault, victim, grid, tmp_path, warm_python) as job:
        job.arm()
        took = job.seconds_to(f"trine watchdog: rank {victim} (")
        assert job.launcher.wait(30) != 0
        said = job.said()
    (line,) = [line for line in said.splitlines() if line.startswith("trine watchdog: ")]
    assert any(words in line for words in FAULTS[fault].split("|")), line
    assert took < BOUND, f"{took:.1f} s"
    faults_table.cells[ABOUT[fault], grid.replace(",", ", ")] = f"{took:.1f} s"
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
    if fault.endswith(("kill", "raise", "memory")):
        assert last_of(said) == victim


@pytest.mark.long
@pytest.mark.parametrize(("fault", "grid"), REFUSED)
def test_what_cannot_be_is_refused_with_its_rank(
    fault: str, grid: str, tmp_path: Path, warm_python: str, faults_table: Table
) -> None:
    victim = 2 ** (1 + grid.count(",")) - 1
    with started(fault, victim, grid, tmp_path, warm_python) as job:
        job.arm()
        took = job.seconds_to(REFUSED[fault, grid])
        assert job.launcher.wait(30) != 0
        said = job.said()
    assert took < BOUND, f"{took:.1f} s"
    assert REFUSED[fault, grid] in said.rpartition("Root Cause")[2] or last_of(said) == victim
    faults_table.cells[ABOUT[fault], grid.replace(",", ", ")] = f"{took:.1f} s"


@pytest.mark.long
@pytest.mark.parametrize("grid", ["data=2,tensor=2", "data=2,pipeline=2"])
def test_a_slow_rank_is_named_and_the_job_goes_on(grid: str, tmp_path: Path, warm_python: str) -> None:
    with started("forward-slow", 3, grid, tmp_path, warm_python) as job:
        job.arm()
        job.wait_for("trine watchdog: rank 3 (", 40)
        assert " is slow: it computed " in job.said() and job.launcher.poll() is None
