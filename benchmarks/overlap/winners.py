"""Rows of ``kernels/overlap.json``, from measurements on several GPUs."""

from collections.abc import Sequence
from typing import Any

from benchmarks.overlap.cases import TILES
from benchmarks.overlap.measure import IN_KERNELS
from benchmarks.overlap.report import Found, fastest
from engine.kernels.overlap import OverlapChoice

MARGIN = 1.02
"""Minimum speedup of a communicating kernel; less is noise."""
OTHER_WAYS = ("chunks", "collectives")
"""Ways of the engine without a communicating kernel."""


def propose_overlap(cases: Sequence[Found], device: str, shipped: Sequence[OverlapChoice]) -> list[OverlapChoice]:
    """Returns the shipped rows, with new ones for ``device`` in place of old ones for the same products."""
    rows = [row for found in cases if (row := _row(found, device)) is not None]
    replaced = {_key(row) for row in rows}
    return [*rows, *(row for row in shipped if _key(row) not in replaced)]


def _row(found: Found, device: str) -> OverlapChoice | None:
    ours, other = fastest(found, IN_KERNELS), fastest(found, OTHER_WAYS)
    if ours is None or other is None or not found.get("passed"):
        return None
    speedup = other[0] / ours[0]
    way: Any = ours[1] if speedup >= MARGIN else other[1]
    tile = tuple(found["tile"])
    return OverlapChoice(
        operation=found["operation"], device=device, dtype=found["dtype"], ranks=found["ranks"],
        rows=found["sizes"]["rows"], columns=found["sizes"]["columns"], depth=found["sizes"]["depth"],
        way=way, speedup=round(speedup, 3), tile=None if tile == TILES[0] else tile,
    )  # fmt: skip


def _key(row: OverlapChoice) -> tuple[object, ...]:
    return row.device, row.ranks, row.operation, row.dtype, row.rows, row.columns, row.depth
