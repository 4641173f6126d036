"""The tournament of hosts, their clocks, and messages that grow."""

import queue
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations

import pytest

from engine.launch.doctor.links import (
    LARGE,
    MOST_HOSTS,
    PATIENCE,
    PROBE,
    Stopwatch,
    ladder,
    measure_clocks,
    measure_pairs,
    tournament,
)
from engine.parallel.comm.host_group import Wait


@pytest.mark.parametrize("hosts", range(2, MOST_HOSTS + 1))
def test_all_pairs_meet_once_and_never_disturb_each_other(hosts: int) -> None:
    rounds = tournament(hosts)
    assert sorted(pair for pairs in rounds for pair in pairs) == list(combinations(range(hosts), 2))
    assert len(rounds) == hosts - 1 + hosts % 2
    assert all(len(set(sum(pairs, ()))) == 2 * len(pairs) for pairs in rounds)


@pytest.mark.parametrize("hosts", [17, 18, 100])
def test_many_hosts_meet_their_neighbours(hosts: int) -> None:
    rounds = tournament(hosts)
    assert len(rounds) == 2 + hosts % 2
    assert all(len(set(sum(pairs, ()))) == 2 * len(pairs) for pairs in rounds)
    met = Counter(host for pairs in rounds for pair in pairs for host in pair)
    assert met == dict.fromkeys(range(hosts), 2)


@pytest.mark.parametrize("hosts", [0, 1])
def test_one_host_has_no_pair(hosts: int) -> None:
    assert tournament(hosts) == []


@pytest.mark.parametrize(
    ("rate", "buffer", "size"),
    [
        pytest.param(1e9, 0, LARGE, id="fast"),
        pytest.param(1e7, 0, 1 << 19, id="slow"),
        pytest.param(1e4, 0, PROBE, id="very slow"),
        pytest.param(1e6, 1 << 18, 1 << 19, id="slow behind a buffer"),
    ],
)
def test_messages_grow_as_long_as_they_are_quick(rate: float, buffer: int, size: int) -> None:
    taken, watch = list[float](), Stopwatch()

    def call(count: int) -> float:
        taken.append(max(0, count - buffer) / rate + 1e-5)
        return watch.note(count, taken[-1])

    assert ladder(call) == size
    assert sum(taken) < max(5 * PATIENCE, 3 * PROBE / rate)
    assert watch.median(size) == pytest.approx(max(0, size - buffer) / rate, abs=1e-4)


class Desk:
    """Messages between threads; the ``clock`` of this one is ahead by so many seconds."""

    def __init__(self, rank: int, lines: dict[tuple[int, int], "queue.Queue[bytes]"], clock: int = 0) -> None:
        self.rank, self.size, self._lines, self._ahead = rank, 8, lines, clock * 10**9

    def send(self, data: memoryview, to: int) -> Wait:
        """Gone at once; a time is told by the clock of this desk."""
        told = bytes(data)
        if len(told) == 8 and (time := int.from_bytes(told, "little")) > 10**18:
            told = (time + self._ahead).to_bytes(8, "little")
        self._lines[self.rank, to].put(told)
        return lambda: None

    def receive(self, target: memoryview, source: int) -> Wait:
        """Waits for it."""

        def take() -> None:
            target[:] = self._lines[source, self.rank].get(timeout=30)

        return take


def desks(leaders: list[int], clocks: list[int]) -> list[Desk]:
    lines = {(a, b): queue.Queue[bytes]() for a in leaders for b in leaders}
    return [Desk(rank, lines, clock) for rank, clock in zip(leaders, clocks, strict=True)]


def test_each_pair_is_told_once() -> None:
    leaders = [0, 3, 5]
    with ThreadPoolExecutor(3) as threads:
        told = threads.map(lambda desk: measure_pairs(desk, leaders), desks(leaders, [0, 0, 0]))
        found = [times for one in told for times in one]
    assert sorted(times.hosts for times in found) == [(0, 1), (0, 2), (1, 2)]
    assert all(0 < times.latency < 1 and times.rate > 1e6 for times in found)


def test_clocks_are_compared_with_the_first() -> None:
    leaders = [0, 3, 5]
    with ThreadPoolExecutor(3) as threads:
        told, *rest = threads.map(lambda desk: measure_clocks(desk, leaders), desks(leaders, [0, 7, -90]))
    assert rest == [[], []]
    assert [ahead for ahead, _ in told] == pytest.approx([7, -90], abs=0.5)
    assert all(abs(ahead - real) <= error + 1e-3 for (ahead, error), real in zip(told, (7, -90), strict=True))
