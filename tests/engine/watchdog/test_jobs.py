"""A job that stands still or dies: the one to blame is named in time, in the launcher's summary and in a report."""

import json
import os
import subprocess
import time
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


@pytest.mark.parametrize(("fault", "grid"), [case if case in OFTEN else wide(*case) for case in CASES])
def test_the_one_to_blame_is_named_in_time(fault: str, grid: str, tmp_path: Path, warm_python: str) -> None:
    ranks = 2 ** (1 + grid.count(","))
    victim, armed = ranks - 1, tmp_path / "armed"  # the last rank has the last stage, and so the loss
    command = [*warm_torchrun(warm_python), "--nproc-per-node", str(ranks), "--standalone", str(SCRIPT)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "0"}
    with (tmp_path / "out").open("wb") as output:
        job = subprocess.Popen(
            [*command, fault, str(victim), str(armed), grid], stdout=output, stderr=output, env=environment
        )

    def said() -> str:
        return (tmp_path / "out").read_text(errors="replace")

    deadline = time.monotonic() + 60
    while said().count("trains") < ranks:
        assert time.monotonic() < deadline and job.poll() is None, said()[-3000:]
        time.sleep(0.05)
    time.sleep(TIMEOUT / 4 + 0.5)  # the monitor has begun
    armed.touch()
    began = time.monotonic()
    while f"trine watchdog: rank {victim} (" not in said():
        assert time.monotonic() - began < TIMEOUT + 3, said()[-3000:]
        time.sleep(0.02)
    took = time.monotonic() - began
    assert job.wait(30) != 0
    (line,) = [line for line in said().splitlines() if line.startswith("trine watchdog: ")]
    assert FAULTS[fault] in line, line
    # the ranks have to come to the place first, and this machine may be busy
    assert took < TIMEOUT + 1 + 0.5, f"{took:.1f} s"
    report = json.loads((tmp_path / "report" / "watchdog.json").read_text())
    assert report["ranks"] == [victim] and report["sentence"] in line
    assert [view["rank"] for view in report["views"]] == list(range(ranks))
    if fault.endswith("loop"):
        assert "go_wrong" in report["views"][victim]["stack"], "the Python stack of a rank that runs"
    if fault == "forward-kill":
        assert f"rank {victim} (" in said().rpartition("Root Cause")[2], "the launcher's last words"
