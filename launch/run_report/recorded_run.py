"""Record of a run: read, checked and merged; its profiled steps as one trace. Needs no torch.

The trace is a file for ui.perfetto.dev: a process for each rank, a track for each kind of work.

rank 0   steps      |------------------ step 3 ------------------|
         actions    | 0F0 | 0F1 |         | 0B0 | 0B1 |
         tp         |   column inputs | row outputs | ..
         pp send       | forward | ..

The format is Chrome's (Trace Event Format). Time 0 is the end of the all-reduce that aligned the clocks; the ranks of
one host share a clock, so the first of them to leave it marks that time.
"""

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from engine.errors import EngineError
from engine.parallel.grid import AXES
from engine.parallel.pipeline.schedule.actions import Action, Schedule
from engine.parallel.pipeline.schedule.simulate import Span, StepTimeline
from engine.reporting.record_format import FORMAT, STEPS, rank_file, schedule_of, trace_file

_DAMAGES = (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError, EngineError)
"""Errors of reading values from a damaged file."""


class SentBytes(NamedTuple):
    """Planned and measured bytes that a rank sends for one kind of communication (``label``) on one grid axis.

    The numbers are from the rank's last recorded step.

    ``planned`` None: not planned. ``measured`` None: nothing was sent.
    """

    axis: str
    label: str
    planned: int | None
    measured: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRank:
    """Memory, sent bytes, waiting times and pipeline actions of one rank, as recorded at its last step."""

    rank: int
    place: Mapping[str, int]
    """Index of the rank on dp, tp and pp."""
    host: str
    step: int
    written: float
    """Time of the record, in seconds since 1970."""
    memory: str
    """Measure of ``peak_bytes``: "allocated" on a GPU, "resident" on the host."""
    peak_bytes: int
    state: Mapping[str, int]
    """Planned bytes of weights, gradients and optimizer state on the device, by kind."""
    host_bytes: int
    """Planned bytes of state in host memory, with offload."""
    sent: tuple[SentBytes, ...]
    in_steps: float
    """Seconds in training steps."""
    waits: Mapping[str, float] | None
    """Seconds of waiting for communication by axis; None without a watchdog."""
    spans: tuple[Span, ...] | None
    """Actions of the last recorded step, in seconds since 1970; None for a user's own loop."""

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "RecordedRank":
        """Converts ``record``, the parsed JSON file of a rank, to a :class:`RecordedRank`."""
        spans = record["spans"] or None
        time.gmtime(record["written"])  # raises for a time that the report could not show
        return cls(
            rank=int(record["rank"]),
            place={axis: int(index) for axis, index in record["place"].items()},
            host=str(record["host"]),
            step=int(record["step"]),
            written=float(record["written"]),
            memory=str(record["memory"]),
            peak_bytes=int(record["peak_bytes"]),
            state={kind: int(count) for kind, count in record["state"].items()},
            host_bytes=sum(map(int, record["host_state"].values())),
            sent=tuple(_sent(row) for row in record["traffic"]),
            in_steps=float(record["in_steps"]),
            waits=_numbers(record["waits"]),
            spans=None if spans is None else tuple(Span(Action.parse(a), float(b), float(e)) for a, b, e in spans),
        )


def _sent(row: Mapping[str, Any]) -> SentBytes:
    planned, measured = (None if row[key] is None else int(row[key][0]) for key in ("planned", "sent"))
    return SentBytes(str(row["axis"]), str(row["label"]), planned, measured)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """All records of a run: logged steps, facts of the run, and the records of its ranks."""

    name: str
    steps: Sequence[Mapping[str, Any]]
    """Log rows of steps; steps repeated after a resume count once."""
    ranks: Sequence[RecordedRank]
    """Records in ascending order of rank; records of other hosts may be missing."""
    size: int
    """Number of ranks of the run."""
    facts: Mapping[str, Any]
    """Grid, plan, notes, configuration and environment, from rank 0's record."""
    schedule: Schedule
    notes: tuple[str, ...]
    """Problems found while the records were read."""

    @property
    def warnings(self) -> list[str]:
        """Sentences for the report, such as plan notes, damaged records, skipped steps, and missing ranks."""
        return [*map(str, self.facts["notes"]), *self.notes, *self._skipped(), *self._late(), *self._deviations()]

    def _skipped(self) -> Iterator[str]:
        rows = [row for row in self.steps if row["skipped"]]
        causes = sorted({str(row["nonfinite"]) for row in rows})
        if rows:
            yield f"{len(rows)} step{'s were' if len(rows) > 1 else ' was'} skipped: {', '.join(causes)} not finite."

    def _late(self) -> Iterator[str]:
        there = {rank.rank for rank in self.ranks}
        if missing := [str(rank) for rank in range(self.size) if rank not in there]:
            yield f"{len(missing)} of {self.size} ranks have no record here: {_few(missing)}."
        last = max(rank.step for rank in self.ranks)
        if late := [f"rank {rank.rank} at step {rank.step}" for rank in self.ranks if rank.step < last]:
            yield f"The last record of some ranks is older than step {last}: {_few(late)}."

    def _deviations(self) -> Iterator[str]:
        off = [str(rank.rank) for rank in self.ranks if any(row.planned != row.measured for row in rank.sent)]
        if off:
            yield f"Planned and sent bytes differ on {len(off)} rank{'s' * (len(off) > 1)}: {_few(off)}."

    def timelines(self) -> dict[str, StepTimeline]:
        """Returns the timeline of the last recorded step of each pipeline, by names such as "data 0, tensor 1".

        Pipelines with incomplete records are left out.
        """
        found: dict[str, StepTimeline] = {}
        places = {(_outside_pipeline(rank), rank.place.get("pp", 0)): rank for rank in self.ranks}
        length = len(self.schedule.per_rank)
        for outside in sorted({key[0] for key in places}):
            row = [places.get((outside, pp)) for pp in range(length)]
            spans = [rank.spans for rank in row if rank is not None and rank.spans is not None]
            if len(spans) == length and len({rank.step for rank in row if rank is not None}) == 1:
                first = min(each[0].start for each in spans)
                moved = [tuple(Span(s.action, s.start - first, s.end - first) for s in each) for each in spans]
                found[outside] = StepTimeline(self.schedule, tuple(moved))
        return found


def _few(words: Sequence[str]) -> str:
    return ", ".join(words[:8]) + f" and {len(words) - 8} more" * (len(words) > 8)


def read_run(folder: Path) -> RecordedRun:
    """Reads all records of a run from ``folder``, the ``monitor.report`` folder of its configuration.

    Raises:
        EngineError: the folder is missing, contains no records, or a file is damaged.
    """
    if not folder.is_dir():
        raise EngineError(
            f"there is no folder {folder}; give the monitor.report folder of a run, or --out of train.py."
        )
    first = read_recording(folder / rank_file(0))
    if first is None:
        raise EngineError(
            f"{folder} has no {rank_file(0)}, so no run has recorded there; give the monitor.report folder of a run, "
            "or --out of train.py."
        )
    try:
        size, schedule = int(first["ranks"]), schedule_of(first["run"]["schedule"])
        run = first["run"]
        facts = {**{key: run[key] for key in ("grid", "plan", "config")}, "notes": list(run["notes"])}
        facts["environment"] = dict(run["environment"])
        if size < 1:
            raise ValueError(f"a run of {size} ranks")
    except _DAMAGES as error:
        raise damaged_file(folder / rank_file(0), error) from error
    paths = [folder / rank_file(rank) for rank in range(size)]
    steps, notes = _steps(folder / STEPS)
    return RecordedRun(
        name=folder.resolve().name,
        steps=steps,
        ranks=[rank for path in paths for rank in _rank(path)],
        size=size,
        facts=facts,
        schedule=schedule,
        notes=notes,
    )


def read_recording(path: Path) -> dict[str, Any] | None:
    """Returns the content of a rank's JSON file ``path``, or None if it does not exist.

    Raises:
        EngineError: the file is damaged, or has another format version.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if record["format"] != FORMAT:
            raise ValueError(f"format {record['format']}, but this version reads format {FORMAT}")
        return dict(record)
    except FileNotFoundError:
        return None
    except (OSError, *_DAMAGES) as error:
        raise damaged_file(path, error) from error


def _rank(path: Path) -> Iterator[RecordedRank]:
    record = read_recording(path)
    try:
        if record is not None:
            yield RecordedRank.of(record)
    except _DAMAGES as error:
        raise damaged_file(path, error) from error


def damaged_file(path: Path, error: Exception) -> EngineError:
    """Returns an EngineError for the damaged file ``path``; ``error``: exception from reading the file."""
    cause = f"{type(error).__name__}: {error}".rstrip(".")
    return EngineError(
        f"{path} cannot be read ({cause}), so the run cannot be reported; restore this file from a copy, or delete it "
        "and continue the run with monitor.report, which writes the records again."
    )


_NUMBERS = ("loss", "lr", "grad_norm", "seconds", "tokens_per_second", "peak_bytes", "bytes_sent", "loss_scale")


def _steps(path: Path) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """Returns the logged steps, and notes about them. A line that a killed run has cut short is ignored."""
    kept: list[dict[str, Any]] = []
    cut = again = 0
    try:
        lines = path.read_bytes().splitlines() if path.exists() else []
    except OSError as error:
        raise damaged_file(path, error) from error
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):  # from a start that ended during the write
            cut += 1
            continue
        try:
            row = _checked(row)
        except _DAMAGES as error:
            raise damaged_file(
                path, ValueError(f"line {number} is not a step, {type(error).__name__}: {error}")
            ) from error
        while kept and (kept[-1]["step"] > row["step"] or (kept[-1]["step"] == row["step"] and not row["skipped"])):
            kept.pop()
            again += 1
        kept.append(row)
    notes = [f"{again} logged steps were repeated after a resume; the last time counts."] * bool(again)
    notes += [f"{cut} line{'s' * (cut > 1)} of {path.name} cannot be read: a run has ended during the write."] * bool(
        cut
    )
    return kept, tuple(notes)


def _checked(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a logged step after checking its numbers.

    Raises:
        _DAMAGES: it is not a logged step.
    """
    numbers = {name: _number(row[name]) for name in _NUMBERS}
    more = {name: _numbers(row[name]) for name in ("metrics", "waits") if name in row}
    load = row.get("expert_load", {})
    if not isinstance(load, dict) or not all(map(_are_counts, load.values())):
        raise TypeError("expert_load contains something other than lists of whole numbers")
    told = {"step": int(row["step"]), "skipped": bool(row["skipped"]), "nonfinite": row["nonfinite"]}
    return {**row, **numbers, **more, **told}


def _numbers(values: Any) -> dict[str, Any] | None:
    """Returns numbers by name; None for no values."""
    return None if values is None else {str(name): _number(value) for name, value in values.items()}


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(count) is int for count in value)


def _number(value: Any) -> float | None:
    """Returns a number, or None for one that was not finite."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise TypeError(f"{value!r} is not a finite number")
    return value


def _outside_pipeline(rank: RecordedRank) -> str:
    """Describes the coordinates of a rank along all axes except the pipeline's."""
    nouns = {axis.name: axis.noun for axis in AXES}
    return ", ".join(f"{nouns.get(axis, axis)} {index}" for axis, index in rank.place.items() if axis != "pp")


_MICROSECOND = 1e3
"""Nanoseconds in the unit of the format."""


class TraceSlice(NamedTuple):
    """Event of a trace, with its start and end in nanoseconds on the clock of its host."""

    track: str
    name: str
    begun: int
    ended: int
    facts: Mapping[str, Any]


class RankTrace(NamedTuple):
    """Trace of the profiled steps of one rank."""

    rank: int
    title: str
    host: str
    zero: int
    """Time at which the clocks were aligned, in nanoseconds."""
    lost: int
    """Number of events that the flight recorder overwrote before they were read."""
    slices: Sequence[TraceSlice]


def read_traces(folder: Path, size: int) -> list[RankTrace]:
    """Reads the traces in ``folder`` of a run with ``size`` ranks; ranks without a trace are left out.

    Raises:
        EngineError: a file is damaged.
    """
    found = []
    for rank in range(size):
        path = folder / trace_file(rank)
        record = read_recording(path)
        try:
            if record is not None and int(record["ranks"]) == size:  # excludes an earlier start on another grid
                found.append(_trace(record))
        except _DAMAGES as error:
            raise damaged_file(path, error) from error
    return found


def _trace(record: Mapping[str, Any]) -> RankTrace:
    place = ", ".join(f"{axis} {int(index)}" for axis, index in record["place"].items())
    steps = [TraceSlice("steps", f"step {step}", int(begun), int(ended), {}) for step, begun, ended in record["steps"]]
    actions = [
        TraceSlice("actions", str(token), int(begun), int(ended), {}) for token, begun, ended in record["actions"]
    ]
    newest = max((ended for _, _, ended in record["steps"]), default=0)
    return RankTrace(
        rank=int(record["rank"]),
        title=f"rank {record['rank']} ({place}) on {record['host']}",
        host=str(record["host"]),
        zero=int(record["zero"]),
        lost=int(record["lost"]),
        slices=[*steps, *actions, *(_event(event, int(newest)) for event in record["events"])],
    )


def _event(event: Mapping[str, Any], newest: int) -> TraceSlice:
    """Returns a collective or message as a slice; an unfinished one lasts until the end of the newest step."""
    kind, axis, begun = str(event["kind"]), str(event["axis"]), int(event["begun"])
    facts = {"bytes": int(event["bytes"]), "dtype": str(event["dtype"]), "stream": str(event["stream"])}
    if int(event["peer"]) >= 0:
        facts["other rank"] = int(event["peer"])
    track = axis if kind == "collective" else f"{axis} {kind}"
    return TraceSlice(track, str(event["label"]), begun, int(event["ended"]) or max(begun, newest), facts)


def perfetto(traces: Sequence[RankTrace]) -> str:
    """Formats traces as Chrome trace JSON for ui.perfetto.dev, one event per line."""
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
    """Yields slices by track; overlapping slices get further tracks, since a viewer draws only nested slices."""
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
