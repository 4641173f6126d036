"""The figures of a schedule that people compare, and a timeline together with what its numbers are."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from engine.parallel.pipeline.check import Cost, Timeline, peak_live
from engine.parallel.pipeline.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Summary:
    """What one step of a schedule needs. A *slice* is a rank's share of the model if all ranks have equal ones."""

    stages: int
    bubble: float
    """Share of the ranks' time that is idle."""
    makespan: float
    """From the first start to the last end, in the unit of the costs."""
    peak_slices: tuple[Fraction, ...]
    """Most activations that each rank holds at once, in those of one slice for one microbatch."""
    messages: tuple[int, ...]
    """Activations and gradients that each rank sends to others."""
    splits: bool
    """Whether backwards are split into input and weight."""

    @property
    def peak(self) -> Fraction:
        """Of the rank that holds most."""
        return max(self.peak_slices)


def summarize(timeline: Timeline) -> Summary:
    """The figures of a timeline, simulated or measured."""
    schedule = timeline.schedule
    rank_of = schedule.rank_of_stage
    sends = Counter(rank_of[action.stage] for row in schedule.per_rank for action in row if schedule.sends(action))
    ranks = len(schedule.per_rank)
    return Summary(
        stages=schedule.stages,
        bubble=timeline.bubble,
        makespan=timeline.makespan,
        peak_slices=tuple(Fraction(live * ranks, schedule.stages) for live in peak_live(schedule)),
        messages=tuple(sends[rank] for rank in range(ranks)),
        splits=schedule.splits,
    )


def cost_of_slices(schedule: Schedule, whole: Cost) -> Cost:
    """``whole`` says how long a rank takes for its whole slice; a stage takes its part of that.

    So the times of schedules with one and with several stages a rank can be compared. A transfer stays as long.
    """
    ranks = len(schedule.per_rank)
    share = (ranks / schedule.stages,) * schedule.stages if schedule.stages != ranks else ()
    return Cost(
        whole.forward, whole.backward, whole.backward_input, whole.backward_weight, whole.transfer, share
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Panel:
    """A timeline to be shown. Several, such as predicted and measured, are shown one above the other."""

    timeline: Timeline
    """Its step begins at 0."""
    title: str = ""
    """What it is besides the name of its schedule: predicted, measured."""
    seconds: bool = False
    """Its times are seconds, as measured; otherwise of any unit."""

    def headline(self) -> str:
        """Its name and figures in one line."""
        schedule, figures = self.timeline.schedule, summarize(self.timeline)
        ranks, each = len(schedule.per_rank), schedule.stages / len(schedule.per_rank)
        size = f"{_count(ranks, 'rank')}{f' x {each:g} stages' if each != 1 else ''}"
        parts = [
            size, _count(schedule.microbatches, "microbatch"),
            f"{figures.bubble:.1%} idle", f"at most {slices(figures.peak)} held", self.duration(figures.makespan),
        ]  # fmt: skip
        return ", ".join(filter(None, [schedule.name, self.title])) + ": " + ", ".join(filter(None, parts))

    def duration(self, time: float) -> str:
        """A time in words; empty where its unit is not known."""
        if not self.seconds:
            return ""
        unit, factor = next((pair for pair in (("s", 1.0), ("ms", 1e3)) if time * pair[1] >= 1), ("us", 1e6))
        return f"{time * factor:.3g} {unit}" if time * factor < 100 else f"{time * factor:.0f} {unit}"


def end_of(panel: Panel, panels: Sequence[Panel]) -> float:
    """When the last of the panels ends whose times have the unit of ``panel``; they are shown on one scale."""
    return max(other.timeline.makespan for other in panels if other.seconds == panel.seconds)


def slices(count: Fraction) -> str:
    """``4 slices``, ``2.5 slices``."""
    return f"{number(count)} slice{'s' * (count != 1)}"


def number(count: Fraction) -> str:
    """With at most two decimals: ``4``, ``2.5``."""
    return f"{float(count):.2f}".rstrip("0").rstrip(".")


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}{('es' if noun.endswith('ch') else 's') * (count != 1)}"
