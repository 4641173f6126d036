"""Figures for the comparison of schedules, and timelines as text.

One row per rank, time from left to right:

    1f1b
    rank 0 |F0 F1  .  . B0 B0 F2 B1 B1  . B2 B2
    rank 1 | . F0 B0 B0 F1 B1 B1 F2 B2 B2  .  .

If ranks have several stages, cells are tokens with the stage, ``2F5``. In less room, capitals denote the first stage of
a rank and small letters later stages, ``f5``; then each cell is one letter; at last one letter shows the longest
operation of several cells, so that the phases stay visible.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain
from math import ceil
from statistics import median

from engine.parallel.pipeline.schedule.actions import Action, Schedule
from engine.parallel.pipeline.schedule.simulate import Cost, Span, StepTimeline, peak_live


@dataclass(frozen=True, slots=True)
class Summary:
    """Bubble, makespan, memory and messages of one step of a schedule.

    A slice, the unit of memory, is the activations of one microbatch in one rank's share of an evenly divided model.
    """

    stages: int
    bubble: float
    """Idle fraction of the ranks' time, 0 to 1."""
    makespan: float
    """Time from the first start to the last end, in the unit of the costs."""
    peak_slices: tuple[Fraction, ...]
    """Peak of live activations on each rank, in units of one slice for one microbatch."""
    messages: tuple[int, ...]
    """Number of activations and gradients that each rank sends to other ranks per step."""
    splits: bool
    """True if backwards are split into input and weight gradients."""

    @property
    def peak(self) -> Fraction:
        """Peak of activations on the fullest rank, in units of one microbatch's activations in a rank's share."""
        return max(self.peak_slices)


def summarize(timeline: StepTimeline) -> Summary:
    """Computes the figures of ``timeline``, a simulated or measured step: idle share, duration, memory and messages."""
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
    """Converts ``whole``, the times of a rank's share of the model, to the times of one stage of ``schedule``.

    The time of a transfer is unchanged.
    """
    return whole.shared(len(schedule.per_rank), schedule.stages)


@dataclass(frozen=True, slots=True)
class Panel:
    """Timeline to draw. Several panels, such as predicted and measured, are drawn one above the other."""

    timeline: StepTimeline
    """The timeline; the step starts at 0."""
    title: str = ""
    """Suffix to the name of the schedule, such as "predicted" or "measured"."""
    seconds: bool = False
    """True if times are measured seconds; otherwise they have any unit."""

    def headline(self) -> str:
        """Returns one line of text about the timeline: name, sizes, idle share, peak of live activations, duration."""
        schedule, figures = self.timeline.schedule, summarize(self.timeline)
        ranks, each = len(schedule.per_rank), schedule.stages / len(schedule.per_rank)
        size = f"{_count(ranks, 'rank')}{f' x {each:g} stages' if each != 1 else ''}"
        parts = [
            size, _count(schedule.microbatches, "microbatch"),
            f"{figures.bubble:.1%} idle", f"at most {slices(figures.peak)} held", self.duration(figures.makespan),
        ]  # fmt: skip
        return ", ".join(filter(None, [schedule.name, self.title])) + ": " + ", ".join(filter(None, parts))

    def duration(self, time: float) -> str:
        """Formats ``time`` with its unit, such as ``12.5 ms``; '' unless the panel is in seconds."""
        if not self.seconds:
            return ""
        unit, factor = next((pair for pair in (("s", 1.0), ("ms", 1e3)) if time * pair[1] >= 1), ("us", 1e6))
        return f"{time * factor:.3g} {unit}" if time * factor < 100 else f"{time * factor:.0f} {unit}"


def end_of(panel: Panel, panels: Sequence[Panel]) -> float:
    """Returns the latest end of the timelines in ``panels`` with the same unit of time as ``panel``."""
    return max(other.timeline.makespan for other in panels if other.seconds == panel.seconds)


def slices(count: Fraction) -> str:
    """Formats a number of slices, such as ``4 slices``; a slice is one rank's share of an evenly divided model."""
    return f"{number(count)} slice{'s' * (count != 1)}"


def number(count: Fraction) -> str:
    """Formats a number with at most two decimals: ``4``, ``2.5``."""
    return f"{float(count):.2f}".rstrip("0").rstrip(".")


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}{('es' if noun.endswith('ch') else 's') * (count != 1)}"


IDLE = "."
_ROUNDING = 1e-9
"""Tolerance in cells, because sums of float costs may end slightly after a cell."""

Label = Callable[[Action], str]


def draw(timeline: StepTimeline, width: int = 120) -> str:
    """Draws a timeline as text: a title, then one row per rank of at most ``width`` columns, time from left to right.

    Rows are wider if the names of ranks leave no room.
    """
    return draw_panels((Panel(timeline),), width)


def draw_panels(panels: Sequence[Panel], width: int = 120) -> str:
    """Draws several timelines as text, one above the other: a title, then rows of at most ``width`` columns.

    Timelines in the same unit of time have the same scale.
    """
    names = [f"rank {rank}" for rank in range(max(len(panel.timeline.spans) for panel in panels))]
    margin = max(map(len, names))
    room = max(width - margin - 2, 1)
    layout = _layout(panels, room)
    pictures = []
    for panel in panels:
        cell = end_of(panel, panels) / layout.length if layout.length else 1
        rows = [f"{name:{margin}} |{row}" for name, row in zip(names, _rows(panel, layout, cell), strict=False)]
        pictures.append("\n".join([_title(panel, layout, cell), *rows]))
    return "\n\n".join(pictures)


@dataclass(frozen=True, slots=True)
class _Layout:
    length: float
    """Length of the longest panels in cells, which are as long as the shortest action of the first panel."""
    merged: int
    """Cells in a column."""
    wide: int
    """Characters of a column without the blank between columns; 1: there are no blanks."""
    label: Callable[[StepTimeline], Label]


def _layout(panels: Sequence[Panel], room: int) -> _Layout:
    """Returns the layout with the most detailed labels that fit."""
    length = end_of(panels[0], panels) / _shortest(panels[0])
    cells = ceil(length - _ROUNDING)
    for label in (_token, _small):
        wide = max(map(len, _texts(panels, label)))
        if cells * (wide + 1) - 1 <= room:
            return _Layout(length, 1, wide, label)
    return _Layout(length, ceil(cells / room), 1, _letter)


def _texts(panels: Sequence[Panel], label: Callable[[StepTimeline], Label]) -> Iterator[str]:
    for timeline in (panel.timeline for panel in panels):
        yield from map(label(timeline), chain.from_iterable(timeline.schedule.per_rank))


def _shortest(panel: Panel) -> float:
    """Returns the time of the shortest action; if measured, the median time of the shortest kind of action."""
    times: dict[str, list[float]] = {}
    for span in (span for row in panel.timeline.spans for span in row if span.end > span.start):
        times.setdefault(span.action.op, []).append(span.end - span.start)
    typical: Callable[[list[float]], float] = median if panel.seconds else min
    return min(map(typical, times.values()), default=1)


def _title(panel: Panel, layout: _Layout, cell: float) -> str:
    parts = [panel.headline() if panel.title else panel.timeline.schedule.name]
    if layout.label is not _token and _several(panel.timeline):
        parts.append("small letters are later stages of a rank")
    if panel.seconds:
        parts.append(f"a {'letter' if layout.wide == 1 else 'cell'} is {panel.duration(cell * layout.merged)}")
    elif layout.wide == 1:
        parts.append(f"a letter is the time of {'one cell' if layout.merged == 1 else f'{layout.merged} cells'}")
    return ", ".join(parts)


def _rows(panel: Panel, layout: _Layout, cell: float) -> list[str]:
    column = cell * layout.merged
    columns, label = ceil(panel.timeline.makespan / column - _ROUNDING), layout.label(panel.timeline)
    rows = [_row(spans, column, columns, label) for spans in panel.timeline.spans]
    blank = " " if layout.wide > 1 else ""
    return [blank.join(text.rjust(layout.wide) for text in row) for row in rows]


def _several(timeline: StepTimeline) -> bool:
    return any(len(stages) > 1 for stages in timeline.schedule.stages_of_rank)


def _token(timeline: StepTimeline) -> Label:
    """Returns tokens as labels, without the stage if each rank has one."""
    return str if _several(timeline) else _small(timeline)


def _small(timeline: StepTimeline) -> Label:
    letter = _letter(timeline)
    return lambda action: f"{letter(action)}{action.microbatch}"


def _letter(timeline: StepTimeline) -> Label:
    first = {min(stages) for stages in timeline.schedule.stages_of_rank if stages}
    return lambda action: action.op.value if action.stage in first else action.op.value.lower()


def _row(spans: Sequence[Span], cell: float, cells: int, label: Label) -> list[str]:
    """Returns the label with the largest share of each cell; the earliest of equal ones."""
    shares: list[dict[str, float]] = [{} for _ in range(cells)]
    for span in spans:
        text = label(span.action)
        for index in range(int(span.start / cell), min(ceil(span.end / cell), cells)):
            overlap = min(span.end, (index + 1) * cell) - max(span.start, index * cell)
            shares[index][text] = shares[index].get(text, 0) + overlap
    for share in shares:
        share[IDLE] = cell - sum(share.values())
    return [max(share, key=share.__getitem__) for share in shares]
