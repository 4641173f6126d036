"""Stragglers: ranks that compute longer than others of their pipeline stage, and slow links.

    in a step     |------ computation ------|-- waits for others --|
    rank 0        0.12 s                     0.21 s
    rank 1        0.31 s                     0.02 s                     slow: all others wait for it

Each rank is compared with the median of the others of its stage. A link is slow if its ranks wait longer than others
although all of them have arrived.

    in a step   |---- computation ----|-- wait --|
    rank 0      0.12 s                 0.31 s         dp between node0 and node1
    rank 1      0.35 s                 0.08 s         arrives last, so it waits only for the network

The last rank in a collective waits for no other, so the shortest wait of a group is the time of the transfer. From the
wait of a receiver, the sender's excess computation is subtracted.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from engine.parallel.comm.rendezvous import name_ranks
from engine.watchdog.view import RankView

_WORTH_A_LINK = 1e-3
"""Seconds a step by which a transfer must exceed others to be reported."""
_SHARE_OF_STEP = 0.1
"""Share of a step by which a transfer must exceed others to be reported."""


class StreamGroup(NamedTuple):
    """Global ranks that exchange data in one stream, with the stream's axis (such as "dp") and name.

    A stream is the sequence of collectives of a group, or of messages from one rank to another.
    """

    axis: str
    stream: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Seconds per training step between two looks at the ranks: computation of each, and transfers of each link."""

    views: Mapping[int, RankView]
    """Views of all ranks at the end."""
    steps: int
    computed: Mapping[int, float]
    longer: Mapping[int, float]
    """Seconds that each rank computed longer than the others of its stage, at least 0."""
    waited: Mapping[StreamGroup, float]
    """Transfer seconds of each link: the time that all of its ranks waited."""

    @property
    def step_seconds(self) -> float:
        """Time of the slowest rank, in seconds per training step: computation plus transfers with its peer ranks."""
        waits = {rank: 0.0 for rank in self.computed}
        for link, seconds in self.waited.items():
            for rank in link.ranks:
                waits[rank] = waits.get(rank, 0.0) + seconds
        return max(self.computed[rank] + waits[rank] for rank in self.computed)


def transfers(began: Mapping[int, RankView], now: Mapping[int, RankView]) -> dict[StreamGroup, float]:
    """Returns the transfer time of each link in seconds per training step, measured between two samples.

    A link is a group of ranks, or a sender and its receiver. The time is measured as a rank's wait for the link: the
    receiver's wait or, in a group, the shortest wait of all ranks. A group is left out if a rank has no measured wait.

    Args:
        began: state of each rank at the first sample.
        now: state of each rank at the second sample, at least one step later.
    """
    told: dict[StreamGroup, dict[int, float]] = {}
    wanted: dict[StreamGroup, int] = {}
    for rank, view in now.items():
        before = {(one.stream, one.runs, one.receives): one for one in began[rank].streams}
        for one in view.streams:
            old = before.get((one.stream, one.runs, one.receives))
            spent = (one.seconds - (old.seconds if old else 0.0)) / (view.step - began[rank].step)
            if one.receives or not _is_message(one.stream):
                link = StreamGroup(one.axis, one.stream, one.ranks)
                told.setdefault(link, {})[rank] = spent
                wanted[link] = 1 if one.receives else len(one.ranks)
    return {link: min(spent.values()) for link, spent in told.items() if len(spent) == wanted[link]}


def _is_message(stream: str) -> bool:
    return ">" in stream


class SlowLinks:
    """Detector of slow links; a link is a group of ranks with collectives, or a sender and its receiver.

    A link is slow if its transfer time exceeds ``factor`` times its own best time, or ``factor`` times the median time
    of similar links (same stream name, and ranks of the same pipeline stages). The difference must also exceed 1 ms and
    10% of the step time. Each link is reported once.
    """

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._named: set[StreamGroup] = set()
        self._best: dict[StreamGroup, Window] = {}
        """Window with the least time of each link."""

    def look(self, window: Window) -> list[str]:
        """Returns sentences about newly slow links in ``window``, one for each axis with slow links.

        A slow link is left out if another slow link connects fewer ranks, all of which the first link connects too.
        """
        found: dict[StreamGroup, str] = {}
        for link, seconds in window.waited.items():
            if link not in self._named and (usual := self._usual(link, window)) is not None:
                found[link] = f"{1e3 * seconds:.0f} ms a step over the last {window.steps} steps, {usual}"
            if link not in self._best or seconds < self._best[link].waited[link]:
                self._best[link] = window
        self._named.update(found)
        # the calls of a group are slow because of the slow link inside it
        found = {link: words for link, words in found.items() if not any(set(o.ranks) < set(link.ranks) for o in found)}
        axes = dict.fromkeys(link.axis for link in found)
        return [_link_sentence({link: found[link] for link in found if link.axis == axis}, window) for axis in axes]

    def _usual(self, link: StreamGroup, window: Window) -> str | None:
        """Returns words about the usual time of a slow link; None if it is not slow.

        Other links that have become slow too, such as those between the same two nodes, are not compared.
        """
        seconds = window.waited[link] - _explained(link, window)
        alike = [other for other in window.waited if other != link and _alike(link, other, window)]
        others = [window.waited[one] for one in alike if not self._has_slowed(one, window.waited[one], window)]
        if others and self._exceeds(seconds, median(others), window):
            return f"where others of its kind took {1e3 * median(others):.0f} ms"
        if self._has_slowed(link, seconds, window):
            return f"where it took {1e3 * self._best[link].waited[link]:.0f} ms before"
        return None

    def _has_slowed(self, link: StreamGroup, seconds: float, window: Window) -> bool:
        """Returns True if ``seconds`` exceeds the link's time in its best window."""
        if (best := self._best.get(link)) is None:
            return False
        slower = max(window.computed[rank] / max(best.computed[rank], 1e-9) for rank in link.ranks)
        usual = best.waited[link] * max(1.0, slower)  # a machine that is slower overall is no slow link
        return self._exceeds(seconds, usual, window)

    def _exceeds(self, seconds: float, usual: float, window: Window) -> bool:
        least = max(_WORTH_A_LINK, _SHARE_OF_STEP * window.step_seconds)
        return seconds > self._factor * usual and seconds - usual > least


def _explained(link: StreamGroup, window: Window) -> float:
    """Returns the seconds a step for which receivers of this message wait for a slow rank before them."""
    if not _is_message(link.stream):
        return 0.0
    return max(window.longer.values(), default=0.0)


def _alike(link: StreamGroup, other: StreamGroup, window: Window) -> bool:
    """Returns True if two groups make the same calls: the same stream, of the same stages."""
    return link.stream == other.stream and _stages(link, window.views) == _stages(other, window.views)


def _stages(link: StreamGroup, views: Mapping[int, RankView]) -> frozenset[int]:
    return frozenset(views[rank].stage for rank in link.ranks)


def _link_sentence(slow: Mapping[StreamGroup, str], window: Window) -> str:
    """Returns a sentence about the slowest link of an axis, and the number of others."""
    worst = max(slow, key=lambda link: window.waited[link])
    hosts = _hosts(worst.ranks, window.views)
    where = f"link between {' and '.join(hosts)}" if len(hosts) == 2 else f"network between {', '.join(hosts)}"
    where = where if len(hosts) > 1 else f"link within {hosts[0]}"
    others = [link for link in slow if link != worst]
    more = f"; {len(others)} more of this axis {'are' if len(others) > 1 else 'is'} slow" if others else ""
    common = set(hosts).intersection(*(_hosts(link.ranks, window.views) for link in others)) if others else set()
    shared = f", all with {common.pop()}" if len(common) == 1 and len(hosts) > 1 else ""
    return (
        f"the {where} is slow: {worst.axis} over {name_ranks(worst.ranks)} ({worst.stream!r}) waited "
        f"{slow[worst]}, with all ranks in the call{more}{shared}."
    )


def _hosts(ranks: Iterable[int], views: Mapping[int, RankView]) -> list[str]:
    return list(dict.fromkeys(views[rank].host for rank in ranks))


_WORTH_A_NAME = 1e-3
"""Seconds a step by which a rank must be slower than others; shorter times are noise of the scheduler."""


@dataclass(slots=True)
class Stragglers:
    """Detector of slow ranks and slow links, over windows of at least ``steps`` training steps.

    A rank is slow if it computes more than ``factor`` times as long as the median of its pipeline stage's other ranks,
    and over 1 ms longer per step. Each rank and link is reported once.
    """

    factor: float
    steps: int
    links: SlowLinks = field(init=False)
    window: Window | None = None
    """Most recent measurement of all ranks."""
    _began: dict[int, RankView] = field(default_factory=dict)
    _named: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.links = SlowLinks(self.factor)

    def look(self, views: Mapping[int, RankView], size: int) -> list[str]:
        """Returns a sentence for each newly slow rank, and for each axis with newly slow links.

        The list is empty within ``steps`` steps of the last comparison, or if a rank is missing, has ended, or has
        closed its engine.

        Args:
            views: current state of each rank, by global rank.
            size: number of ranks of the job.
        """
        if len(views) < size or any(not view.runs or view.phase == "ENDED" for view in views.values()):
            return []
        if not self._began:
            self._began = dict(views)
        if min(view.step - self._began[rank].step for rank, view in views.items()) < self.steps:
            return []
        began, self._began = self._began, dict(views)
        self.window = window = _window(began, views)
        slow = [rank for rank in window.computed if self._is_slow(rank, window) and rank not in self._named]
        self._named.update(slow)
        return [*(_sentence(rank, began[rank], window) for rank in slow), *self.links.look(window)]

    def _is_slow(self, rank: int, window: Window) -> bool:
        usual = window.computed[rank] - window.longer[rank]
        return window.longer[rank] > _WORTH_A_NAME and window.computed[rank] > self.factor * usual


def _window(began: Mapping[int, RankView], now: Mapping[int, RankView]) -> Window:
    computed = {
        rank: max(0.0, _computed(view) - _computed(began[rank])) / (view.step - began[rank].step)
        for rank, view in now.items()
    }
    stages = {rank: view.stage for rank, view in now.items()}
    return Window(
        views=dict(now),
        steps=min(view.step - began[rank].step for rank, view in now.items()),
        computed=computed,
        longer={rank: max(0.0, taken - _usual(rank, computed, stages)) for rank, taken in computed.items()},
        waited=transfers(began, now),
    )


def _computed(view: RankView) -> float:
    return max(0.0, view.in_steps - sum(view.waits.values()))


def _usual(rank: int, computed: Mapping[int, float], stages: Mapping[int, int]) -> float:
    """Returns the median over other ranks of the same stage; the rank's own time if it is alone."""
    found = [taken for other, taken in computed.items() if other != rank and stages[other] == stages[rank]]
    return median(found) if found else computed[rank]


def _sentence(rank: int, began: RankView, window: Window) -> str:
    view = window.views[rank]
    steps = view.step - began.step
    waits = (sum(view.waits.values()) - sum(began.waits.values())) / steps
    usual = window.computed[rank] - window.longer[rank]
    return (
        f"{view.name} is slow: it computed {1e3 * window.computed[rank]:.0f} ms a step over the last {steps} steps, "
        f"where others of its stage took {1e3 * usual:.0f} ms, and waited {1e3 * waits:.0f} ms."
    )
