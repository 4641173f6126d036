"""What one rank does, as its host sees it: from its flight file and from the operating system. It travels as JSON."""

import fcntl
import os
import struct
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from engine.parallel.comm.flight.flight import SECOND, Event, Flight, StreamWaits, rank_runs, ranks_of
from engine.parallel.comm.flight.layout import EventKind, Phase

RECENT = 6
"""Newest events of each stream that are told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallView:
    """A collective, a message or a computation, and how long ago it began."""

    text: str
    stream: str
    count: int
    likeness: str
    """Equal on all ranks that make the same call: what it is, of how much."""
    peers: tuple[int, ...]
    """Ranks that take part, this one too."""
    seconds: float

    @classmethod
    def of(cls, event: Event, flight: Flight, since: int, now: int) -> Self:
        """The call that an event of this rank's file notes."""
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
    return tuple(ranks[int(index)] for index in places.split(",")) if places else ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitView:
    """What a rank has waited for in one stream since its start."""

    axis: str
    stream: str
    receives: bool
    """Messages from another rank; False: collectives, or messages to another rank."""
    runs: tuple[tuple[int, int, int], ...]
    """Ranks that take part, this one too, as :func:`rank_runs` tells them."""
    count: int
    seconds: float

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that take part, ascending."""
        return ranks_of(self.runs)

    @classmethod
    def of(cls, waits: StreamWaits, flight: Flight) -> Self:
        """The waits that this rank's file has summed."""
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
    """One rank at one moment; durations are seconds before it."""

    rank: int
    host: str
    pid: int
    phase: str
    """Name of a :class:`Phase`."""
    stage: int
    """Index of axis pp: ranks with the same one do the same work."""
    step: int
    in_phase: float
    idle: float
    """Since the last note in the file."""
    process: str
    """Letter of the state of the process in /proc: T is stopped; empty: it has ended."""
    ended: str
    """How the process has ended, in words; empty while it runs or if nobody knows."""
    words: str
    waiting: CallView | None
    action: CallView | None
    last: CallView | None
    recent: tuple[CallView, ...]
    """Newest calls of each stream, oldest first, to compare with those of others."""
    in_steps: float
    """Seconds in calls of the engine."""
    waits: dict[str, float]
    """Seconds of waiting by axis."""
    streams: tuple[WaitView, ...] = ()
    """The same by stream, and so by the ranks that are waited for."""

    @property
    def runs(self) -> bool:
        """Whether the process is there."""
        return bool(self.process) and self.process not in "ZX"

    @property
    def name(self) -> str:
        """Rank, host and process."""
        return f"rank {self.rank} ({self.host}, pid {self.pid})"

    def begun(self, call: CallView) -> bool | None:
        """Whether this rank has begun the call that another rank is in; None if the file does not say."""
        mine = [each.count for each in self.recent if each.stream == call.stream]
        return bool(mine) and max(mine) >= call.count

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """The view that ``to_json`` has told."""
        calls = {name: _call(data[name]) for name in ("waiting", "action", "last")}
        streams = tuple(WaitView(**{**each, "runs": tuple(map(tuple, each["runs"]))}) for each in data["streams"])
        return cls(**{**data, **calls, "recent": tuple(_call(each) for each in data["recent"]), "streams": streams})


def _call(data: dict[str, Any] | None) -> Any:
    return CallView(**{**data, "peers": tuple(data["peers"])}) if data is not None else None


def look(flight: Flight, events: list[Event], now: int, process: str, ended: str) -> RankView:
    """The view of a rank of this host.

    Args:
        now: ``time.monotonic_ns``.
        process, ended: see :class:`RankView`.
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
    )


def process_state(pid: int) -> tuple[str, int]:
    """State letter of a process and its exit code as ``wait`` encodes it; an empty letter once it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "", 0
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[49])


def exit_of(process: int) -> int | None:
    """The status of a process that somebody has waited for already, from a pidfd; None where Linux is before 6.15."""
    told = bytearray(_INFO_BYTES)
    struct.pack_into("Q", told, 0, _WANTS_EXIT)
    try:
        fcntl.ioctl(process, _GET_INFO, told)
    except OSError:
        return None
    given, status = struct.unpack_from("Q", told, 0)[0], struct.unpack_from("i", told, _EXIT_AT)[0]
    return int(status) if given & _WANTS_EXIT else None


_INFO_BYTES, _EXIT_AT, _WANTS_EXIT = 64, 60, 1 << 3
"""Of ``struct pidfd_info`` in linux/pidfd.h."""
_GET_INFO = 3 << 30 | _INFO_BYTES << 16 | 0xFF << 8 | 11
"""PIDFD_GET_INFO."""


def ending(status: int) -> str:
    """An exit status in words."""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"exit status {code}"
    import signal

    names = {number.value: number.name for number in signal.Signals}
    return f"signal {-code} ({names.get(-code, 'unknown')})"
