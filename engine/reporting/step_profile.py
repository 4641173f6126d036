"""What a rank did in the steps A to B of ``monitor.profile``: its pipeline actions, collectives and messages in time.

step A - 1   the place in the flight recorder is kept
step A       an all-reduce over the world aligns the clocks: its end is time 0 of every rank
A .. B       after each step the recorder is read, and the file of this rank replaced

``trine report`` merges the files of all ranks. The recorder keeps 512 events; what a longer step has overwritten is
counted as lost.
"""

import json
import logging
import os
import socket
import time
from pathlib import Path
from typing import Any

import torch

from engine.errors import first_line
from engine.parallel.comm.flight.flight import Event, FlightFile
from engine.parallel.comm.flight.layout import EventKind
from engine.reporting.record_format import FORMAT, trace_file
from engine.step.runtime import RankRuntime

logger = logging.getLogger("trine")

LABEL = "profile clock"


def profiled_steps(text: str) -> tuple[int, int]:
    """The first and the last step of ``A:B``, a value that the configuration has checked."""
    first, _, last = text.partition(":")
    return int(first), int(last)


class StepProfile:
    """Writes the trace of one rank. Collective once: the all-reduce of 4 bytes over the world, label "profile clock".

    Args:
        folder: the folder of ``monitor.report``.
        steps: first and last step.
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
        """Keep what the training step that made update ``step`` has noted, if it is one of the profiled ones.

        All ranks call it after every training step.
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
            except OSError as error:  # a full disk ends no training
                logger.warning("rank %d writes no trace: %s", self._runtime.comm.grid.rank, first_line(error))
        elif step == self._first - 1:
            self._begin = self._newest() + 1
        self._entered = time.monotonic_ns()

    def close(self) -> None:
        """Stop reading the recorder."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _newest(self) -> int:
        events = self._file.events(most=1) if self._file is not None else []
        return events[-1].sequence if events else 0

    def _drain(self) -> None:
        """Read what is in the recorder; what had not ended the last time may have by now."""
        for event in self._file.events() if self._file is not None else ():
            if event.sequence >= self._begin:
                self._seen.add(event.sequence)
                if event.kind != EventKind.ACTION:
                    self._events[event.sequence] = event

    def _spans(self) -> list[tuple[str, int, int]]:
        """Actions of the step that has ended, in nanoseconds of the monotonic clock; none of a user's own loop."""
        row = self._runtime.plan.schedule.per_rank[self._runtime.comm.grid.coord().pp]
        spans = self._runtime.executor.spans
        if [span.action for span in spans] != list(row):
            return []
        return [(str(s.action), int(s.start * 1e9) + self._clock, int(s.end * 1e9) + self._clock) for s in spans]

    def _align(self) -> int:
        """The moment at which an all-reduce has ended on this rank, as on all others at nearly the same time."""
        word = torch.zeros(1, device=self._device)
        self._runtime.comm.all_reduce(word, "world", LABEL).wait()
        word.item()  # waits for a GPU
        return time.monotonic_ns()

    def _write(self) -> None:
        grid = self._runtime.comm.grid
        told: dict[str, Any] = {
            "format": FORMAT,
            "rank": grid.rank,
            "ranks": grid.world_size,
            "place": dict(grid.coord()),
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
