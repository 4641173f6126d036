"""No process of a job outlives it: monitors, workers and ranks end within two seconds, and its pipes close."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from itertools import zip_longest
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from torch.utils.data import Dataset

from engine.data.settings import DataPosition, LoaderSettings, StepRows
from engine.data.step_source import step_source
from engine.parallel.comm.flight.recorder import FlightRecorder
from engine.watchdog import local_ranks
from engine.watchdog.local_ranks import SUFFIX, LocalRanks
from engine.watchdog.monitor import HubPlace, Orders
from engine.watchdog.watchdog import MONITOR_COMMAND
from tests.selection import wide

ROOT = Path(__file__).parents[3]
SCRIPT = Path(__file__).with_name("short_job.py")
PATIENCE = 30.0
"""Seconds after which a test says that a process never ends."""
BOUND = 2.0
"""Seconds that a process may outlive its job."""
ENDS = ("close", "raise", "kill", "drop")


class Output:
    """The reading end of a pipe that processes hold."""

    def __init__(self) -> None:
        self.reading, self.writing = os.pipe()
        self.said = b""

    def close_writing(self) -> None:
        """Leave the writing end to the processes that were started."""
        os.close(self.writing)

    def closes(self, seconds: float = PATIENCE) -> bool:
        """Read on; whether nobody holds the writing end any more, before so many seconds have passed."""
        return self._read_until(None, seconds)

    def wait_for(self, words: bytes) -> None:
        """Read until they have come."""
        assert self._read_until(words, PATIENCE), self.said

    def _read_until(self, words: bytes | None, seconds: float) -> bool:
        end = monotonic() + seconds
        while words is None or words not in self.said:
            if not select.select([self.reading], [], [], max(0.0, end - monotonic()))[0]:
                return False
            piece = os.read(self.reading, 1 << 16)
            if not piece:
                return words is None
            self.said += piece
        return True


@contextmanager
def started(*commands: list[str], environments: Sequence[Mapping[str, str]] = ()) -> Iterator[tuple[Output, list[Any]]]:
    """Processes in sessions of their own, whose output is one; what is left of them ends with the block."""
    output = Output()
    processes = [
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=output.writing, stderr=output.writing, env=environment,
            start_new_session=True,
        )
        for command, environment in zip_longest(commands, environments)
    ]  # fmt: skip
    output.close_writing()
    try:
        yield output, processes
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        os.close(output.reading)


def orders(folder: Path) -> bytes:
    """Orders of the monitor of a job of two ranks."""
    hub = HubPlace(address="127.0.0.1")
    asked = Orders(
        folder=str(folder), job="job", host="here", size=2, timeout=1.0, slow_factor=0.0, slow_steps=1, report="",
        hub=hub,
    )  # fmt: skip
    return json.dumps(asdict(asked)).encode() + b"\n"


@pytest.mark.parametrize("given", ["whole", "cut", "none"])
def test_a_monitor_ends_when_its_ranks_have_closed_before_its_first_look(given: str, tmp_path: Path) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    with started([sys.executable, *MONITOR_COMMAND]) as (output, (monitor,)):
        monitor.communicate({"whole": orders(folder), "cut": orders(folder)[:20], "none": b""}[given])
        assert output.closes(), "the monitor waits for ranks that never come"
    assert b"Traceback" not in output.said, output.said.decode()


def test_a_rank_has_ended_when_another_process_has_its_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = FlightRecorder(tmp_path / f"rank0{SUFFIX}", 0, 1, {})
    with started([sys.executable, "-ISc", "input()"]) as (_, (child,)):
        monkeypatch.setattr(os, "pidfd_open", lambda _, real=os.pidfd_open: real(child.pid))
        ranks = LocalRanks(tmp_path)
        ranks.refresh()
        assert ranks.ranks[0].state
    monkeypatch.setattr(local_ranks, "process_state", lambda _: ("S", 0))
    assert ranks.refresh() == [0]
    ranks.close(remove=False)
    recorder.close()


AGENT = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", sys.argv[1]])
time.sleep(1000)
"""
RANK = """
import os, time
from engine.parallel.comm.launcher import end_with_agent
end_with_agent(os.environ)
print("ready", flush=True)
time.sleep(1000)
"""


def test_a_rank_ends_when_its_agent_is_killed() -> None:
    environment = {**os.environ, "TORCHELASTIC_RUN_ID": "job", "PYTHONPATH": str(ROOT)}
    with started([sys.executable, "-c", AGENT, RANK], environments=[environment]) as (output, (agent,)):
        output.wait_for(b"ready")
        agent.kill()
        assert output.closes(), "the rank goes on"


class Stuck(Dataset[int]):
    """Samples of which the second one never comes."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        time.sleep(1000 * (index > 0))
        return index


def _read_with_workers(line: Connection) -> None:
    settings = LoaderSettings(workers=1)
    steps = step_source(Stuck(), StepRows(micro=1, accumulation=1, rank=0, size=1), settings).steps(DataPosition())
    next(steps)
    line.send("ready")  # the worker has got its copy of ``line``
    time.sleep(1000)


def test_a_worker_of_a_loader_ends_when_its_rank_is_killed() -> None:
    ours, theirs = get_context("fork").Pipe()
    rank = get_context("fork").Process(target=_read_with_workers, args=(theirs,))
    rank.start()
    theirs.close()
    assert ours.recv() == "ready"
    rank.kill()
    assert wait([ours], PATIENCE), "a worker still holds the pipe"
    with pytest.raises(EOFError):
        ours.recv()
    rank.join()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def outlived(how: str, after: float, python: str) -> float:
    """Seconds for which something holds the output of a job of two ranks that has ended."""
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "TRINE_CACHE": "0"}
    environment = {**os.environ, **place, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "0"}
    command = [python, str(SCRIPT), how, str(after)]
    environments = [{**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    with started(command, command, environments=environments) as (output, ranks):
        for rank in ranks:
            rank.wait(60)
        ended = monotonic()
        assert output.closes(), output.said.decode(errors="replace")
        return monotonic() - ended


@pytest.mark.parametrize(("how", "times"), [("close", 1), ("kill", 1), *(wide(how, 24) for how in ENDS)])
def test_nothing_outlives_a_job_that_ends_within_a_second(how: str, times: int, warm_python: str) -> None:
    """The ends lie around the start of the monitor, a quarter of a second after the engine's."""
    late = [outlived(how, 0.2 + 0.4 * number / times, warm_python) for number in range(times)]
    print(f"{how}: {times} jobs, pipes closed after {max(late):.2f} s at most")
    assert times == 1 or max(late) < BOUND


def test_flight_files_of_a_job_that_runs_for_days_are_kept(tmp_path: Path) -> None:
    for job in ("runs", "ended"):
        (tmp_path / job).mkdir()
        FlightRecorder(tmp_path / job / f"rank0{SUFFIX}", 0, 2, {})
    (tmp_path / "ended" / f"rank0{SUFFIX}").unlink()
    for job in ("runs", "ended"):
        os.utime(tmp_path / job, (0, time.time() - 25 * 3600))
    local_ranks.remove_old(tmp_path)
    assert [job.name for job in tmp_path.iterdir()] == ["runs"]
