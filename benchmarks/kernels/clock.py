"""Seconds of a piece of work: events on a GPU, whose L2 is flushed before each; the wall clock on a CPU."""

import math
import time
from collections.abc import Callable
from typing import Protocol

import torch

FLUSH_BYTES = 512 << 20
"""Written before each sample: several times any L2."""
FIRST_HOST_SECONDS = 1e-3
"""What the host is taken to need for a piece of work that it has not seen."""
AHEAD, LONGEST_SECONDS = 1.5, 3e-3

Work = Callable[[], object]


class Clock(Protocol):
    """Takes samples."""

    def sample(self, prepare: Work, work: Work, count: int) -> list[float]:
        """Seconds of ``work``, ``count`` times, each after an untimed ``prepare``."""


class WallClock:
    """For what runs on a CPU."""

    def sample(self, prepare: Work, work: Work, count: int) -> list[float]:
        """As the protocol says."""
        found = []
        for _ in range(count):
            prepare()
            start = time.perf_counter()
            work()
            found.append(time.perf_counter() - start)
        return found


class EventClock:
    """For what runs on a GPU. Writes over the L2 keep the GPU busy while the host prepares a piece of work, so that
    the time between the events has none of the host's delays; the host waits after all samples.

    Args:
        align: given to the GPU before each piece of work; ranks that measure together wait for each other in it.
    """

    def __init__(self, device: torch.device, align: Work | None = None) -> None:
        self._device, self._align = device, align
        self._flush = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device=device)
        self._flush.zero_()
        start, end = _event(), _event()
        start.record()
        self._flush.zero_()
        end.record()
        torch.cuda.synchronize(device)
        self._flush_seconds: float = start.elapsed_time(end) * 1e-3

    def sample(self, prepare: Work, work: Work, count: int) -> list[float]:
        """As the protocol says."""
        pairs, host = [], FIRST_HOST_SECONDS
        for _ in range(count):
            prepare()
            for _ in range(self._writes(host)):
                self._flush.zero_()
            if self._align is not None:
                self._align()
            start, end = _event(), _event()
            start.record()
            before = time.perf_counter()
            work()
            host = time.perf_counter() - before
            end.record()
            pairs.append((start, end))
        torch.cuda.synchronize(self._device)
        return [start.elapsed_time(end) * 1e-3 for start, end in pairs]

    def _writes(self, host: float) -> int:
        """As many as last longer than the host took for the work before."""
        wanted = min(AHEAD * host, LONGEST_SECONDS)
        return max(1, math.ceil(wanted / max(self._flush_seconds, 1e-6)))


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def make_clock(device: torch.device) -> Clock:
    """The one for ``device``."""
    return EventClock(device) if device.type == "cuda" else WallClock()
