"""The writer of a flight file: a rank records calls that it begins, waits for and ends.

The file is mapped into memory, so a note is a few stores; the kernel keeps them when the process is killed.
"""

import json
import mmap
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from engine.parallel.comm.flight import layout
from engine.parallel.comm.flight.flight import rank_runs
from engine.parallel.comm.flight.layout import EventKind, Phase
from engine.parallel.grid import Axis

now = time.monotonic_ns


class Stream(NamedTuple):
    """Sequence of calls that all ranks of a group, or both ends of a channel, issue in the same order."""

    kind: EventKind
    axis: str
    """Name of the axis; empty for computation."""
    name: str
    peer: int = -1
    """Global rank at the other end of messages; -1 for collectives and computation."""


def indices_text(indices: Sequence[int]) -> str:
    """Returns ``indices`` as a short text for the name of a stream, such as ``0,3``, ``0-15`` or ``0-12/4``.

    ``read_indices`` reads it.
    """
    return ",".join(
        f"{first}-{first + step * (count - 1)}" + f"/{step}" * (step > 1)
        if step > 0 and count > 2
        else ",".join(str(first + step * place) for place in range(count))
        for first, step, count in rank_runs(indices)
    )


_ACTIONS = Stream(EventKind.ACTION, "", "actions")


class FlightRecorder:
    """Writer of one rank's log of recent calls, which other processes can read at any time.

    Call ``begin``, ``wait`` and ``waited`` for a collective or message, ``act`` and ``acted`` for a computation of a
    pipeline stage, and ``enter`` and ``leave`` for a call of the engine.
    """

    def __init__(self, path: Path, rank: int, size: int, identity: Mapping[str, Any]) -> None:
        text = json.dumps(identity).encode()
        if len(text) > layout.STREAMS_AT - layout.IDENTITY_AT:
            raise OSError(f"the identity of rank {rank} takes {len(text)} bytes, more than a flight file can store")
        self.path = path
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(file, 0, layout.FILE_BYTES)  # memory that is missing later ends the process
            self._map: mmap.mmap | bytearray = mmap.mmap(file, layout.FILE_BYTES)
        except OSError:
            path.unlink()  # others would wait for its header
            raise
        finally:
            os.close(file)
        self._sequence = 0
        self._counts: Counter[str] = Counter()
        self._texts: dict[str, bytes] = {}
        self._axes: dict[str, int] = {axis: index for index, axis in enumerate(layout.axis_names(identity))}
        self._sums = [0] * (2 + layout.MOST_AXES)
        self._waits: dict[Stream, _Waits] = {}
        self._depth = 0
        self._entered = 0
        self._map[layout.IDENTITY_AT : layout.IDENTITY_AT + len(text)] = text
        offset = time.time_ns() - now()
        layout.STATE.pack_into(self._map, layout.STATE_AT, Phase.USER, now(), 0)
        layout.START.pack_into(self._map, layout.START_AT, b"", rank, size, os.getpid(), len(text), offset)
        self._map[layout.START_AT : layout.START_AT + len(layout.MAGIC)] = layout.MAGIC

    @property
    def waits(self) -> Mapping[Axis, float]:
        """Seconds that this rank has waited for communication so far, by axis."""
        return {axis: self._sums[2 + place] / 1e9 for axis, place in self._axes.items()}

    def begin(self, stream: Stream, label: str, load: tuple[int, str] = (0, "")) -> int:
        """Records the start of an event of ``stream``; returns its sequence number, from 1.

        Args:
            label: name of the call.
            load: (bytes, dtype) of the full tensor.
        """
        self._sequence = sequence = self._sequence + 1
        self._counts[stream.name] += 1
        place, view = layout.EVENT_PLACES[(sequence - 1) % layout.EVENTS], self._map
        layout.SEQUENCE.pack_into(view, place, 0)
        layout.ENDED.pack_into(view, place + layout.ENDED_AT, 0)
        layout.BEGIN.pack_into(
            view, place, 0, now(), self._counts[stream.name], load[0], *self._head(stream),
            self._bytes(stream.name), self._bytes(label), self._bytes(load[1]),
        )  # fmt: skip
        layout.SEQUENCE.pack_into(view, place, sequence)
        layout.SEQUENCE.pack_into(view, layout.COUNT_AT, sequence)
        return sequence

    def ended(self, sequence: int) -> None:
        """Records the end of the event with the sequence number ``sequence``."""
        self._end(sequence, now())

    def wait(self, sequence: int) -> int:
        """Records that this rank starts to wait for the event with the sequence number ``sequence``.

        Returns the present time in nanoseconds, for :meth:`waited`.
        """
        began = now()
        layout.NOW.pack_into(self._map, layout.WAIT_AT, sequence, began)
        return began

    def waited(self, sequence: int, stream: Stream, began: int, size: int = 0) -> None:
        """Records that the event ``sequence``, and the wait for it, have ended; adds the wait to the totals of
        ``stream``.

        ``began``: result of :meth:`wait`. ``size``: bytes of the event's full tensor, for the totals.
        """
        ended = now()
        layout.SEQUENCE.pack_into(self._map, layout.WAIT_AT, 0)
        self._end(sequence, ended)
        place = self._axes.get(stream.axis)
        if place is not None:
            self._sums[2 + place] += ended - began
        waits = self._waits.get(stream)
        if waits is None:
            waits = self._waits[stream] = _Waits(min(len(self._waits), layout.STREAMS - 1))
        waits.count += 1
        waits.spent += ended - began
        waits.bytes += size
        layout.STREAM.pack_into(
            self._map, layout.STREAM_PLACES[waits.index], waits.count, waits.spent, waits.bytes, *self._head(stream),
            self._bytes(stream.name),
        )  # fmt: skip

    def act(self, what: str, stage: int, microbatch: int) -> int:
        """Records the start of a pipeline action of ``stage`` for ``microbatch``; returns its sequence number.

        ``what``: name of the action, such as "forward".
        """
        label = f"{what} of stage {stage}, microbatch {microbatch}"
        sequence = self.begin(_ACTIONS, label)
        layout.NOW.pack_into(self._map, layout.ACTION_AT, sequence, now())
        return sequence

    def acted(self, sequence: int) -> None:
        """Records the end of a pipeline action; ``sequence`` is the number that :meth:`act` returned."""
        layout.SEQUENCE.pack_into(self._map, layout.ACTION_AT, 0)
        self.ended(sequence)

    def enter(self, step: int) -> None:
        """Records that a call of the engine starts, after ``step`` completed steps; nested calls count once."""
        self._depth += 1
        if self._depth == 1:
            self._entered = now()
            layout.NOW.pack_into(self._map, layout.STATE_AT, step << 8 | Phase.STEP, self._entered)

    def leave(self, step: int) -> None:
        """Records that the call of the engine ends, after ``step`` completed steps; counterpart of :meth:`enter`."""
        self._depth -= 1
        if self._depth == 0:
            ended = now()
            self._sums[0] += 1
            self._sums[1] += ended - self._entered
            layout.SUMS.pack_into(self._map, layout.SUMS_AT, *self._sums)
            layout.NOW.pack_into(self._map, layout.STATE_AT, step << 8 | Phase.USER, ended)

    def say(self, words: str) -> None:
        """Writes ``words``, the final error message of this rank, to its log, unless the log already has one."""
        if self._map[layout.WORDS_AT] == 0:
            text = words.encode(errors="replace")[: layout.WORDS_BYTES - 1]
            self._map[layout.WORDS_AT : layout.WORDS_AT + len(text)] = text

    def note(self, text: str) -> None:
        """Replaces this rank's note about its training by ``text``; ``trine watch`` shows the note."""
        data = text.encode(errors="replace")[: layout.NOTE_BYTES].ljust(layout.NOTE_BYTES, b"\0")
        self._map[layout.NOTE_AT : layout.NOTE_AT + layout.NOTE_BYTES] = data

    def close(self) -> None:
        """Closes the log file; if :meth:`say` has written no error message, first records that this rank ended
        normally.
        """
        if self._map[layout.WORDS_AT] == 0:
            step = layout.STATE.unpack_from(self._map, layout.STATE_AT)[0] >> 8
            layout.NOW.pack_into(self._map, layout.STATE_AT, step << 8 | Phase.ENDED, now())
        if isinstance(self._map, mmap.mmap):
            self._map.close()
            self._map = bytearray(layout.FILE_BYTES)  # whatever is still noted goes nowhere

    def _end(self, sequence: int, at: int) -> None:
        """Note the end of an event, unless a newer one has its place."""
        place = layout.EVENT_PLACES[(sequence - 1) % layout.EVENTS]
        if layout.SEQUENCE.unpack_from(self._map, place)[0] == sequence:
            layout.ENDED.pack_into(self._map, place + layout.ENDED_AT, at)

    def _head(self, stream: Stream) -> tuple[int, int, int, int]:
        """Kind, axis, 0 and other end, as events and streams begin with."""
        return stream.kind, self._axes.get(stream.axis, 255), 0, stream.peer if stream.peer >= 0 else layout.NOBODY

    def _bytes(self, text: str) -> bytes:
        known = self._texts.get(text)
        if known is None:
            known = self._texts[text] = text.encode(errors="replace")
        return known


@dataclass(slots=True)
class _Waits:
    """Sums of the waits of one stream; the streams that have no place of their own take turns in the last one."""

    index: int
    count: int = 0
    spent: int = 0
    bytes: int = 0
