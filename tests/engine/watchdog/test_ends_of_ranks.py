"""Ranks that the watchdog kills: they first have time to end by themselves, and a line names them and the cause."""

import os
import signal
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from engine.parallel.comm import failed_calls, rendezvous, world
from engine.parallel.comm.flight.recorder import FlightRecorder
from engine.watchdog import monitor
from engine.watchdog.exchange import Hub, Spoke
from engine.watchdog.local_ranks import SUFFIX
from engine.watchdog.monitor import HubPlace, Monitor, Orders

HERE = "127.0.0.1"
PATIENCE = 30.0
LEFT = "the ranks of the hub have ended."


def orders(folder: Path, hub: HubPlace, report: str = "") -> Orders:
    """Orders of the monitor of a host of a job of two ranks, with a timeout that no test reaches."""
    return Orders(
        folder=str(folder), job="job", host="here", size=2, timeout=600.0, slow_factor=0.0, slow_steps=1,
        report=report, hub=hub,
    )  # fmt: skip


def lives(folder: Path, rank: int, ready: Connection, seconds: float) -> None:
    """Body of a rank: it has a flight file, and kills itself after ``seconds``."""
    recorder = FlightRecorder(folder / f"rank{rank}{SUFFIX}", rank, 2, {})
    ready.send(recorder.path.name)
    time.sleep(seconds)
    os.kill(os.getpid(), signal.SIGKILL)


def start(folder: Path, rank: int, seconds: float) -> Any:
    """Start a rank; return its process once it has its file."""
    ours, theirs = get_context("fork").Pipe()
    process = get_context("fork").Process(target=lives, args=(folder, rank, theirs, seconds))
    process.start()
    theirs.close()
    ours.recv()
    return process


def test_a_line_names_the_ranks_that_are_killed_and_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(monitor, "_LEAVE_SECONDS", 0.5)
    first, second = start(tmp_path, 0, 1.0), start(tmp_path, 1, 4 * PATIENCE)
    report = str(tmp_path / "the run")
    Monitor(orders(tmp_path, HubPlace(address=HERE), report)).run()
    first.join(PATIENCE)
    second.join(PATIENCE)
    reported, killed = capfd.readouterr().err.splitlines()
    assert second.exitcode == -signal.SIGKILL
    assert reported.startswith("trine watchdog: rank 0 (") and "has ended: " in reported
    cause = reported.removeprefix("trine watchdog: ")
    shows = f"`trine watch '{report}'` shows the report."
    assert killed == f"trine watchdog kills rank 1 on here with SIGKILL, because {cause} {shows}"


def test_ranks_that_end_in_time_are_not_killed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ranks = [start(tmp_path, 0, 0.5), start(tmp_path, 1, 1.5)]
    Monitor(orders(tmp_path, HubPlace(address=HERE))).run()
    for rank in ranks:
        rank.join(PATIENCE)
    assert "kills" not in capfd.readouterr().err


def test_a_hub_whose_ranks_have_ended_leaves_the_others_their_time(tmp_path: Path) -> None:
    rank = start(tmp_path, 0, 1.0)
    watching = Monitor(orders(tmp_path, HubPlace(address=HERE)))
    assert watching.hub is not None
    spoke = Spoke(HERE, watching.hub.port, {"hello": "job", "host": "there", "ranks": [1]})
    running = Thread(target=watching.run)
    running.start()
    deadline, end = time.monotonic() + PATIENCE, None
    while end is None and time.monotonic() < deadline:
        end = next((message for message in spoke.poll(0.1, []) if "end" in message), None)
    running.join(PATIENCE)
    rank.join(PATIENCE)
    spoke.close()
    assert end is not None and "rank 0 (" in end["end"] and 0 < end["seconds"] < monitor._LEAVE_SECONDS


def test_another_host_kills_its_ranks_when_that_time_is_over(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rank, hub = start(tmp_path, 1, 4 * PATIENCE), Hub("job", HERE)
    watching = Monitor(orders(tmp_path, HubPlace(address=HERE, port=hub.port, host="there", ranks=(0,))))
    running = Thread(target=watching.run)
    running.start()
    while not any("views" in message for _, message in hub.poll(0.1)):
        assert running.is_alive()
    told = time.monotonic()
    hub.broadcast({"end": LEFT, "seconds": 0.5})
    hub.close()
    rank.join(PATIENCE)
    took = time.monotonic() - told
    running.join(PATIENCE)
    assert rank.exitcode == -signal.SIGKILL and took > 0.5
    assert f"trine watchdog kills rank 1 on here with SIGKILL, because {LEFT}\n" in capfd.readouterr().err


def test_the_time_exceeds_that_of_a_rank_to_find_the_cause_and_to_close() -> None:
    find = 2 * rendezvous._REPORT_SECONDS + 2 * failed_calls._WORDS_SECONDS
    assert find + world._DESTROY_SECONDS < monitor._LEAVE_SECONDS
