"""The axes of a grid, measured by what training uses: ``Comm`` over its own backend. Every rank takes part."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from engine.kernels.device import expected_link, finish
from engine.launch.doctor.examined import AxisFigure, Hosts, InterfaceFacts
from engine.launch.doctor.pairs import LARGE, SMALL, Stopwatch, ladder
from engine.parallel.comm.backend import Link, state_link
from engine.parallel.comm.comm import Comm
from engine.parallel.comm.traffic import sent_bytes
from engine.parallel.grid import Axis, Grid

_LABEL = "doctor"
_SMALL_REPEATS = 15

_Call = Callable[[torch.Tensor], None]


@dataclass(frozen=True, slots=True)
class AxisTimes:
    """What a rank has measured of a group of an axis."""

    axis: str
    ranks: tuple[int, ...]
    latency: float
    payload: int
    rate: float


def measure_axes(comm: Comm, device: torch.device) -> Iterator[AxisTimes]:
    """Measure each axis of several ranks; all groups of an axis at the same time, as in training.

    Raises:
        EngineError: a rank does not come.
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
    """Send and receive between neighbours of the pipeline: those behind even stages first, then the others."""
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
    """Times calls that several ranks make; how often and how large is agreed on by all ranks."""

    def __init__(self, comm: Comm, device: torch.device) -> None:
        self.comm, self._device = comm, device
        self._data = torch.zeros(LARGE // 4, device=device)

    def measure(self, axis: str, ranks: tuple[int, ...], op: str, call: _Call) -> AxisTimes:
        """Latency and rate of ``call``; every rank of the world calls it, those outside with a call that does
        nothing."""
        watch = Stopwatch()

        def timed(size: int) -> float:
            data = self._data[: size // 4]
            began = time.perf_counter()
            call(data)
            finish(self._device)
            return watch.note(size, time.perf_counter() - began)

        self._slowest(0.0)  # all are here
        for _ in range(_SMALL_REPEATS):
            timed(SMALL)
        payload = ladder(lambda size: self._slowest(timed(size)))
        sent = sent_bytes("all_reduce", payload, len(ranks)) if op == "all_reduce" else payload
        return AxisTimes(axis, ranks, watch.median(SMALL), payload, sent / watch.median(payload))

    def _slowest(self, seconds: float) -> float:
        """The largest of all ranks' numbers, once all have come."""
        told = torch.tensor([seconds], dtype=torch.float64, device=self._device)
        self.comm.all_reduce(told, "world", _LABEL, "max").wait()
        return float(told)


def axis_figures(
    times: Sequence[AxisTimes], grid: Grid, hosts: Hosts, device: torch.device, shared: bool
) -> list[AxisFigure]:
    """What ranks have measured, by group, beside what is expected of each link; ``shared``: of memory by tensor ranks.

    A group is as slow as the slowest of its ranks.
    """
    by_group: dict[tuple[str, tuple[int, ...]], list[AxisTimes]] = {}
    for one in times:
        by_group.setdefault((one.axis, one.ranks), []).append(one)
    figures = []
    for (axis, ranks), found in by_group.items():
        names = tuple(dict.fromkeys(hosts.of_rank[rank] for rank in ranks))
        together = [other for kind, other in by_group if kind == axis and _at_once(axis, ranks, other, grid)]
        over, expected = _expected(axis, names, _sharing(names, together, hosts), hosts, device.type)
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
    """Whether two groups of an axis were measured at the same time."""
    return axis != "pp" or (grid.coord(ranks[0]).pp - grid.coord(other[0]).pp) % 2 == 0


def _sharing(names: Sequence[str], groups: Sequence[tuple[int, ...]], hosts: Hosts) -> int:
    """How many groups share the network of the busiest of these hosts."""
    crossing = [places for group in groups if len(places := {hosts.of_rank[rank] for rank in group}) > 1]
    return max(1, *(sum(name in places for places in crossing) for name in names))


def _expected(axis: str, names: Sequence[str], sharing: int, hosts: Hosts, kind: str) -> tuple[str, float | None]:
    """What carries a group, and the bytes a second that each of its ranks may send."""
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
