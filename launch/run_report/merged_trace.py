"""The traces of all ranks as one file for ui.perfetto.dev: a process for each rank, a track for each kind of work.

rank 0   steps      |------------------ step 3 ------------------|
         actions    | 0F0 | 0F1 |         | 0B0 | 0B1 |
         tp         |   column inputs | row outputs | ..
         pp send       | forward | ..

The format is Chrome's (Trace Event Format). Time 0 is the end of the all-reduce that aligned the clocks; the ranks of
one host share a clock, so the first of them that came out of it says when that was.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from engine.launch.run_report.recorded_run import damaged_file, told_by
from engine.reporting.record_format import trace_file

_MICROSECOND = 1e3
"""Nanoseconds in the unit of the format."""


class TraceSlice(NamedTuple):
    """Something that took time, in nanoseconds of the clock of its host."""

    track: str
    name: str
    begun: int
    ended: int
    facts: Mapping[str, Any]


class RankTrace(NamedTuple):
    """The trace of one rank."""

    rank: int
    title: str
    host: str
    zero: int
    """When the clocks were aligned."""
    lost: int
    """Events that the flight recorder had overwritten before they were read."""
    slices: Sequence[TraceSlice]


def read_traces(folder: Path, size: int) -> list[RankTrace]:
    """The traces of a run, by rank; none if no step was profiled.

    Raises:
        EngineError: a file is damaged.
    """
    found = []
    for rank in range(size):
        path = folder / trace_file(rank)
        told = told_by(path)
        try:
            if told is not None and int(told["ranks"]) == size:  # not of an earlier start on another grid
                found.append(_trace(told))
        except (KeyError, TypeError, ValueError) as error:
            raise damaged_file(path, error) from error
    return found


def _trace(told: Mapping[str, Any]) -> RankTrace:
    place = ", ".join(f"{axis} {int(index)}" for axis, index in told["place"].items())
    steps = [TraceSlice("steps", f"step {step}", int(begun), int(ended), {}) for step, begun, ended in told["steps"]]
    actions = [TraceSlice("actions", str(token), int(begun), int(ended), {}) for token, begun, ended in told["actions"]]
    newest = max((ended for _, _, ended in told["steps"]), default=0)
    return RankTrace(
        rank=int(told["rank"]),
        title=f"rank {told['rank']} ({place}) on {told['host']}",
        host=str(told["host"]),
        zero=int(told["zero"]),
        lost=int(told["lost"]),
        slices=[*steps, *actions, *(_event(event, int(newest)) for event in told["events"])],
    )


def _event(event: Mapping[str, Any], newest: int) -> TraceSlice:
    """A collective or message; what had not ended when it was read lasts until the newest step ended."""
    kind, axis, begun = str(event["kind"]), str(event["axis"]), int(event["begun"])
    facts = {"bytes": int(event["bytes"]), "dtype": str(event["dtype"]), "stream": str(event["stream"])}
    if int(event["peer"]) >= 0:
        facts["other rank"] = int(event["peer"])
    track = axis if kind == "collective" else f"{axis} {kind}"
    return TraceSlice(track, str(event["label"]), begun, int(event["ended"]) or max(begun, newest), facts)


def perfetto(traces: Sequence[RankTrace]) -> str:
    """Text of a JSON file, one event a line."""
    zeros: dict[str, int] = {}
    for trace in traces:
        zeros[trace.host] = min(trace.zero, zeros.get(trace.host, trace.zero))
    events = [event for trace in traces for event in _events(trace, zeros[trace.host])]
    return '{"displayTimeUnit": "ms", "traceEvents": [\n' + ",\n".join(map(json.dumps, events)) + "\n]}\n"


def _events(trace: RankTrace, zero: int) -> Iterator[dict[str, Any]]:
    yield _name("process_name", trace.rank, 0, trace.title)
    yield {"ph": "M", "name": "process_sort_index", "pid": trace.rank, "args": {"sort_index": trace.rank}}
    for number, (track, slices) in enumerate(_tracks(trace.slices)):
        yield _name("thread_name", trace.rank, number, track)
        yield {"ph": "M", "name": "thread_sort_index", "pid": trace.rank, "tid": number, "args": {"sort_index": number}}
        for one in slices:
            yield {
                "ph": "X", "name": one.name, "cat": track, "pid": trace.rank, "tid": number,
                "ts": (one.begun - zero) / _MICROSECOND, "dur": (one.ended - one.begun) / _MICROSECOND,
                "args": dict(one.facts),
            }  # fmt: skip


def _tracks(slices: Sequence[TraceSlice]) -> Iterator[tuple[str, list[TraceSlice]]]:
    """Slices by track; what overlaps stands on further tracks, since a viewer draws nested slices only."""
    for track in dict.fromkeys(one.track for one in slices):
        lanes: list[list[TraceSlice]] = []
        for one in sorted((one for one in slices if one.track == track), key=lambda one: one.begun):
            lane = next((lane for lane in lanes if lane[-1].ended <= one.begun), None)
            if lane is None:
                lanes.append([one])
            else:
                lane.append(one)
        for number, lane in enumerate(lanes, 1):
            yield (track if number == 1 else f"{track} ({number})"), lane


def _name(what: str, rank: int, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": rank, "tid": track, "args": {"name": name}}
