"""The last events of all ranks on one clock: as text, and as a trace for ui.perfetto.dev.

-5.312 s  rank 1  forward of stage 0, microbatch 0                      not ended
-5.310 s  rank 0  gradients over dp (#70 of 'dp', 5120 bytes float32)   not ended
"""

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from engine.parallel.comm.flight.flight import SECOND, Event

MOST = 200
"""Newest events of each rank that are told."""


class TimedEvent(NamedTuple):
    """An event in nanoseconds since 1970; it travels as a JSON list."""

    begun: int
    ended: int
    """0: not yet."""
    text: str
    axis: str
    """Empty for computation."""


def timed(events: Sequence[Event], wall_offset: int) -> list[TimedEvent]:
    """The newest events of a rank on the clock of its host."""
    return [
        TimedEvent(event.begun + wall_offset, event.ended and event.ended + wall_offset, str(event), event.axis)
        for event in events[-MOST:]
    ]


def merged_text(ranks: Mapping[int, Sequence[TimedEvent]], now: int) -> str:
    """A line for each event, in the order of their begin; times are seconds before ``now``."""
    rows = sorted((event.begun, rank, event) for rank, events in ranks.items() for event in events)
    lines = []
    for begun, rank, event in rows:
        took = f"{(event.ended - begun) / 1e6:.3f} ms" if event.ended else "not ended"
        lines.append(f"{(begun - now) / SECOND:9.3f} s  rank {rank}  {event.text}  {took}")
    return "\n".join(lines) + "\n"


def perfetto_trace(ranks: Mapping[int, Sequence[TimedEvent]], now: int) -> str:
    """A trace in which a rank is a process and an axis a thread; what has not ended lasts until ``now``."""
    found = [
        {
            "name": event.text, "ph": "X", "ts": event.begun / 1e3, "dur": ((event.ended or now) - event.begun) / 1e3,
            "pid": rank, "tid": event.axis or "computation",
        }
        for rank, events in sorted(ranks.items())
        for event in events
    ]  # fmt: skip
    names = [
        {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}} for rank in sorted(ranks)
    ]
    return json.dumps({"traceEvents": names + found})
