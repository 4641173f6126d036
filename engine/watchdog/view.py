"""View of one rank at a moment, from its flight file and from /proc; sent to the hub as JSON."""

import fcntl
import os
import struct
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from engine.parallel.comm.flight.flight import SECOND, Event, Flight, StreamWaits, rank_runs, ranks_of, read_indices
from engine.parallel.comm.flight.layout import NAME_BYTES, EventKind, Phase

RECENT = 6
"""Number of newest events of each stream in a view."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallView:
    """Collective, message or pipeline computation of a rank, as the watchdog sees it.

    ``seconds`` is the time since the call's end or, if it is unfinished, since its begin.
    """

    text: str
    stream: str
    count: int
    likeness: str
    """Text that is equal on all ranks for the same call: label, bytes and dtype."""
    peers: tuple[int, ...]
    """Ranks that take part in the call, including this one."""
    seconds: float

    @classmethod
    def of(cls, event: Event, flight: Flight, since: int, now: int) -> Self:
        """Returns the description of ``event`` for the watchdog.

        Args:
            event: collective, message or computation of the rank.
            flight: snapshot of the flight file that has recorded ``event``.
            since, now: begin or end of the event, or begin of the wait for it, and the present, in nanoseconds of
                the monotonic clock. Their difference becomes ``seconds`` of the view.
        """
        return cls(
            text=str(event) if event.bytes or event.kind == EventKind.ACTION else event.label,
            stream=event.stream,
            count=event.count,
            likeness=f"{event.label}, {event.bytes} bytes {event.dtype}",
            peers=_peers(event.stream, event.axis, event.peer, flight),
            seconds=max(0, now - since) / SECOND,
        )


def _peers(stream: str, axis: str, peer: int, flight: Flight) -> tuple[int, ...]:
    if peer >= 0:
        return tuple(sorted((flight.rank, peer)))
    ranks = ranks_of(flight.identity.get("axes", {}).get(axis, [[flight.rank, 1, 1]]))
    _, _, places = stream.replace(" indices ", " stages ").partition(" stages ")
    if not places or len(stream.encode()) >= NAME_BYTES:  # of a name that was cut, the last index is unknown
        return ranks
    return tuple(ranks[index] for index in read_indices(places))


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitView:
    """Total time that a rank has waited in one stream since the rank started.

    A stream is the sequence of collectives of one group, or of messages from one rank to another.
    """

    axis: str
    stream: str
    receives: bool
    """True for messages from another rank; False for collectives and messages to another rank."""
    runs: tuple[tuple[int, int, int], ...]
    """Ranks of the stream, including this one, encoded by :func:`rank_runs`."""
    count: int
    seconds: float

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks that exchange data in the stream, ascending, including this rank."""
        return ranks_of(self.runs)

    @classmethod
    def of(cls, waits: StreamWaits, flight: Flight) -> Self:
        """Returns the view of ``waits``, the total wait of a rank in one stream of calls.

        Args:
            flight: snapshot of the flight file in which the rank records its calls.
        """
        return cls(
            axis=waits.axis,
            stream=waits.stream,
            receives=waits.kind == EventKind.RECEIVE,
            runs=tuple(rank_runs(_peers(waits.stream, waits.axis, waits.peer, flight))),
            count=waits.count,
            seconds=waits.nanoseconds / SECOND,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankView:
    """State of one rank at one moment: its process, its step, and the calls in which it computes or waits.

    Durations are in seconds.
    """

    rank: int
    host: str
    pid: int
    phase: str
    """Name of the rank's :class:`Phase`."""
    stage: int
    """Index on axis pp; ranks with equal stage do equal work."""
    step: int
    in_phase: float
    idle: float
    """Seconds since the last event in the flight file."""
    process: str
    """State letter of the process in /proc (T: stopped); "" if it has ended."""
    ended: str
    """Exit status in words; "" if it runs, or if it is unknown."""
    words: str
    waiting: CallView | None
    action: CallView | None
    last: CallView | None
    recent: tuple[CallView, ...]
    """Newest calls of each stream, oldest first, to compare with other ranks."""
    in_steps: float
    """Total seconds in calls of the engine."""
    waits: dict[str, float]
    """Total seconds of waiting by axis."""
    streams: tuple[WaitView, ...] = ()
    """Total waits by stream, which identify the ranks waited for."""
    note: str = ""
    """Note of the rank about its training, such as the state of its outer loop; empty if none."""

    @property
    def runs(self) -> bool:
        """True if the rank's process exists, also if it is stopped; False for a zombie."""
        return bool(self.process) and self.process not in "ZX"

    @property
    def name(self) -> str:
        """Text that names the rank: "rank 3 (host-a, pid 4711)"."""
        return f"rank {self.rank} ({self.host}, pid {self.pid})"

    def begun(self, call: CallView) -> bool:
        """Returns True if this rank has begun ``call`` (seen on another rank) or a later call of the same stream."""
        mine = [each.count for each in self.recent if each.stream == call.stream]
        return bool(mine) and max(mine) >= call.count

    def to_json(self) -> dict[str, Any]:
        """Returns the view as a dict of JSON values; ``from_json`` reverses it."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """Returns the view from ``data``, a dict of ``to_json`` after a round trip through JSON text."""
        calls = {name: _call(data[name]) for name in ("waiting", "action", "last")}
        streams = tuple(WaitView(**{**each, "runs": tuple(map(tuple, each["runs"]))}) for each in data["streams"])
        return cls(**{**data, **calls, "recent": tuple(_call(each) for each in data["recent"]), "streams": streams})


def _call(data: dict[str, Any] | None) -> Any:
    return CallView(**{**data, "peers": tuple(data["peers"])}) if data is not None else None


def look(flight: Flight, events: list[Event], now: int, process: str, ended: str) -> RankView:
    """Returns the current state of a rank of this host.

    Args:
        flight: snapshot of the flight file, in which the rank records its calls.
        events: recent events of the file, oldest first; may be empty.
        now: time by ``time.monotonic_ns``.
        process: state letter of the rank's process in /proc; "" if it has ended.
        ended: exit status in words; "" if the process runs, or if the status is unknown.
    """
    streams: dict[str, list[Event]] = {}
    for event in events:
        if event.axis:
            streams.setdefault(event.stream, []).append(event)
    recent = [CallView.of(event, flight, event.begun, now) for each in streams.values() for event in each[-RECENT:]]
    waiting = CallView.of(flight.waiting, flight, flight.waiting_since, now) if flight.waiting else None
    action = CallView.of(flight.action, flight, flight.action.begun, now) if flight.action else None
    return RankView(
        rank=flight.rank,
        host=flight.host,
        pid=flight.pid,
        phase=Phase(flight.phase).name,
        stage=int(flight.identity.get("stage", 0)),
        step=flight.step,
        in_phase=max(0, now - flight.since) / SECOND,
        idle=max(0, now - flight.newest) / SECOND,
        process=process,
        ended=ended,
        words=flight.words,
        waiting=waiting,
        action=action,
        last=CallView.of(flight.last, flight, flight.last.ended, now) if flight.last else None,
        recent=tuple(recent),
        in_steps=flight.sums.in_steps / SECOND,
        waits={axis: time / SECOND for axis, time in flight.sums.waits.items() if time},
        streams=tuple(WaitView.of(waits, flight) for waits in flight.streams),
        note=flight.note,
    )


def process_state(pid: int) -> tuple[str, int]:
    """Returns the state letter of the process ``pid`` in /proc, such as "R", and its exit status as in ``os.wait``.

    The status is 0 while the process runs. Returns ("", 0) if the process does not exist.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "", 0
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[49])


def started_after(pid: int, written: int) -> bool:
    """Returns True if ``pid`` was reused: its running process started more than a second after ``written``.

    ``written``: time at which the original process last wrote, in nanoseconds of the monotonic clock. After a
    suspension of the machine, a reused pid may remain undetected.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    started = int(text.rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - started
    return (time.monotonic_ns() - written) / SECOND > age + 1


def exit_of(process: int) -> int | None:
    """Returns the exit status of an ended process, encoded as ``os.wait`` does; None before Linux 6.15.

    Args:
        process: pidfd, the Linux file descriptor of the process.
    """
    told = bytearray(_INFO_BYTES)
    struct.pack_into("Q", told, 0, _WANTS_EXIT)
    try:
        fcntl.ioctl(process, _GET_INFO, told)
    except OSError:
        return None
    given, status = struct.unpack_from("Q", told, 0)[0], struct.unpack_from("i", told, _EXIT_AT)[0]
    return int(status) if given & _WANTS_EXIT else None


_INFO_BYTES, _EXIT_AT, _WANTS_EXIT = 64, 60, 1 << 3
"""Sizes and offsets of ``struct pidfd_info`` in linux/pidfd.h."""
_GET_INFO = 3 << 30 | _INFO_BYTES << 16 | 0xFF << 8 | 11
"""PIDFD_GET_INFO."""


def ending(status: int) -> str:
    """Returns an exit status of ``os.wait`` in words: "exit status 1" or "signal 9 (SIGKILL)"."""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"exit status {code}"
    import signal

    names = {number.value: number.name for number in signal.Signals}
    return f"signal {-code} ({names.get(-code, 'unknown')})"
