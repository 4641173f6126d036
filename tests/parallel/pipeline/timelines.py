"""Timelines for tests of pictures."""

from engine.parallel.pipeline.schedule.schedule_file import parse_schedule
from engine.parallel.pipeline.schedule.simulate import Span, StepTimeline

V_SHAPE = parse_schedule("0F0 3F0 3I0 3W0 0I0 0W0\n1F0 2F0 2I0 1I0 2W0 1W0", "v")
"""Two ranks with two stages each, the first and the last on one rank, backwards split."""


def measured(predicted: StepTimeline, unit: float = 1e-3, late: float = 0.1) -> StepTimeline:
    """The same in seconds, where each action begins a little later."""
    rows = [
        [Span(span.action, (span.start + late) * unit, span.end * unit) for span in row] for row in predicted.spans
    ]  # fmt: skip
    return StepTimeline(predicted.schedule, tuple(map(tuple, rows)))
