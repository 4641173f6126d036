"""A timeline as text: one row a rank, time from left to right.

    1f1b
    rank 0 |F0 F1  .  . B0 B0 F2 B1 B1  . B2 B2
    rank 1 | . F0 B0 B0 F1 B1 B1 F2 B2 B2  .  .

Too wide for that, it keeps one letter of each cell; wider still, a letter stands for several cells and shows
what most of that time is spent on, so that the phases remain.
"""

from collections.abc import Callable, Sequence
from math import ceil

from engine.parallel.pipeline.check import Span, Timeline
from engine.parallel.pipeline.schedule import Action

IDLE = "."
_ROUNDING = 1e-9
"""Sums of float costs may end a little past a cell."""


def draw(timeline: Timeline, width: int = 120) -> str:
    """The picture, in at most ``width`` columns where the names of ranks leave room; no newline at its end.

    A cell is as long as the shortest action.
    """
    schedule = timeline.schedule
    names = [f"rank {rank}" for rank in range(len(schedule.per_rank))]
    margin = max(map(len, names))
    room = max(width - margin - 2, 1)
    cell = min((span.end - span.start for row in timeline.spans for span in row if span.end > span.start), default=1)
    cells = ceil(timeline.makespan / cell - _ROUNDING)
    several = any(len(stages) > 1 for stages in schedule.stages_of_rank)
    label: Callable[[Action], str] = str if several else _without_stage
    wide = max(len(label(action)) for row in schedule.per_rank for action in row)

    title = schedule.name
    if cells * (wide + 1) - 1 <= room:
        rows = [" ".join(text.rjust(wide) for text in _row(spans, cell, cells, label)) for spans in timeline.spans]
    else:
        merged = ceil(cells / room)
        title += ", a letter is the time of " + ("one cell" if merged == 1 else f"{merged} cells")
        rows = ["".join(_row(spans, cell * merged, ceil(cells / merged), _letter)) for spans in timeline.spans]
    return "\n".join([title, *(f"{name:{margin}} |{row}" for name, row in zip(names, rows, strict=True))])


def _without_stage(action: Action) -> str:
    return f"{action.op}{action.microbatch}"


def _letter(action: Action) -> str:
    return action.op.value


def _row(spans: Sequence[Span], cell: float, cells: int, label: Callable[[Action], str]) -> list[str]:
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
