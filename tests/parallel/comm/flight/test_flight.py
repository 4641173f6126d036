"""What a rank writes into its flight file is what another process reads, also after the rank was killed."""

import errno
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from engine.parallel.comm.flight import layout
from engine.parallel.comm.flight.flight import FlightFile, rank_runs, ranks_of
from engine.parallel.comm.flight.layout import EventKind, Phase
from engine.parallel.comm.flight.recorder import FlightRecorder, Stream

DP = Stream(EventKind.COLLECTIVE, "dp", "dp")
IDENTITY = {"host": "node0", "axes": {"dp": [(0, 1, 2)], "pp": [(0, 2, 2)]}}


def recorder(folder: Path) -> FlightRecorder:
    return FlightRecorder(folder / "rank2.flight", 2, 4, IDENTITY)


def test_a_step_is_read_as_it_was_written(tmp_path: Path) -> None:
    ours = recorder(tmp_path)
    file = FlightFile(ours.path)
    first = file.read()
    assert (first.rank, first.size, first.pid, first.host) == (2, 4, os.getpid(), "node0")
    assert (first.phase, first.step, first.written, first.waiting) == (Phase.USER, 0, 0, None)
    ours.enter(7)
    acted = ours.act("forward", 1, 3)
    assert str(file.read().action) == "forward of stage 1, microbatch 3"
    ours.acted(acted)
    sent = ours.begin(Stream(EventKind.SEND, "pp", "forward 0>1", 0), "activations", (1024, "float32"))
    summed = ours.begin(DP, "gradients", (4096, "bfloat16"))
    began = ours.wait(summed)
    within = file.read()
    assert (within.phase, within.step, within.action) == (Phase.STEP, 7, None)
    assert within.waiting is not None and within.waiting_since == began
    assert str(within.waiting) == "gradients over dp (#1 of 'dp', 4096 bytes bfloat16)"
    assert within.last is not None and within.last.sequence == acted
    ours.waited(summed, DP, began, 4096)
    ours.leave(8)
    after = file.read()
    assert (after.phase, after.step, after.waiting) == (Phase.USER, 8, None)
    assert after.last is not None and after.last.sequence == summed
    assert after.sums.steps == 1 and 0 < after.sums.waits["dp"] <= after.sums.in_steps
    (waits,) = after.streams
    assert (waits.kind, waits.axis, waits.stream, waits.peer) == (EventKind.COLLECTIVE, "dp", "dp", -1)
    assert (waits.count, waits.bytes, waits.nanoseconds) == (1, 4096, after.sums.waits["dp"])
    assert ours.waits == {axis: waited / 1e9 for axis, waited in after.sums.waits.items()}
    events = file.events()
    assert [event.sequence for event in events] == [acted, sent, summed]
    assert [event.peer for event in events] == [-1, 0, -1] and events[1].ended == 0
    assert str(events[1]) == "send 'activations' over pp to rank 0 (#1 of 'forward 0>1', 1024 bytes float32)"


def test_old_events_make_room_and_counts_go_on(tmp_path: Path) -> None:
    ours = recorder(tmp_path)
    file = FlightFile(ours.path)
    for number in range(layout.EVENTS + 10):
        ours.begin(DP, f"bucket {number}")
    events = file.events()
    assert [event.count for event in events] == list(range(11, layout.EVENTS + 11))
    assert events[0].label == "bucket 10" and file.read().written == layout.EVENTS + 10
    ours.ended(3)  # its place belongs to another one by now
    assert not any(event.ended for event in file.events())


def test_waits_are_summed_by_stream_and_too_many_share_the_last_place(tmp_path: Path) -> None:
    ours = recorder(tmp_path)
    file = FlightFile(ours.path)
    assert file.read().streams == ()
    for turn in range(2):
        for number in range(layout.STREAMS + 5):
            stream = Stream(EventKind.RECEIVE, "pp", f"forward 0>{number}", number)
            ours.waited(ours.begin(stream, "activations"), stream, ours.wait(1), 10 + turn)
    found = file.read().streams
    assert [(one.stream, one.peer, one.count, one.bytes) for one in found] == [
        (f"forward 0>{number}", number, 2, 21) for number in [*range(layout.STREAMS - 1), layout.STREAMS + 4]
    ]


def test_the_file_of_a_killed_rank_is_read(tmp_path: Path) -> None:
    child = os.fork()
    if not child:
        ours = recorder(tmp_path)
        ours.enter(41)
        ours.wait(ours.begin(Stream(EventKind.RECEIVE, "pp", "backward 1>0", 0), "gradient", (8, "float32")))
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    flight = FlightFile(tmp_path / "rank2.flight").read()
    assert (flight.phase, flight.step, flight.pid) == (Phase.STEP, 41, child)
    assert str(flight.waiting) == "receive 'gradient' over pp from rank 0 (#1 of 'backward 1>0', 8 bytes float32)"


def test_words_stay_and_an_end_without_words_is_orderly(tmp_path: Path) -> None:
    ours = recorder(tmp_path)
    file = FlightFile(ours.path)
    ours.say("ValueError: ä" + "x" * 5000)
    ours.say("a second error that the first one caused")
    ours.close()
    assert file.read().words.startswith("ValueError: ä") and len(file.read().words) < layout.WORDS_BYTES
    assert file.read().phase == Phase.USER
    ours.path.unlink()
    other = recorder(tmp_path)
    file = FlightFile(other.path)
    other.close()
    other.ended(other.begin(DP, "too late"))  # goes nowhere, and fails nobody
    assert (file.read().phase, file.read().written) == (Phase.ENDED, 0)


@pytest.mark.parametrize(
    ("ranks", "runs"),
    [
        ((), []),
        ((5,), [(5, 1, 1)]),
        (range(3, 30_000, 8), [(3, 8, 3750)]),
        ((0, 1, 2, 3, 16, 17, 18, 19), [(0, 1, 4), (16, 1, 4)]),
        ((0, 4, 1, 5), [(0, 4, 2), (1, 4, 2)]),
    ],
)
def test_ranks_of_an_axis_are_few_runs(ranks: Sequence[int], runs: list[tuple[int, int, int]]) -> None:
    assert rank_runs(ranks) == runs and ranks_of(runs) == tuple(ranks)


def test_what_is_no_flight_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rank0.flight"
    path.write_bytes(b"short")
    with pytest.raises(ValueError, match="is no flight file: its size"):
        FlightFile(path)
    path.write_bytes(bytes(layout.FILE_BYTES))
    with pytest.raises(ValueError, match="is no flight file of this version"):
        FlightFile(path).read()


def test_without_room_no_file_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        recorder(tmp_path)
    assert not list(tmp_path.iterdir())
