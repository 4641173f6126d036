"""Layout of a flight file: one header, then a ring of events of equal size. Numbers are in the machine's byte order.

    0       header: identity of this rank, its current call, sums of its times
    4096    identity as JSON: host, axes and their ranks
    16384   waits of stream 1
            waits of stream 2, ..
    24576   event 1, event N + 1, ..
            event 2, event N + 2, ..

Times are nanoseconds of ``time.monotonic_ns``, shared by the ranks of a host; plus ``wall_offset`` they are Unix times.
The writer may stop at any instruction, so validity is written last: an event is valid once its sequence number is
written, and a reused slot gets 0 first.
"""

from collections.abc import Mapping
from enum import IntEnum
from struct import Struct
from typing import Any, Final

MAGIC: Final = b"flight3\0"
EVENTS: Final = 512
"""Number of most recent events in a file; a step of a deep pipeline has some hundred."""
IDENTITY_AT: Final = 4096
STREAMS_AT: Final = 16384
STREAMS: Final = 64
"""Maximum number of streams with recorded waits; a rank of a deep pipeline has some twenty."""
STREAM_BYTES: Final = 128
EVENTS_AT: Final = STREAMS_AT + STREAMS * STREAM_BYTES
EVENT_BYTES: Final = 192
FILE_BYTES: Final = EVENTS_AT + EVENTS * EVENT_BYTES
CALLS: Final = "calls of the engine"
"""Name of the stream of engine calls that every rank makes."""
MOST_AXES: Final = 16
"""Maximum number of axes with recorded waits, in the order of the identity."""


def axis_names(identity: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the axis names in ``identity``, the JSON header of a rank's log; events store an index into them."""
    return tuple(identity.get("axes", {}))[:MOST_AXES]


class Phase(IntEnum):
    """State of a rank: in user code, in a call of the engine, or ended."""

    USER = 0
    """User code, between two calls of the engine."""
    STEP = 1
    """Call of the engine in which ranks communicate."""
    ENDED = 2
    """Engine closed, or process about to end."""


class EventKind(IntEnum):
    """Type of a recorded event: collective, send, receive or action (computation of a pipeline stage)."""

    COLLECTIVE = 0
    SEND = 1
    RECEIVE = 2
    ACTION = 3
    """Computation of a pipeline stage."""


START = Struct("8sIIiIq")
"""Header: magic, rank, world size, process id, bytes of the identity, ``wall_offset``."""
START_AT: Final = 0
STATE = Struct("QQQ")
"""Record (``step << 8 | phase``, start time of the phase, number of events written)."""
STATE_AT: Final = 64
COUNT_AT: Final = STATE_AT + 16
NOW = Struct("QQ")
"""Record (sequence number, start time) of the event that the rank waits for, and of its action; number 0: none."""
WAIT_AT: Final = 128
ACTION_AT: Final = 144
SUMS = Struct(f"{2 + MOST_AXES}Q")
"""Record (completed steps, nanoseconds in steps, nanoseconds of waiting for each axis)."""
SUMS_AT: Final = 192
WORDS_AT: Final = 512
WORDS_BYTES: Final = 2048
"""Size of the rank's error message, UTF-8, padded with zeros."""
NOTE_AT: Final = WORDS_AT + WORDS_BYTES
NOTE_BYTES: Final = 512
"""Size of the rank's note about its training, UTF-8, padded with zeros."""

NAME_BYTES: Final = 48
"""Size of a stream's name; a longer name is cut."""
BEGIN = Struct(f"QQ QQ BBhI {NAME_BYTES}s 64s 12s")
"""Event: sequence number, start, end, count in its stream, bytes; kind, axis, 0, peer rank; stream, label, dtype."""
ENDED = Struct("Q")
ENDED_AT: Final = BEGIN.size + (-BEGIN.size) % 8
STREAM = Struct(f"QQQ BBHI {NAME_BYTES}s")
"""Totals of a stream: completed waits, nanoseconds of waiting, bytes; kind, axis, 0, peer rank; name. Zero waits mark
an unused record.
"""
SEQUENCE = Struct("Q")
NOBODY: Final = 0xFFFFFFFF
"""Peer rank of a collective: none."""

assert ENDED_AT + ENDED.size <= EVENT_BYTES
assert NOTE_AT + NOTE_BYTES <= IDENTITY_AT
assert STREAM.size <= STREAM_BYTES

EVENT_PLACES: Final = range(EVENTS_AT, EVENTS_AT + EVENTS * EVENT_BYTES, EVENT_BYTES)
"""Byte offset of each event; the event with sequence number n is at index (n - 1) % ``EVENTS``."""
STREAM_PLACES: Final = range(STREAMS_AT, STREAMS_AT + STREAMS * STREAM_BYTES, STREAM_BYTES)
"""Byte offset of the waits of each stream in the file."""
