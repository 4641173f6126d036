"""Trace files of timelines for ui.perfetto.dev and chrome://tracing.

The format is Chrome's (Trace Event Format): a process for each timeline, a thread for each rank, a slice for each
action, and an arrow for each message from the action that sends it to the action that waits for it.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from engine.parallel.pipeline.report.text import Panel
from engine.parallel.pipeline.schedule.actions import Action, Op
from engine.parallel.pipeline.schedule.simulate import Span

SECOND = 1e6
"""Microseconds in a second; microseconds are the unit of the format."""
UNIT = 1e3
"""Microseconds that represent one unit of a timeline without seconds."""
_KIND = {
    Op.FORWARD: "forward", Op.BACKWARD: "backward", Op.BACKWARD_INPUT: "backward input",
    Op.BACKWARD_WEIGHT: "backward weight",
}  # fmt: skip

Event = Mapping[str, Any]


def trace(panels: Sequence[Panel]) -> str:
    """Formats timelines as JSON in Chrome's trace format, for ui.perfetto.dev; one event per line."""
    events = [event for process, panel in enumerate(panels) for event in _events(panel, process)]
    lines = ",\n".join(json.dumps(event) for event in events)
    return f'{{"displayTimeUnit": "ms", "traceEvents": [\n{lines}\n]}}\n'


def _events(panel: Panel, process: int) -> Iterator[Event]:
    yield _name("process_name", process, 0, f"pipeline {panel.headline()}")
    for rank in range(len(panel.timeline.spans)):
        yield _name("thread_name", process, rank, f"rank {rank}")
    scale = SECOND if panel.seconds else UNIT
    placed = {
        span.action: (span, {"pid": process, "tid": rank})
        for rank, row in enumerate(panel.timeline.spans) for span in row
    }  # fmt: skip
    for action, (span, place) in placed.items():
        yield _slice(span, scale) | place
        fed = panel.timeline.schedule.sends(action)
        if fed is not None and fed in placed:
            taker, there = placed[fed]
            arrow = {"name": "message", "cat": "message", "id": f"{process}/{action}"}
            # inside the slice that sends, because an arrow belongs to the slice around its time
            yield {"ph": "s", "ts": _time((span.start + span.end) / 2, scale)} | arrow | place
            yield {"ph": "f", "bp": "e", "ts": _time(taker.start, scale)} | arrow | there


def _slice(span: Span, scale: float) -> dict[str, Any]:
    action: Action = span.action
    return {
        "ph": "X", "name": str(action), "cat": _KIND[action.op],
        "ts": _time(span.start, scale), "dur": _time(span.end - span.start, scale),
        "args": {"stage": action.stage, "microbatch": action.microbatch},
    }  # fmt: skip


def _time(time: float, scale: float) -> float:
    return round(time * scale, 3)


def _name(what: str, process: int, thread: int, name: str) -> Event:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}
