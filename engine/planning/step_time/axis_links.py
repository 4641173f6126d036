"""How fast the axes of a grid are, from where its ranks sit and what carries their messages. Pure arithmetic.

    host 0   rank 0 --- rank 1        within a host: memory, loopback, NVLink
                |          |
             ===+====++====+===       one way out of a host, which all of its ranks share
                     ||
    host 1   rank 2 --- rank 3

What a rank can send over an axis is the rate of its host divided by what leaves the host for each byte that one rank
sends, all groups of the axis at once:

    ring      a rank sends to the next one alone, so a group of neighbours leaves a host once
    gather    an all-gather, where it was measured apart from reduce-scatters
    direct    a rank sends a part to every other one (gloo's reduce-scatters and large all-gathers, as the engine
              makes them); what goes to other hosts leaves the host
    hop       a pipeline rank sends to the next one; every data and tensor coordinate does so at the same time

A call takes the latency of its longest chain of messages: 2 (N-1) for an all-reduce in a ring of N, N-1 for others.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from engine.errors import GridError
from engine.parallel.grid import Axis, Grid
from engine.planning.cost_model.links import LinkSpeed

Pattern = Literal["ring", "direct", "gather"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLinks:
    """What carries the messages of a cluster, measured once for all grids."""

    within: LinkSpeed
    """From a rank to another one of its host; the rate is that of each rank while all of them send."""
    between: LinkSpeed
    """From a host to others; the rate is that of the host, and its ranks share it."""
    memory: LinkSpeed | None = None
    """A sum over tensor ranks of one host through shared memory: seconds of a call, bytes a second as a ring counts
    them. None: they send messages too."""
    direct: bool = True
    """Reduce-scatters and all-gathers are messages from every rank to every other (gloo), not rings (NCCL)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisLinks:
    """The links of one grid."""

    collectives: Mapping[tuple[Axis, Pattern], LinkSpeed]
    """By axis, for axes of several ranks: seconds of a call, bytes a second of a rank."""
    hops: Mapping[tuple[int, int], LinkSpeed]
    """Between two pipeline ranks."""
    through_memory: bool = False
    """Tensor ranks sum through shared memory."""


def place_axes(grid: Grid, hosts: Sequence[str], links: HostLinks) -> AxisLinks:
    """The links of ``grid`` where rank r runs on ``hosts[r]``.

    Raises:
        GridError: there are more or fewer hosts than ranks.
    """
    if len(hosts) != grid.world_size:
        raise GridError(f"{len(hosts)} ranks have a host, and the grid has {grid.world_size}; give one host for each.")
    axes: tuple[Axis, ...] = ("tp", "dp", *grid.data_axes, "replica", "world")
    groups, lines = list(grid.groups("tp")), list(grid.groups("pp"))
    patterns: tuple[Pattern, ...] = ("ring", "direct")
    return AxisLinks(
        collectives={
            (axis, pattern): _collective(grid, axis, pattern, (hosts, links))
            for axis in axes
            if grid.size(axis) > 1
            for pattern in patterns
        },
        hops={
            (source, target): _hop(lines, (source, target), hosts, links)
            for source in range(grid.pp)
            for target in range(grid.pp)
            if source != target
        },
        through_memory=links.memory is not None and grid.tp > 1 and _alone(groups, hosts),
    )


def _alone(groups: Iterable[Sequence[int]], hosts: Sequence[str]) -> bool:
    """Each group lies on one host."""
    return all(len({hosts[rank] for rank in group}) == 1 for group in groups)


def _collective(grid: Grid, axis: Axis, pattern: Pattern, placed: tuple[Sequence[str], HostLinks]) -> LinkSpeed:
    hosts, links = placed
    groups = list(grid.groups(axis))
    if _alone(groups, hosts) and links.memory is not None and set(groups) == set(grid.groups("tp")):
        return links.memory
    ring = pattern == "ring" or not links.direct
    steps = (2 if pattern == "ring" else 1) * (grid.size(axis) - 1)
    leaving = _leaving((pair for group in groups for pair in (_ring(group) if ring else _direct(group))), hosts)
    if not leaving:
        return LinkSpeed(steps * links.within.latency, links.within.rate)
    rate = min(links.within.rate, links.between.rate / max(leaving.values()))
    return LinkSpeed(steps * links.between.latency, rate)


_Share = tuple[int, int, float]
"""(from, to, share of what the sender sends)."""


def _ring(group: Sequence[int]) -> Iterable[_Share]:
    return ((here, there, 1.0) for here, there in pairwise((*group, group[0])))


def _direct(group: Sequence[int]) -> Iterable[_Share]:
    share = 1 / (len(group) - 1)
    return ((here, there, share) for here in group for there in group if here != there)


def _leaving(shares: Iterable[_Share], hosts: Sequence[str]) -> dict[str, float]:
    """Bytes that leave each host for each byte that a rank sends."""
    found: dict[str, float] = {}
    for here, there, share in shares:
        if hosts[here] != hosts[there]:
            found[hosts[here]] = found.get(hosts[here], 0.0) + share
    return found


def _hop(lines: Sequence[Sequence[int]], ends: tuple[int, int], hosts: Sequence[str], links: HostLinks) -> LinkSpeed:
    flows = [(line[ends[0]], line[ends[1]], 1.0) for line in lines]
    if leaving := _leaving(flows, hosts):
        return LinkSpeed(links.between.latency, min(links.within.rate, links.between.rate / max(leaving.values())))
    return links.within
