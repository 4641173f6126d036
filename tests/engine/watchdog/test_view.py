"""What a host sees of a rank: calls with their peers, states of processes, ways to end."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from engine.parallel.comm.flight.flight import Event, FlightFile
from engine.parallel.comm.flight.layout import EventKind
from engine.parallel.comm.flight.recorder import FlightRecorder, Stream, indices_text
from engine.watchdog.view import RankView, ending, exit_of, look, process_state


def event(sequence: int, begun: int, ended: int) -> Event:
    return Event(
        sequence=sequence, kind=EventKind.COLLECTIVE, axis="dp", stream="dp", count=sequence, label="gradients",
        bytes=64, dtype="float32", peer=-1, begun=begun, ended=ended,
    )  # fmt: skip


def test_a_view_has_the_peers_of_its_calls_and_travels(tmp_path: Path) -> None:
    identity = {"host": "node0", "stage": 1, "axes": {"dp": [(1, 2, 2)], "pp": [(0, 3, 4)]}}
    ours = FlightRecorder(tmp_path / "rank3.flight", 3, 12, identity)
    ours.begin(Stream(EventKind.COLLECTIVE, "dp", "dp"), "gradients", (64, "float32"))
    tied = Stream(EventKind.COLLECTIVE, "pp", "pp stages 0,3")
    ours.waited(ours.begin(tied, "tied", (8, "float32")), tied, ours.wait(2))
    sequence = ours.begin(Stream(EventKind.RECEIVE, "pp", "forward 0>1", 0), "forward", (8, "float32"))
    began = ours.wait(sequence)
    file = FlightFile(ours.path)
    view = look(file.read(), file.events(), began + 2_500_000_000, "S", "")
    assert view.waiting is not None and (view.waiting.peers, view.waiting.seconds) == ((0, 3), 2.5)
    assert {call.stream: call.peers for call in view.recent} == {
        "dp": (1, 3), "pp stages 0,3": (0, 9), "forward 0>1": (0, 3),
    }  # fmt: skip
    ours.begin(Stream(EventKind.COLLECTIVE, "pp", "calls of the engine"), "eval_batch")
    (joined,) = look(file.read(), file.events()[-1:], began, "S", "").recent
    assert joined.text == "eval_batch", "nothing is sent, so there are no bytes to tell"
    assert (view.rank, view.stage, view.host, view.pid) == (3, 1, "node0", os.getpid())
    assert [(one.stream, one.ranks, one.count, one.receives) for one in view.streams] == [
        ("pp stages 0,3", (0, 9), 1, False)
    ]
    assert RankView.from_json(json.loads(json.dumps(view.to_json()))) == view
    assert view.begun(view.waiting) and view.name == f"rank 3 (node0, pid {os.getpid()})"


def test_the_peers_of_large_groups_are_read_from_the_names_of_streams(tmp_path: Path) -> None:
    ours = FlightRecorder(tmp_path / "rank100.flight", 100, 128, {"host": "node0", "axes": {"dp": [(0, 1, 128)]}})
    cut = "dp indices " + ",".join(map(str, range(0, 100, 3)))
    for indices in (range(16), range(100, 108), range(0, 128, 8), (3, 1, 0, 2), (0, 1, 2, 7, 100)):
        sequence = ours.begin(Stream(EventKind.COLLECTIVE, "dp", f"dp gathers indices {indices_text(indices)}"), "w")
        ours.wait(sequence)
        waiting = look(FlightFile(ours.path).read(), [], 0, "S", "").waiting
        assert waiting is not None and waiting.peers == tuple(indices)
    ours.wait(ours.begin(Stream(EventKind.COLLECTIVE, "dp", cut), "w"))
    waiting = look(FlightFile(ours.path).read(), [], 0, "S", "").waiting
    assert waiting is not None and waiting.peers == tuple(range(128)), "a name that was cut tells no indices"


def test_states_and_ends_of_processes() -> None:
    child = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    handle = os.pidfd_open(child.pid)
    os.kill(child.pid, signal.SIGSTOP)
    while process_state(child.pid)[0] != "T":
        pass
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    state, status = process_state(child.pid)
    assert (state, ending(status)) == ("Z", "signal 9 (SIGKILL)")
    child.communicate()
    assert process_state(child.pid) == ("", 0)
    assert exit_of(handle) in (status, None), "None before Linux 6.15"
    os.close(handle)
    assert ending(256) == "exit status 1"
