"""What a rank sends in a step, beside what its plan says."""

from collections.abc import Callable, Iterable
from typing import Any

from engine.engine import Engine


def traffic_differs(eng: Engine, batch_of: Callable[[Engine, int], Any], steps: Iterable[int]) -> list[str]:
    """A line for each of ``steps`` whose calls and bytes, by axis and label, are not the plan's, or not the report's.

    The search for parameters that nobody uses, in a first step, is no part of the plan.
    """
    wrong = []
    for step in steps:
        before = eng.sent
        report = eng.train_batch(batch_of(eng, step))
        rows = eng.sent.since(before).rows()
        found = {(row.axis, row.label): (row.calls, row.bytes) for row in rows if row.label != "used"}
        planned = {(row.axis, row.label): (row.calls, row.bytes) for row in eng.plan.rank(eng.grid.rank).traffic}
        if found != planned or report.bytes_sent != sum(row.bytes for row in rows):
            wrong.append(f"step {step}: found {found}, planned {planned}")
    return wrong
