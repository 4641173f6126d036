"""Measurements of links with training's own calls: the axes of a grid, then pairs of ranks, one rank of each host.

    round 1   A - F   B - E   C - D        every host is in one pair of a round, so pairs do not disturb each other;
    round 2   A - E   F - D   B - C        five rounds for six hosts: all but the first move on by one place
    ..

With many hosts all pairs would take too long, so hosts send to their neighbours in a ring.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from engine.kernels.device import expected_link, finish
from engine.launch.doctor.examined import AxisFigure, Hosts, InterfaceFacts
from engine.parallel.comm.backend import Link, state_link
from engine.parallel.comm.comm import Comm
from engine.parallel.comm.host_group import HostGroup
from engine.parallel.comm.traffic import sent_bytes
from engine.parallel.grid import Axis, Grid

MOST_HOSTS = 16
"""Maximum number of hosts for which all pairs are measured."""
SMALL, PROBE, LARGE = 8, 1 << 16, 1 << 23
"""Bytes of messages: for latency, for the choice of the size, and the maximum."""
PATIENCE = 0.1
"""Approximate seconds for the large messages of one measurement."""
_STEP = 2
_REPEATS = 5
_CLOCK_REPEATS = 8


def tournament(count: int) -> list[list[tuple[int, int]]]:
    """Returns rounds of pairs of hosts (indices below ``count``) to measure; a host is in at most one pair of a round.

    Up to 16 hosts all pairs are measured, with more hosts only neighbours in a ring.
    """
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
    """Finds the message size in bytes for a rate measurement: doubles it until a call takes 0.05 s, up to ``LARGE``.

    Args:
        call: callback that sends a message of the given size in bytes, and returns the seconds taken.
    """
    size = PROBE
    call(size)
    while _STEP * (seconds := call(size)) < PATIENCE and size < LARGE:
        size = min(size * _STEP, LARGE)
    for _ in range(min(_REPEATS, int(PATIENCE / max(seconds, 1e-9)))):
        call(size)
    return size


class Stopwatch:
    """Record of the durations of calls in seconds, by message size in bytes."""

    def __init__(self) -> None:
        self._taken: dict[int, list[float]] = {}

    def note(self, size: int, seconds: float) -> float:
        """Records ``seconds`` for a call with ``size`` bytes, and returns ``seconds``."""
        self._taken.setdefault(size, []).append(seconds)
        return seconds

    def median(self, size: int) -> float:
        """Returns the median duration for messages of ``size`` bytes; the first one is ignored if there are others."""
        found = self._taken[size]
        return median(found[1:] or found)


@dataclass(frozen=True, slots=True)
class PairTimes:
    """Measured latency in seconds and rate in bytes per second between two hosts, by index."""

    hosts: tuple[int, int]
    latency: float
    rate: float


def measure_pairs(group: HostGroup, leaders: Sequence[int]) -> list[PairTimes]:
    """Measures the links between pairs of hosts; returns the results of pairs with this rank's host as
    their first host.

    ``leaders``: one rank per host; all of them must call this function.

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
    """Delays the next round until all leaders have ended the last one."""
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
    """Measures (latency in seconds, bytes per second) in one direction; the other end echoes until it expects 0
    bytes."""
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
    """Compares the clocks of all hosts with the first leader's clock.

    ``leaders``: one rank per host; all of them must call this function. The first leader gets, for
    each other host, (its clock minus the first leader's, maximum error) in seconds; other leaders get an empty list.

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


_LABEL = "doctor"
_SMALL_REPEATS = 15

_Call = Callable[[torch.Tensor], None]


@dataclass(frozen=True, slots=True)
class AxisTimes:
    """Latency in seconds and rate in bytes per second that a rank has measured along a grid axis."""

    axis: str
    ranks: tuple[int, ...]
    latency: float
    payload: int
    rate: float


def measure_axes(comm: Comm, device: torch.device) -> Iterator[AxisTimes]:
    """Measures communication along each grid axis, and yields this rank's times axis by axis. Every rank must call it.

    All groups of an axis communicate at the same time, as in training.

    Raises:
        EngineError: a rank does not join.
    """
    meter, grid = _Meter(comm, device), comm.grid
    axes: list[Axis] = [*(axis for axis in reversed([*grid.sizes]) if axis != "pp"), *grid.data_axes]
    for axis in axes:
        if grid.size(axis) > 1:
            yield meter.measure(axis, grid.peers(axis), "all_reduce", _reducing(comm, axis))
    if grid.pp > 1:
        yield from _measure_hops(meter)


def _reducing(comm: Comm, axis: Axis) -> _Call:
    return lambda data: comm.all_reduce(data, axis, _LABEL).wait()


def _measure_hops(meter: "_Meter") -> Iterator[AxisTimes]:
    """Sends and receives between neighbours of the pipeline: first from even to odd stages, then from odd to even."""
    comm, line, here = meter.comm, meter.comm.grid.peers("pp"), meter.comm.grid.coord().pp
    links = [link for stage in range(len(line) - 1) for link in _both(stage)]
    comm.link(links)
    for parity in (0, 1)[: len(line) - 1]:
        first = here if here % 2 == parity else here - 1
        if 0 <= first < len(line) - 1:
            there, back = _both(first)
            call = _leading(comm, there, back) if here == first else _following(comm, there, back)
            found = meter.measure("pp", (line[first], line[first + 1]), "send", call)
            if here == first:
                yield found
        else:
            meter.measure("pp", (), "send", lambda data: None)


def _both(stage: int) -> tuple[Link, Link]:
    return state_link(stage, stage + 1), state_link(stage + 1, stage)


def _leading(comm: Comm, there: Link, back: Link) -> _Call:
    def call(data: torch.Tensor) -> None:
        comm.send(data, there, _LABEL).wait()
        comm.receive(data[:1], back, _LABEL).wait()

    return call


def _following(comm: Comm, there: Link, back: Link) -> _Call:
    def call(data: torch.Tensor) -> None:
        comm.receive(data, there, _LABEL).wait()
        comm.send(data[:1], back, _LABEL).wait()

    return call


class _Meter:
    """Timer of calls that several ranks make; all ranks agree on number and size of the calls."""

    def __init__(self, comm: Comm, device: torch.device) -> None:
        self.comm, self._device = comm, device
        self._data = torch.zeros(LARGE // 4, device=device)

    def measure(self, axis: str, ranks: tuple[int, ...], op: str, call: _Call) -> AxisTimes:
        """Measures latency and rate of ``call``; all ranks of the world call it, outsiders with a call without
        effect."""
        watch = Stopwatch()

        def timed(size: int) -> float:
            data = self._data[: size // 4]
            began = time.perf_counter()
            call(data)
            finish(self._device)
            return watch.note(size, time.perf_counter() - began)

        self._slowest(0.0)  # waits for all ranks
        for _ in range(_SMALL_REPEATS):
            timed(SMALL)
        payload = ladder(lambda size: self._slowest(timed(size)))
        sent = sent_bytes("all_reduce", payload, len(ranks)) if op == "all_reduce" else payload
        return AxisTimes(axis, ranks, watch.median(SMALL), payload, sent / watch.median(payload))

    def _slowest(self, seconds: float) -> float:
        """Returns the largest of all ranks' numbers, once all have arrived."""
        largest = torch.tensor([seconds], dtype=torch.float64, device=self._device)
        self.comm.all_reduce(largest, "world", _LABEL, "max").wait()
        return float(largest)


def axis_figures(
    times: Sequence[AxisTimes], grid: Grid, hosts: Hosts, device: torch.device, shared: bool
) -> list[AxisFigure]:
    """Combines the ``times`` of all ranks to one result per group of ranks along an axis, from its slowest rank.

    ``device`` sets each result's expected latency, and the expected rate within a host. Between hosts, network
    interfaces set this rate; it is None on CUDA. ``shared``: True if tensor ranks of a host communicate through shared
    memory.
    """
    by_group: dict[tuple[str, tuple[int, ...]], list[AxisTimes]] = {}
    for one in times:
        by_group.setdefault((one.axis, one.ranks), []).append(one)
    figures = []
    for (axis, ranks), found in by_group.items():
        names = tuple(dict.fromkeys(hosts.of_rank[rank] for rank in ranks))
        together = [other for kind, other in by_group if kind == axis and _at_once(axis, ranks, other, grid)]
        over, expected = _expected(names, _sharing(names, together, hosts), hosts, device.type)
        figures.append(
            AxisFigure(
                axis=axis,
                ranks=ranks,
                hosts=names,
                over="shared memory" if shared and axis == "tp" and len(names) == 1 else over,
                latency=max(one.latency for one in found),
                payload=found[0].payload,
                rate=min(one.rate for one in found),
                expected_latency=expected_link(device.type)[0],
                expected_rate=expected,
            )
        )
    return figures


def _at_once(axis: str, ranks: tuple[int, ...], other: tuple[int, ...], grid: Grid) -> bool:
    """Returns True if two groups of an axis were measured at the same time."""
    return axis != "pp" or (grid.coord(ranks[0]).pp - grid.coord(other[0]).pp) % 2 == 0


def _sharing(names: Sequence[str], groups: Sequence[tuple[int, ...]], hosts: Hosts) -> int:
    """Counts the groups that share the network of the busiest of these hosts."""
    crossing = [places for group in groups if len(places := {hosts.of_rank[rank] for rank in group}) > 1]
    return max(1, *(sum(name in places for places in crossing) for name in names))


def _expected(names: Sequence[str], sharing: int, hosts: Hosts, kind: str) -> tuple[str, float | None]:
    """Returns library and link of a group, and the bytes per second that each of its ranks may send."""
    library = "NCCL" if kind == "cuda" else "gloo"
    if len(names) == 1:
        return f"{library} within the host", expected_link(kind)[1]
    carriers = [hosts.host(name).carrier() for name in names]
    known = [one for one in carriers if one is not None]
    slowest = min(known, key=_speed, default=None)
    if slowest is None or kind == "cuda":
        return f"{library} between hosts", None
    return f"{library} over {slowest}", slowest.megabits * 125e3 / sharing if slowest.megabits else None


def _speed(interface: InterfaceFacts) -> float:
    return interface.megabits or float("inf")
