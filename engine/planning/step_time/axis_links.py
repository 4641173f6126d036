"""How fast the axes of a grid are, from where its ranks sit and what carries their messages. Pure arithmetic.

    host 0   rank 0 --- rank 1        within a host: NVLink
                |          |
             ===+====++====+===       one way out of a host, which all of its ranks share
                     ||
    host 1   rank 2 --- rank 3

What a rank can send over an axis is the rate of its host divided by what leaves the host for each byte that one rank
sends, all groups of the axis at once:

    collective    a ring: a rank sends to the next one alone, so a group of neighbours leaves a host once
    hop           a pipeline rank sends to the next one; every data and tensor coordinate does so at the same time

A call takes the latency of its longest chain of messages: 2 (N-1) for an all-reduce in a ring of N, N-1 for others.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from engine.errors import GridError
from engine.parallel.grid import Axis, Grid
from engine.planning.cost_model.links import LinkSpeed

Pattern = Literal["all_reduce", "all_gather"]
"""All-gathers stand for reduce-scatters and exchanges too: once around the ring."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLinks:
    """What carries the messages of a cluster, measured once for all grids."""

    within: LinkSpeed
    """From a rank to another one of its host; the rate is that of each rank while all of them send."""
    between: LinkSpeed
    """From a host to others; the rate is that of the host, and its ranks share it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisLinks:
    """The links of one grid."""

    collectives: Mapping[tuple[Axis, Pattern], LinkSpeed]
    """By axis, for axes of several ranks: seconds of a call, bytes a second of a rank."""
    hops: Mapping[tuple[int, int], LinkSpeed]
    """Between two pipeline ranks."""


def place_axes(grid: Grid, hosts: Sequence[str], links: HostLinks) -> AxisLinks:
    """The links of ``grid`` where rank r runs on ``hosts[r]``.

    Raises:
        GridError: there are more or fewer hosts than ranks.
    """
    if len(hosts) != grid.world_size:
        raise GridError(f"{len(hosts)} ranks have a host, and the grid has {grid.world_size}; give one host for each.")
    axes: tuple[Axis, ...] = ("tp", "dp", *grid.data_axes, "replica", "world")
    lines = list(grid.groups("pp"))
    patterns: tuple[Pattern, ...] = ("all_reduce", "all_gather")
    return AxisLinks(
        collectives={
            (axis, pattern): _collective(list(grid.groups(axis)), pattern, hosts, links)
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
    )


def _collective(groups: Sequence[Sequence[int]], pattern: Pattern, hosts: Sequence[str], links: HostLinks) -> LinkSpeed:
    steps = (2 if pattern == "all_reduce" else 1) * (len(groups[0]) - 1)
    leaving = _leaving((pair for group in groups for pair in pairwise((*group, group[0]))), hosts)
    if not leaving:
        return LinkSpeed(steps * links.within.latency, links.within.rate)
    rate = min(links.within.rate, links.between.rate / max(leaving.values()))
    return LinkSpeed(steps * links.between.latency, rate)


def _leaving(flows: Iterable[tuple[int, int]], hosts: Sequence[str]) -> dict[str, int]:
    """Bytes that leave each host for each byte that a rank sends, from (sender, receiver) of all messages."""
    found: dict[str, int] = {}
    for here, there in flows:
        if hosts[here] != hosts[there]:
            found[hosts[here]] = found.get(hosts[here], 0) + 1
    return found


def _hop(lines: Sequence[Sequence[int]], ends: tuple[int, int], hosts: Sequence[str], links: HostLinks) -> LinkSpeed:
    if leaving := _leaving([(line[ends[0]], line[ends[1]]) for line in lines], hosts):
        return LinkSpeed(links.between.latency, min(links.within.rate, links.between.rate / max(leaving.values())))
    return links.within
