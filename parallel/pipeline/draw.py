"""A timeline as text: one row a rank, time from left to right.

    1f1b
    rank 0 |F0 F1  .  . B0 B0 F2 B1 B1  . B2 B2
    rank 1 | . F0 B0 B0 F1 B1 B1 F2 B2 B2  .  .

Where ranks have several stages, cells are tokens with the stage, ``2F5``; too wide for that, capitals are the first
stage of a rank and small letters its later ones, ``f5``. Too wide for that, too, it keeps one letter of each cell;
wider still, a letter stands for several cells and shows what most of that time is spent on, so that the phases remain.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from math import ceil
from statistics import median

from engine.parallel.pipeline.check import Span, Timeline
from engine.parallel.pipeline.schedule import Action
from engine.parallel.pipeline.summary import Panel, end_of

IDLE = "."
_ROUNDING = 1e-9
"""Sums of float costs may end a little past a cell."""

Label = Callable[[Action], str]


def draw(timeline: Timeline, width: int = 120) -> str:
    """The picture, in at most ``width`` columns where the names of ranks leave room; no newline at its end.

    A cell is as long as the shortest action.
    """
    return draw_panels((Panel(timeline),), width)


def draw_panels(panels: Sequence[Panel], width: int = 120) -> str:
    """Several timelines one above the other; those of one unit share a scale, the longest takes all columns.

    So two kinds of schedule can be compared, and a measured step in seconds lies under the predicted one: where
    both have the same shape they look the same. The first panel says how long a cell is.
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
    """Of the longest panels, in cells: the shortest action of the first panel."""
    merged: int
    """Cells in a column."""
    wide: int
    """Characters of a column, blanks between columns not counted; 1: there are no blanks."""
    label: Callable[[Timeline], Label]


def _layout(panels: Sequence[Panel], room: int) -> _Layout:
    """The most telling labels for which there is room."""
    length = end_of(panels[0], panels) / _shortest(panels[0])
    cells = ceil(length - _ROUNDING)
    for label in (_token, _small):
        wide = max(map(len, _texts(panels, label)))
        if cells * (wide + 1) - 1 <= room:
            return _Layout(length, 1, wide, label)
    return _Layout(length, ceil(cells / room), 1, _letter)


def _texts(panels: Sequence[Panel], label: Callable[[Timeline], Label]) -> Iterator[str]:
    for timeline in (panel.timeline for panel in panels):
        yield from map(label(timeline), chain.from_iterable(timeline.schedule.per_rank))


def _shortest(panel: Panel) -> float:
    """The time of the shortest action; of the shortest kind of action where each took a little more or less."""
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


def _several(timeline: Timeline) -> bool:
    return any(len(stages) > 1 for stages in timeline.schedule.stages_of_rank)


def _token(timeline: Timeline) -> Label:
    """Without the stage where each rank has one."""
    return str if _several(timeline) else _small(timeline)


def _small(timeline: Timeline) -> Label:
    letter = _letter(timeline)
    return lambda action: f"{letter(action)}{action.microbatch}"


def _letter(timeline: Timeline) -> Label:
    first = {min(stages) for stages in timeline.schedule.stages_of_rank if stages}
    return lambda action: action.op.value if action.stage in first else action.op.value.lower()


def _row(spans: Sequence[Span], cell: float, cells: int, label: Label) -> list[str]:
    """The label on which most of each cell is spent; the earliest of equals."""
    shares: list[dict[str, float]] = [{} for _ in range(cells)]
    for span in spans:
        text = label(span.action)
        for index in range(int(span.start / cell), min(ceil(span.end / cell), cells)):
            overlap = min(span.end, (index + 1) * cell) - max(span.start, index * cell)
            shares[index][text] = shares[index].get(text, 0) + overlap
    for share in shares:
        share[IDLE] = cell - sum(share.values())
    return [max(share, key=share.__getitem__) for share in shares]
