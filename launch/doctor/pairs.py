"""Messages between hosts, one rank of each: their clocks, and a tournament of all pairs.

    round 1   A - F   B - E   C - D        every host is in one pair of a round, so pairs do not disturb each other;
    round 2   A - E   F - D   B - C        five rounds for six hosts: all but the first move on by one place
    ..

Many hosts, of which all pairs would take too long, send to their neighbours in a ring.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from engine.parallel.comm.host_group import HostGroup

MOST_HOSTS = 16
"""Up to this number all pairs of hosts are measured."""
SMALL, PROBE, LARGE = 8, 1 << 16, 1 << 23
"""Bytes of messages: for the latency, to choose the size, and the largest."""
PATIENCE = 0.1
"""Seconds that the large messages may take, about, beside one that was larger than it should be."""
_STEP = 2
_REPEATS = 5
_CLOCK_REPEATS = 8


def tournament(count: int) -> list[list[tuple[int, int]]]:
    """Rounds of pairs of ``count`` hosts; in a round each host has one pair at most."""
    if count < 2:
        return []
    if count > MOST_HOSTS:
        ring = [(index, (index + 1) % count) for index in range(count)]
        last = [ring.pop()] if count % 2 else []
        return [part for part in (ring[::2], ring[1::2], last) if part]
    places = [*range(count), *[-1] * (count % 2)]
    rounds = []
    for _ in range(len(places) - 1):
        half = len(places) // 2
        pairs = zip(places[:half], reversed(places[half:]), strict=True)
        rounds.append([(min(pair), max(pair)) for pair in pairs if -1 not in pair])
        places = [places[0], places[-1], *places[1:-1]]
    return rounds


def ladder(call: Callable[[int], float]) -> int:
    """Make ``call`` with more and more bytes, as long as that is quick, then again; returns the bytes of the last ones.

    A small message tells little of a slow link, whose switches take it into a buffer.

    Args:
        call: returns the seconds that it took.
    """
    size = PROBE
    call(size)
    while _STEP * (seconds := call(size)) < PATIENCE and size < LARGE:
        size = min(size * _STEP, LARGE)
    for _ in range(min(_REPEATS, int(PATIENCE / max(seconds, 1e-9)))):
        call(size)
    return size


class Stopwatch:
    """Seconds that calls took, by size; the first of a size is left out if there are others."""

    def __init__(self) -> None:
        self._taken: dict[int, list[float]] = {}

    def note(self, size: int, seconds: float) -> float:
        """Keep a time, and return it."""
        self._taken.setdefault(size, []).append(seconds)
        return seconds

    def median(self, size: int) -> float:
        """Of the times of a size."""
        found = self._taken[size]
        return median(found[1:] or found)


@dataclass(frozen=True, slots=True)
class PairTimes:
    """What two hosts have measured; the first one tells it."""

    hosts: tuple[int, int]
    latency: float
    rate: float


def measure_pairs(group: HostGroup, leaders: Sequence[int]) -> list[PairTimes]:
    """Play the tournament; every leader calls it, with the same leaders. Returns what this one has to tell.

    Raises:
        EngineError: a leader does not answer.
    """
    here, found = leaders.index(group.rank), list[PairTimes]()
    for pairs in tournament(len(leaders)):
        _gate(group, leaders)
        for first, second in pairs:
            if here == first:
                found.append(PairTimes((first, second), *_lead(_Partner(group, leaders[second]))))
            elif here == second:
                _follow(_Partner(group, leaders[first]))
    return found


def _gate(group: HostGroup, leaders: Sequence[int]) -> None:
    """Nobody begins a round before all have ended the last one."""
    first, *others = (_Partner(group, rank) for rank in leaders)
    if group.rank == leaders[0]:
        for other in others:
            other.ordered()
        for other in others:
            other.order(0)
    else:
        first.order(0)
        first.ordered()


@dataclass(frozen=True, slots=True)
class _Partner:
    group: HostGroup
    rank: int

    def give(self, data: memoryview) -> None:
        self.group.send(data, self.rank)()

    def take(self, data: memoryview) -> None:
        self.group.receive(data, self.rank)()

    def order(self, number: int) -> None:
        self.give(memoryview(bytearray(number.to_bytes(8, "little"))))

    def ordered(self) -> int:
        data = bytearray(8)
        self.take(memoryview(data))
        return int.from_bytes(data, "little")


def _lead(other: _Partner) -> tuple[float, float]:
    """(seconds of latency, bytes a second), each in one direction; the other end answers as many bytes as it is sent,
    until it is told to expect none."""
    data, watch = memoryview(bytearray(LARGE)), Stopwatch()

    def ping(size: int) -> float:
        other.order(size)
        began = time.perf_counter()
        other.give(data[:size])
        other.take(data[:size])
        return watch.note(size, time.perf_counter() - began)

    for _ in range(2 * _REPEATS):
        ping(SMALL)
    size = ladder(ping)
    other.order(0)
    return watch.median(SMALL) / 2, 2 * size / watch.median(size)


def _follow(other: _Partner) -> None:
    data = memoryview(bytearray(LARGE))
    while size := other.ordered():
        other.take(data[:size])
        other.give(data[:size])


def measure_clocks(group: HostGroup, leaders: Sequence[int]) -> list[tuple[float, float]]:
    """(seconds ahead of the first leader, largest error) of the other leaders, on the first one; every leader calls it.

    As NTP does: the answer was written between question and arrival, and the shortest round trip says it best.

    Raises:
        EngineError: a leader does not answer.
    """
    if group.rank == leaders[0]:
        return [_ask_clock(_Partner(group, rank)) for rank in leaders[1:]]
    first = _Partner(group, leaders[0])
    for _ in range(_CLOCK_REPEATS):
        first.ordered()
        first.order(time.time_ns())
    return []


def _ask_clock(other: _Partner) -> tuple[float, float]:
    found = []
    for _ in range(_CLOCK_REPEATS):
        began, mark = time.time_ns(), time.perf_counter_ns()
        other.order(0)
        there = other.ordered()
        trip = time.perf_counter_ns() - mark
        found.append((trip, there - began - trip // 2))
    trip, ahead = min(found)
    return ahead / 1e9, trip / 2e9
