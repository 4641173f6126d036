"""Who is slow: ranks that compute longer for a step than others that do the same work.

    in a step     |------ computation ------|-- waits for others --|
    rank 0        0.12 s                     0.21 s
    rank 1        0.31 s                     0.02 s                     slow: all others wait for it

The ranks of one pipeline stage do the same work, so each is compared with the median of the others of its stage.

A slow rank makes others wait, and so does a slow link (:mod:`engine.watchdog.slow_links`): computation and waits are
kept apart.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from engine.watchdog.slow_links import SlowLinks, Window, transfers
from engine.watchdog.view import RankView

_WORTH_A_NAME = 1e-3
"""Seconds a step by which a rank has to be slower than others: the clock of less is that of the scheduler's slices."""


@dataclass(slots=True)
class Stragglers:
    """Names a rank or a link once, after ``steps`` steps in which it took ``factor`` times what others took."""

    factor: float
    steps: int
    links: SlowLinks = field(init=False)
    window: Window | None = None
    """What was seen last."""
    _began: dict[int, RankView] = field(default_factory=dict)
    _named: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.links = SlowLinks(self.factor)

    def look(self, views: Mapping[int, RankView], size: int) -> list[str]:
        """Sentences about ranks and links that have become slow; views of all ranks are needed."""
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
    """The median over other ranks of the same stage; of a rank that has its stage alone, its own time."""
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
