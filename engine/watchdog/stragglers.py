"""Who is slow: ranks that compute longer for a step than others that do the same work.

    in a step     |------ computation ------|-- waits for others --|
    rank 0        0.12 s                     0.21 s
    rank 1        0.31 s                     0.02 s                     slow: all others wait for it

The ranks of one pipeline stage do the same work, so each is compared with the median of the others of its stage.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median

from engine.watchdog.view import RankView

_WORTH_A_NAME = 1e-3
"""Seconds a step by which a rank has to be slower than others: the clock of less is that of the scheduler's slices."""


@dataclass(frozen=True, slots=True)
class _Spent:
    """Seconds of a rank up to some step."""

    steps: int
    computed: float
    waited: float

    @classmethod
    def of(cls, view: RankView) -> "_Spent":
        waited = sum(view.waits.values())
        return cls(view.step, max(0.0, view.in_steps - waited), waited)


@dataclass(slots=True)
class Stragglers:
    """Names a rank once, after ``steps`` steps in which it took ``factor`` times what others took."""

    factor: float
    steps: int
    _began: dict[int, _Spent] = field(default_factory=dict)
    _named: set[int] = field(default_factory=set)

    def look(self, views: Mapping[int, RankView], size: int) -> list[str]:
        """Sentences about ranks that have become slow; views of all ranks are needed."""
        if len(views) < size or any(not view.runs or view.phase == "ENDED" for view in views.values()):
            return []
        now = {rank: _Spent.of(view) for rank, view in views.items()}
        if not self._began:
            self._began = now
        if min(now[rank].steps - self._began[rank].steps for rank in now) < self.steps:
            return []
        began, self._began = self._began, now
        per_step = {
            rank: (spent.computed - began[rank].computed) / (spent.steps - began[rank].steps)
            for rank, spent in now.items()
        }
        slow = [rank for rank in self._slow(per_step, views.values()) if rank not in self._named]
        self._named.update(slow)
        return [self._sentence(views[rank], per_step, views.values(), began[rank], now[rank]) for rank in slow]

    def _slow(self, per_step: Mapping[int, float], views: Iterable[RankView]) -> list[int]:
        stages = {view.rank: view.stage for view in views}
        return [
            rank
            for rank in per_step
            if per_step[rank] - _others(rank, per_step, stages) > _WORTH_A_NAME
            and per_step[rank] > self.factor * _others(rank, per_step, stages)
        ]

    def _sentence(
        self, view: RankView, per_step: Mapping[int, float], views: Iterable[RankView], began: _Spent, now: _Spent
    ) -> str:
        usual = _others(view.rank, per_step, {each.rank: each.stage for each in views})
        steps = now.steps - began.steps
        waits = (now.waited - began.waited) / steps
        return (
            f"{view.name} is slow: it computed {1e3 * per_step[view.rank]:.0f} ms a step over the last {steps} steps, "
            f"where others of its stage took {1e3 * usual:.0f} ms, and waited {1e3 * waits:.0f} ms."
        )


def _others(rank: int, per_step: Mapping[int, float], stages: Mapping[int, int]) -> float:
    """The median over other ranks of the same stage; infinite where a rank has its stage alone."""
    found = [taken for other, taken in per_step.items() if other != rank and stages[other] == stages[rank]]
    return median(found) if found else float("inf")
