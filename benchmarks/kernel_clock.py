"""Seconds of a piece of work: events on a GPU, whose L2 is flushed before each; the wall clock on a CPU."""

import time
from collections.abc import Callable
from typing import Protocol

import torch

FLUSH_BYTES = 512 << 20
"""Written before each sample: several times any L2, and long enough that the host is ahead of the GPU again."""

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
    """For what runs on a GPU. All samples are queued before the host waits, so that none contains the host's delays."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._flush = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device=device)

    def sample(self, prepare: Work, work: Work, count: int) -> list[float]:
        """As the protocol says."""
        pairs = []
        for _ in range(count):
            prepare()
            self._flush.zero_()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            work()
            end.record()
            pairs.append((start, end))
        torch.cuda.synchronize(self._device)
        return [start.elapsed_time(end) * 1e-3 for start, end in pairs]


def make_clock(device: torch.device) -> Clock:
    """The one for ``device``."""
    return EventClock(device) if device.type == "cuda" else WallClock()
