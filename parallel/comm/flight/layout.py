"""Layout of a flight file: one header, then a ring of events of equal size. Numbers are in the machine's byte order.

    0       header: identity of this rank, its current call, sums of its times
    4096    identity as JSON: host, axes and their ranks
    16384   waits of stream 1
            waits of stream 2, ..
    24576   event 1, event N + 1, ..
            event 2, event N + 2, ..

Times are nanoseconds of ``time.monotonic_ns``, which the ranks of a host share; ``wall_offset`` added gives times since
1970. The writer is a process that may stop between any two instructions, so a number that says that something is valid
is written after it: an event counts once its sequence number is there, and 0 is written first when a place is reused.
"""

from collections.abc import Mapping
from enum import IntEnum
from struct import Struct
from typing import Any, Final

MAGIC: Final = b"flight3\0"
EVENTS: Final = 512
"""Events that a file keeps; a step of a deep pipeline has some hundred."""
IDENTITY_AT: Final = 4096
STREAMS_AT: Final = 16384
STREAMS: Final = 64
"""Number of streams with summed waits; a rank of a deep pipeline has some twenty."""
STREAM_BYTES: Final = 128
EVENTS_AT: Final = STREAMS_AT + STREAMS * STREAM_BYTES
EVENT_BYTES: Final = 192
FILE_BYTES: Final = EVENTS_AT + EVENTS * EVENT_BYTES
CALLS: Final = "calls of the engine"
"""Stream of the calls that every rank makes."""
MOST_AXES: Final = 16
"""Axes with summed waits, in the order in which the identity names them."""


def axis_names(identity: Mapping[str, Any]) -> tuple[str, ...]:
    """The axes of a rank, as events and sums number them."""
    return tuple(identity.get("axes", {}))[:MOST_AXES]


class Phase(IntEnum):
    """Phase of a rank, as far as the engine can see."""

    USER = 0
    """The user's code: between two calls of the engine."""
    STEP = 1
    """A call of the engine in which ranks wait for each other."""
    ENDED = 2
    """The engine was closed, or the process is about to end."""


class EventKind(IntEnum):
    """Kind of an event."""

    COLLECTIVE = 0
    SEND = 1
    RECEIVE = 2
    ACTION = 3
    """Computation of a pipeline stage."""


START = Struct("8sIIiIq")
"""Magic, rank, ranks of the world, process id, bytes of the identity, wall_offset."""
START_AT: Final = 0
STATE = Struct("QQQ")
"""Phase and number of the step together (``step << 8 | phase``), since when, and events written so far."""
STATE_AT: Final = 64
COUNT_AT: Final = STATE_AT + 16
NOW = Struct("QQ")
"""Sequence number of an event and since when; 0: none. One for the wait of this rank, one for its action."""
WAIT_AT: Final = 128
ACTION_AT: Final = 144
SUMS = Struct(f"{2 + MOST_AXES}Q")
"""Steps ended, nanoseconds in them, nanoseconds of waiting by axis."""
SUMS_AT: Final = 192
WORDS_AT: Final = 512
WORDS_BYTES: Final = 2048
"""Last words of a rank, UTF-8, padded with zeros."""

BEGIN = Struct("QQ QQ BBhI 48s 64s 12s")
"""Sequence, begun, count within its stream, bytes; kind, axis, 0, other end of a message; stream, label, dtype."""
ENDED = Struct("Q")
ENDED_AT: Final = BEGIN.size + (-BEGIN.size) % 8
STREAM = Struct("QQQ BBHI 48s")
"""Waits that have ended, nanoseconds of waiting, bytes; kind, axis, 0, other end of a message; stream. No wait: no
stream."""
SEQUENCE = Struct("Q")
NOBODY: Final = 0xFFFFFFFF
"""In the place of the other end: a collective has none."""

assert ENDED_AT + ENDED.size <= EVENT_BYTES
assert WORDS_AT + WORDS_BYTES <= IDENTITY_AT
assert STREAM.size <= STREAM_BYTES

EVENT_PLACES: Final = range(EVENTS_AT, EVENTS_AT + EVENTS * EVENT_BYTES, EVENT_BYTES)
"""Offset of each event in the file; that of sequence number n is in place (n - 1) % ``EVENTS``."""
STREAM_PLACES: Final = range(STREAMS_AT, STREAMS_AT + STREAMS * STREAM_BYTES, STREAM_BYTES)
"""Offset of the waits of each stream in the file."""
