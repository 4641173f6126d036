"""Messages between hosts, one rank of each: their clocks, and a tournament of all pairs.

    round 1   A - F   B - E   C - D        every host is in one pair of a round, so pairs do not disturb each other;
    round 2   A - E   F - D   B - C        five rounds for six hosts: all but the first move on by one place
    ..

Many hosts, of which all pairs would take too long, send to their neighbours in a ring.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from engine.parallel.comm.host_group import HostGroup

MOST_HOSTS = 16
"""Up to this number all pairs of hosts are measured."""
SMALL, PROBE, LARGE = 8, 1 << 16, 1 << 23
"""Bytes of messages: for the latency, to choose the size, and the largest."""
PATIENCE = 0.2
"""Seconds that one large message may take, about."""
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


def size_for(seconds: float) -> int:
    """Bytes of the large message where ``PROBE`` takes ``seconds``: a power of two that takes about ``PATIENCE``."""
    size = PROBE
    while size < LARGE and 2 * size / PROBE * seconds < PATIENCE:
        size *= 2
    return size


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
            other.take(1)
        for other in others:
            other.give(b"\0")
    else:
        first.give(b"\0")
        first.take(1)


@dataclass(frozen=True, slots=True)
class _Partner:
    group: HostGroup
    rank: int

    def give(self, data: bytes | bytearray) -> None:
        self.group.send(memoryview(bytearray(data) if isinstance(data, bytes) else data), self.rank)()

    def take(self, size: int) -> bytearray:
        data = bytearray(size)
        self.group.receive(memoryview(data), self.rank)()
        return data

    def ping(self, data: bytearray) -> float:
        """Seconds until the other end has answered with as many bytes."""
        began = time.perf_counter()
        self.give(data)
        self.group.receive(memoryview(data), self.rank)()
        return time.perf_counter() - began

    def pong(self, data: bytearray) -> None:
        self.group.receive(memoryview(data), self.rank)()
        self.give(data)


def _lead(other: _Partner) -> tuple[float, float]:
    """(seconds of latency, bytes a second), each in one direction."""
    small, probe = bytearray(SMALL), bytearray(PROBE)
    latency = median([other.ping(small) for _ in range(2 * _REPEATS)][_REPEATS:]) / 2
    seconds = min(other.ping(probe) for _ in range(2)) / 2
    size = size_for(seconds)
    repeats = max(1, min(_REPEATS, int(4 * PATIENCE / (size / PROBE * seconds))))
    other.give(size.to_bytes(8, "little") + repeats.to_bytes(8, "little"))
    large = bytearray(size)
    taken = median(other.ping(large) for _ in range(repeats)) / 2
    return latency, size / taken


def _follow(other: _Partner) -> None:
    small, probe = bytearray(SMALL), bytearray(PROBE)
    for data in (*[small] * 2 * _REPEATS, probe, probe):
        other.pong(data)
    told = bytes(other.take(16))
    large = bytearray(int.from_bytes(told[:8], "little"))
    for _ in range(int.from_bytes(told[8:], "little")):
        other.pong(large)


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
        first.take(1)
        first.give(time.time_ns().to_bytes(8, "little"))
    return []


def _ask_clock(other: _Partner) -> tuple[float, float]:
    found = []
    for _ in range(_CLOCK_REPEATS):
        began, mark = time.time_ns(), time.perf_counter_ns()
        other.give(b"\0")
        there = int.from_bytes(other.take(8), "little")
        trip = time.perf_counter_ns() - mark
        found.append((trip, there - began - trip // 2))
    trip, ahead = min(found)
    return ahead / 1e9, trip / 2e9
