"""Seconds of a function: CUDA events on a GPU, with L2 flushed before each call; wall time on a CPU."""

import math
import time
from collections.abc import Callable
from typing import Protocol

import torch

FLUSH_BYTES = 512 << 20
"""Bytes written before each sample, several times any L2 cache."""
FIRST_HOST_SECONDS = 1e-3
"""Assumed host seconds for work that has not been measured."""
AHEAD, LONGEST_SECONDS = 1.5, 3e-3

Work = Callable[[], object]


def nothing() -> None:
    """Prepares nothing."""


class Clock(Protocol):
    """Interface of a clock that takes timed samples."""

    def sample(self, prepare: Work, work: Work, count: int) -> list[float]:
        """Returns the seconds of ``count`` runs of ``work``, each after an untimed ``prepare``."""


class WallClock:
    """Wall-clock timer for functions on a CPU."""

    def sample(self, prepare: Work, work: Work, count: int) -> list[float]:
        """Returns seconds of each run; see :class:`Clock`."""
        found = []
        for _ in range(count):
            prepare()
            start = time.perf_counter()
            work()
            found.append(time.perf_counter() - start)
        return found


class EventClock:
    """Clock for work on a GPU, by events. Writes to the L2 keep the GPU busy while the host prepares a run, so that the
    time excludes host delays; the host synchronizes after all samples.

    Args:
        align: launched before each run, to synchronize ranks that measure together.
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
        """Returns seconds of each run; see :class:`Clock`."""
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
    """Returns the clock for ``device``."""
    return EventClock(device) if device.type == "cuda" else WallClock()
