"""Files of a run for ``trine report``: one of each rank, replaced at every logged step, and one of the steps.

runs/train/
  steps.jsonl        a line for each logged step, by rank 0; a resumed run appends to it
  rank-00000.json    plan and measurement of rank 0, with configuration, schedule and environment
  rank-00001.json    plan and measurement of rank 1
  trace-00000.json   pipeline actions, collectives and messages of rank 0 in the steps of ``monitor.profile``

No rank communicates for them, so a rank that ends in any way leaves its last complete file.
"""

import json
import logging
import os
import platform
import socket
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from engine.errors import first_line
from engine.kernels.device import device_name, is_host
from engine.parallel.comm.flight.flight import Event, FlightFile
from engine.parallel.comm.flight.layout import EventKind
from engine.parallel.comm.traffic import Tally
from engine.parallel.grid import Axis
from engine.planning.plan import Plan
from engine.reporting.banner import banner_text
from engine.reporting.record_format import FORMAT, STEPS, rank_file, schedule_facts, trace_file
from engine.reporting.step_report import StepReport
from engine.step.runtime import RankRuntime

logger = logging.getLogger("trine")


class RunRecord:
    """Writer of the files for ``trine report``: ``rank-N.json`` on each rank N, and ``steps.jsonl`` on rank 0.

    Args:
        folder: folder of the files, created if it is missing; each host may have its own.
        runtime: objects that run steps on this rank.
        device: device of the parameters.
    """

    def __init__(self, folder: Path, runtime: RankRuntime, device: torch.device) -> None:
        self._folder, self._runtime, self._device = folder, runtime, device
        self._grid = runtime.comm.grid
        self._planned = runtime.plan.rank(self._grid.rank)
        self._identity = self._identify()
        self._run = _run_facts(runtime.plan, device) if self._grid.rank == 0 else None
        self._clock = time.time() - time.perf_counter()
        self._before = self._waited()
        self._in_steps, self._attempts, self._stopped = 0.0, 0, False

    def take(self, report: StepReport, sent: Tally, due: bool) -> None:
        """Counts a training step and its seconds. If ``due``, this rank rewrites its ``rank-N.json`` with these counts
        and the step's traffic, and rank 0 also appends ``report`` to ``steps.jsonl``.

        After a failed write, it warns and writes no further files.

        Args:
            report: the report of the step.
            sent: the bytes and calls that this rank has sent in the step.
            due: True if the files are written after this step.
        """
        self._in_steps += report.seconds
        self._attempts += 1
        if not due or self._stopped:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._replace(json.dumps(self._state(report, sent)))
            if self._grid.rank == 0:
                self._append(json.dumps(report.as_dict() | {"time": time.time(), "waits": self._waits()}))
        except OSError as error:  # a full disk must not end training
            self._stopped = True
            logger.warning("rank %d records nothing more in %s: %s", self._grid.rank, self._folder, first_line(error))

    def _state(self, report: StepReport, sent: Tally) -> dict[str, Any]:
        return {
            **self._identity,
            "step": report.step,
            "attempts": self._attempts,
            "written": time.time(),
            "traffic": self._traffic(sent),
            "peak_bytes": report.peak_bytes,
            "in_steps": self._in_steps,
            "waits": self._waits(),
            "spans": self._spans(),
            "run": self._run,
        }

    def _identify(self) -> dict[str, Any]:
        """Returns the facts that stay the same over the run."""
        return {
            "format": FORMAT,
            "rank": self._grid.rank,
            "ranks": self._grid.world_size,
            "place": self._grid.place(),
            "host": socket.gethostname(),
            "memory": "resident" if is_host(self._device) else "allocated",
            "state": dict(self._planned.state_bytes),
            "host_state": dict(self._planned.host_bytes),
        }

    def _traffic(self, sent: Tally) -> list[dict[str, Any]]:
        """Returns planned and measured traffic, a row for each axis and label; None if only one of them has it."""
        planned = {(row.axis, row.label): (row.bytes, row.calls) for row in self._planned.traffic}
        measured = {(row.axis, row.label): (row.bytes, row.calls) for row in sent.rows()}
        return [
            {"axis": axis, "label": label, "planned": planned.get((axis, label)), "sent": measured.get((axis, label))}
            for axis, label in sorted(planned | measured)
        ]

    def _waits(self) -> dict[str, float] | None:
        """Returns seconds of waiting by axis since the engine was built; None without a watchdog."""
        if (now := self._waited()) is None or self._before is None:
            return None
        return {axis: seconds - self._before[axis] for axis, seconds in now.items() if seconds > self._before[axis]}

    def _waited(self) -> Mapping[Axis, float] | None:
        recorder = self._runtime.comm.recorder
        return recorder.waits if recorder is not None else None

    def _spans(self) -> list[tuple[str, float, float]] | None:
        """Returns actions of the step with begin and end in seconds since 1970; None for a step of a user's own
        loop."""
        spans, row = self._runtime.executor.spans, self._runtime.plan.schedule.per_rank[self._grid.coord().pp]
        if [span.action for span in spans] != list(row):
            return None
        return [(str(span.action), span.start + self._clock, span.end + self._clock) for span in spans]

    def _replace(self, text: str) -> None:
        path = self._folder / rank_file(self._grid.rank)
        written = path.with_suffix(".tmp")
        written.write_text(text, encoding="utf-8")
        os.replace(written, path)

    def _append(self, line: str) -> None:
        with (self._folder / STEPS).open("a+b") as file:
            if file.tell() and not ends_line(file.name):
                file.write(b"\n")  # a killed start has left half a line
            file.write(line.encode() + b"\n")


def ends_line(path: str | Path) -> bool:
    """Returns True if the last byte of a file, which is not empty, ends a line; a killed process may cut a line."""
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"


def _run_facts(plan: Plan, device: torch.device) -> dict[str, Any]:
    """Returns the facts that are equal on all ranks."""
    return {
        "grid": str(plan.grid(0)),
        "plan": banner_text(plan, str(device)),
        "notes": list(plan.notes),
        "config": plan.config.to_json(),
        "schedule": schedule_facts(plan.schedule),
        "environment": _environment(device),
    }


def _environment(device: torch.device) -> dict[str, Any]:
    return {
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "host of rank 0": socket.gethostname(),
        "system": platform.platform(),
        "processors": os.cpu_count(),
        "threads of a rank": torch.get_num_threads(),
        "device": str(device) if is_host(device) else f"{device}, {device_name(device)}",
        "python": platform.python_version(),
        "torch": version("torch"),
    }


LABEL = "profile clock"


def profiled_steps(text: str) -> tuple[int, int]:
    """Returns first and last step to profile from the setting ``monitor.profile``, ``A:B``."""
    first, _, last = text.partition(":")
    return int(first), int(last)


class StepProfile:
    """Writer of ``trace-N.json``: rank N's pipeline actions, collectives and messages in training steps A to B.

    Collectives and messages come from the flight recorder, which has only the 512 newest events; older ones are
    counted as lost.

    step A - 1   notes the newest event in the flight recorder; the trace has only later events
    step A       aligns clocks: time 0 is the end of an all-reduce of 4 bytes over the world, label "profile clock"
    A .. B       after each step: reads the flight recorder, and writes the whole trace file again

    Args:
        folder: the folder of ``monitor.report``.
        steps: the first and the last profiled step, A and B, from ``monitor.profile``.
    """

    def __init__(self, folder: Path, steps: tuple[int, int], runtime: RankRuntime, device: torch.device) -> None:
        self._folder, (self._first, self._last), self._runtime, self._device = folder, steps, runtime, device
        recorder = runtime.comm.recorder
        self._file = FlightFile(recorder.path) if recorder is not None else None
        self._begin = self._newest() + 1
        self._events: dict[int, Event] = {}
        self._seen: set[int] = set()
        self._actions: list[tuple[str, int, int]] = []
        self._steps: list[tuple[int, int, int]] = []
        self._entered, self._zero = time.monotonic_ns(), 0
        self._clock = time.monotonic_ns() - time.perf_counter_ns()

    def take(self, step: int) -> None:
        """Adds the events of training step ``step`` to this rank's trace file, if the step is profiled.

        All ranks call it after every training step; the first profiled step all-reduces 4 bytes over the world.
        """
        now = time.monotonic_ns()
        if self._first <= step <= self._last:
            self._steps.append((step, self._entered, now))
            self._actions += self._spans()
            self._drain()
            if not self._zero:
                self._zero = self._align()
            try:
                self._write()
            except OSError as error:  # a full disk must not end training
                logger.warning("rank %d writes no trace: %s", self._runtime.comm.grid.rank, first_line(error))
        elif step == self._first - 1:
            self._begin = self._newest() + 1
        self._entered = time.monotonic_ns()

    def close(self) -> None:
        """Closes this writer's handle of the flight recorder's file; the recorder and the written trace stay."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _newest(self) -> int:
        events = self._file.events(most=1) if self._file is not None else []
        return events[-1].sequence if events else 0

    def _drain(self) -> None:
        """Reads the recorder again, because an event that was unfinished may have ended."""
        for event in self._file.events() if self._file is not None else ():
            if event.sequence >= self._begin:
                self._seen.add(event.sequence)
                if event.kind != EventKind.ACTION:
                    self._events[event.sequence] = event

    def _spans(self) -> list[tuple[str, int, int]]:
        """Returns actions of the last step, in nanoseconds of the monotonic clock; none for a user's own loop."""
        row = self._runtime.plan.schedule.per_rank[self._runtime.comm.grid.coord().pp]
        spans = self._runtime.executor.spans
        if [span.action for span in spans] != list(row):
            return []
        return [(str(s.action), int(s.start * 1e9) + self._clock, int(s.end * 1e9) + self._clock) for s in spans]

    def _align(self) -> int:
        """Returns the end of an all-reduce on this rank; all ranks finish it at nearly the same time."""
        word = torch.zeros(1, device=self._device)
        self._runtime.comm.all_reduce(word, "world", LABEL).wait()
        word.item()  # waits for the GPU
        return time.monotonic_ns()

    def _write(self) -> None:
        grid = self._runtime.comm.grid
        told: dict[str, Any] = {
            "format": FORMAT,
            "rank": grid.rank,
            "ranks": grid.world_size,
            "place": grid.place(),
            "host": socket.gethostname(),
            "zero": self._zero,
            "steps": self._steps,
            "actions": self._actions,
            "lost": max(0, self._newest() + 1 - self._begin - len(self._seen)),
            "events": [_told(self._events[sequence]) for sequence in sorted(self._events)],
        }
        path = self._folder / trace_file(grid.rank)
        written = path.with_suffix(".tmp")
        self._folder.mkdir(parents=True, exist_ok=True)
        written.write_text(json.dumps(told), encoding="utf-8")
        os.replace(written, path)


def _told(event: Event) -> dict[str, Any]:
    return {
        "kind": event.kind.name.lower(),
        "axis": event.axis,
        "stream": event.stream,
        "label": event.label,
        "bytes": event.bytes,
        "dtype": event.dtype,
        "peer": event.peer,
        "begun": event.begun,
        "ended": event.ended,
    }
