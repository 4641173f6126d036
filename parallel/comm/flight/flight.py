"""The reader of flight files: a rank's current call, its start, and the calls before it. Needs no torch
and no help of the rank, which may hang or have ended."""

import json
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.parallel.comm.flight import layout
from engine.parallel.comm.flight.layout import EventKind, Phase

SECOND = 1_000_000_000
_NEWEST = 16
"""Events that are looked through for the last that has ended: looking through all of them takes milliseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Recorded collective, message or computation; ``begun`` and ``ended`` are times of its host (``monotonic_ns``)."""

    sequence: int
    kind: EventKind
    axis: str
    """Name of the axis; empty for computation."""
    stream: str
    count: int
    """Number of events in the event's stream so far, including this one."""
    label: str
    bytes: int
    dtype: str
    peer: int
    """Global rank at the other end of a message; -1 for collectives and computation."""
    begun: int
    ended: int
    """End time in nanoseconds; 0: still in progress."""

    def __str__(self) -> str:
        if self.kind == EventKind.ACTION:
            return self.label
        name = {EventKind.SEND: "send", EventKind.RECEIVE: "receive"}.get(self.kind, "")
        what = f"{name} {self.label!r}" if name else self.label
        other = f" {'to' if self.kind == EventKind.SEND else 'from'} rank {self.peer}" if self.peer >= 0 else ""
        return f"{what} over {self.axis}{other} (#{self.count} of {self.stream!r}, {self.bytes} bytes {self.dtype})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """Totals of one rank since its start: engine calls (steps), and nanoseconds in steps and in waits."""

    steps: int = 0
    in_steps: int = 0
    waits: Mapping[str, int]
    """Nanoseconds of waiting for communication, by axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamWaits:
    """Number, total time and total bytes of a rank's waits for one stream of communication.

    A stream has one ``kind``, ``axis``, name (``stream``) and ``peer``.
    """

    kind: EventKind
    axis: str
    stream: str
    peer: int
    """Global rank at the other end of messages; -1 for collectives."""
    count: int
    nanoseconds: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Flight:
    """State of one rank at one moment, read from its log of communication: its phase, step, current wait and total
    times.
    """

    rank: int
    size: int
    pid: int
    identity: Mapping[str, Any]
    wall_offset: int
    """Nanoseconds to add to an event time to get Unix time."""
    phase: Phase
    step: int
    """Number of completed training steps."""
    since: int
    """Start of the current phase, in nanoseconds."""
    written: int
    """Number of events written so far."""
    waiting: Event | None
    waiting_since: int
    action: Event | None
    last: Event | None
    """Most recently ended event among the newest ones; None if none has ended."""
    newest: int
    """Time of the last write to the file, in nanoseconds."""
    sums: Sums
    streams: tuple[StreamWaits, ...]
    words: str
    """Error message that the rank wrote before it ended; empty if none."""
    note: str
    """Note of the rank about its training; empty if none."""

    @property
    def host(self) -> str:
        """Host name of the rank's machine."""
        return str(self.identity.get("host", ""))


class FlightFile:
    """Open log of a rank's communication; ``read`` may be called while the rank writes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._identity: Mapping[str, Any] = {}
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if os.fstat(file).st_size != layout.FILE_BYTES:
                raise ValueError(f"{path} is no flight file: its size is not {layout.FILE_BYTES}")
            self._map = mmap.mmap(file, layout.FILE_BYTES, prot=mmap.PROT_READ)
        finally:
            os.close(file)

    def close(self) -> None:
        """Closes the memory map of the file."""
        self._map.close()

    def read(self) -> Flight:
        """Returns the current state in the file: the rank's phase, step, current wait and total times.

        Raises:
            ValueError: the file has another format, or its header is not yet written.
        """
        magic, rank, size, pid, _, offset = layout.START.unpack_from(self._map, layout.START_AT)
        if magic != layout.MAGIC:
            raise ValueError(f"{self.path} is no flight file of this version")
        state, since, written = layout.STATE.unpack_from(self._map, layout.STATE_AT)
        waits, waiting_since = layout.NOW.unpack_from(self._map, layout.WAIT_AT)
        acts, _ = layout.NOW.unpack_from(self._map, layout.ACTION_AT)
        steps, in_steps, *axes = layout.SUMS.unpack_from(self._map, layout.SUMS_AT)
        events = self.events(written, _NEWEST)
        words = self._map[layout.WORDS_AT : layout.WORDS_AT + layout.WORDS_BYTES]
        note = self._map[layout.NOTE_AT : layout.NOTE_AT + layout.NOTE_BYTES]
        over = [event for event in events if event.ended]
        times = [since, *(event.begun for event in events[-1:]), *(event.ended for event in over), waiting_since]
        return Flight(
            rank=rank,
            size=size,
            pid=pid,
            identity=self._known(),
            wall_offset=offset,
            phase=Phase(state & 0xFF),
            step=state >> 8,
            since=since,
            written=written,
            waiting=self._event(waits) if waits else None,
            waiting_since=waiting_since,
            action=self._event(acts) if acts else None,
            last=max(over, key=lambda event: event.ended, default=None),
            newest=max(times),
            streams=tuple(self._streams()),
            sums=Sums(steps=steps, in_steps=in_steps, waits=dict(zip(self._names(), axes, strict=False))),
            words=_text(words),
            note=_text(note),
        )

    def events(self, written: int | None = None, most: int = layout.EVENTS) -> list[Event]:
        """Returns at most ``most`` of the newest events in the file, oldest first.

        It omits events that the rank is overwriting. ``written``: number of the newest event to return; None: the last
        one in the file.
        """
        if written is None:
            (written,) = layout.SEQUENCE.unpack_from(self._map, layout.COUNT_AT)
        first = max(1, written - most + 1)
        found = (self._event(sequence) for sequence in range(first, written + 1))
        return [event for event in found if event is not None]

    def _streams(self) -> Iterator[StreamWaits]:
        for index in range(layout.STREAMS):
            place = layout.STREAM_PLACES[index]
            count, spent, size, kind, axis, _, peer, name = layout.STREAM.unpack_from(self._map, place)
            if not count or not name[0]:
                return
            yield StreamWaits(
                kind=EventKind(kind),
                axis=self._axis(axis),
                stream=_text(name),
                peer=_peer(peer),
                count=count,
                nanoseconds=spent,
                bytes=size,
            )

    def _known(self) -> Mapping[str, Any]:
        """The identity, which the writer has completed before it writes the magic word."""
        if not self._identity:
            magic, *_, length, _ = layout.START.unpack_from(self._map, layout.START_AT)
            if magic == layout.MAGIC:
                self._identity = json.loads(self._map[layout.IDENTITY_AT : layout.IDENTITY_AT + length])
        return self._identity

    def _names(self) -> tuple[str, ...]:
        return layout.axis_names(self._known())

    def _axis(self, number: int) -> str:
        names = self._names()
        return names[number] if number < len(names) else ""

    def _event(self, sequence: int) -> Event | None:
        place = layout.EVENT_PLACES[(sequence - 1) % layout.EVENTS]
        taken = self._map[place : place + layout.EVENT_BYTES]
        there, begun, count, size, kind, axis, _, peer, stream, label, dtype = layout.BEGIN.unpack_from(taken)
        if there != sequence:
            return None
        return Event(
            sequence=sequence,
            kind=EventKind(kind),
            axis=self._axis(axis),
            stream=_text(stream),
            count=count,
            label=_text(label),
            bytes=size,
            dtype=_text(dtype),
            peer=_peer(peer),
            begun=begun,
            ended=layout.ENDED.unpack_from(taken, layout.ENDED_AT)[0],
        )


def _peer(number: int) -> int:
    return -1 if number == layout.NOBODY else number


def _text(data: bytes) -> str:
    return data.rstrip(b"\0").decode(errors="replace")


def rank_runs(ranks: Sequence[int]) -> list[tuple[int, int, int]]:
    """Compresses ``ranks`` to runs (first rank, step, number of ranks), each an arithmetic progression."""
    runs: list[tuple[int, int, int]] = []
    for rank in ranks:
        if runs:
            first, step, count = runs[-1]
            if count == 1 or rank == first + step * count:
                runs[-1] = first, (rank - first if count == 1 else step), count + 1
                continue
        runs.append((rank, 1, 1))
    return runs


def ranks_of(runs: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Returns the ranks in ``runs``, each (first rank, step, number of ranks); the inverse of :func:`rank_runs`."""
    return tuple(first + step * number for first, step, count in runs for number in range(count))


def read_indices(text: str) -> tuple[int, ...]:
    """Returns the indices in ``text``, such as 0, 4, 8, 12 of ``0-12/4``; as ``indices_text`` writes them."""
    parts = (part.replace("/", "-").split("-") for part in text.split(","))
    spans = ((int(first), int(rest[0] if rest else first), int(rest[1] if rest[1:] else 1)) for first, *rest in parts)
    return tuple(index for first, last, step in spans for index in range(first, last + 1, step))
