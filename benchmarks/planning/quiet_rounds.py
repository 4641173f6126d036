"""What other processes take of a machine while something is measured, and which measurements count for that reason.

A short measurement on a shared machine is either met by others or not, and a long one is always met by some: medians of
the two are of different machines. So it is known of each how busy the others were, and the quieter half of each counts.
What was measured has no say in it.
"""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from engine.launch.planner.calibration.operator_samples import Measuring

LEAST = 3
"""Measurements that count, if there are as many."""
IDLE = (3, 4)
"""Columns of ``/proc/stat`` in which a processor has nothing to do: idle, and waiting for a disk."""
GUESTS = 8
"""The first column that is part of others."""


def quieter(others: Sequence[float]) -> tuple[int, ...]:
    """Places of the half of some measurements during which others took least, in the order of time."""
    count = max(min(LEAST, len(others)), (len(others) + 1) // 2)
    return tuple(sorted(sorted(range(len(others)), key=others.__getitem__)[:count]))


def busy_seconds(stat: Path = Path("/proc/stat")) -> float | None:
    """Of all processors of the machine since it started; None: no such file."""
    if not stat.is_file():
        return None
    ticks = [int(each) for each in stat.read_text(encoding="ascii").split("\n", 1)[0].split()[1 : 1 + GUESTS]]
    return sum(count for column, count in enumerate(ticks) if column not in IDLE) / os.sysconf("SC_CLK_TCK")


@dataclass(slots=True)
class MeasuredSpan:
    """A measurement of all ranks."""

    seconds: float = 0.0
    """On this rank."""
    others: float = 0.0
    """Of all processors meanwhile, from 0 to 1: what other processes took; 0 where the machine does not tell."""


@contextmanager
def measured_span(ranks: Measuring) -> Iterator[MeasuredSpan]:
    """Inside is what is measured; all ranks begin at once."""
    span = MeasuredSpan()
    ranks.ready()
    busy, own, began = busy_seconds(), time.process_time(), time.perf_counter()
    yield span
    span.seconds = time.perf_counter() - began
    ranks.ready()
    whole, passed, spent, now = time.perf_counter() - began, busy_seconds(), time.process_time() - own, 0.0
    (spent,) = ranks.mean([spent])
    if busy is not None and passed is not None:
        now = (passed - busy - spent * ranks.world.size) / (whole * (os.cpu_count() or 1))
    span.others = min(1.0, max(0.0, now))
