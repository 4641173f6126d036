"""Heat maps as inline SVG: each cell says how far a value is above or below the mean. Colours are those of the page."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from engine.launch.run_report.charts import WIDTH, figure, nice_ticks

_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 6, 4, 22
_LOWEST, _HIGHEST, _ROW = 164, 400, 3.0
"""Heights of the cells together, and the height of a row where there are many."""
BOUNDS: Final = (0.25, 0.5, 0.8, 1.25, 2.0, 4.0)
"""Shares of the mean at which the colour changes; the middle one is even."""
_WORDS: Final = ("under 1/4", "under 1/2", "under 4/5", "even", "over 5/4", "over 2", "over 4")
KEYS: Final = (
    '<p class="keys">times the mean of a layer: '
    + "".join(f'<span class="key m{level}">{word}</span>' for level, word in enumerate(_WORDS))
    + "</p>"
)
"""Legend of all heat maps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatMap:
    """Rows from top to bottom, columns from left to right."""

    title: str
    cells: Sequence[Sequence[float]]
    """Of each row: shares of the mean, 1 is even."""
    rows: Sequence[str]
    """Names of the rows."""
    tips: Sequence[str]
    """A sentence on each row, shown under the mouse."""
    columns: Sequence[float]
    """Ascending numbers of the columns."""
    across: str
    """Name of the columns."""

    def drawn(self, shown: str) -> str:
        """The figure; ``shown`` stands beside its title."""
        height = min(_HIGHEST, max(_LOWEST, _ROW * len(self.cells)))
        high = height / len(self.cells)
        parts = [
            f'<svg viewBox="0 0 {WIDTH} {_TOP + height + _BOTTOM:.0f}" role="img" aria-label="{escape(self.title)}">',
            *self._levels(high),
            *self._tips(high),
            *self._row_names(high),
            *self._column_names(height),
            "</svg>",
        ]
        return figure(self.title, shown, "".join(parts))

    @property
    def _wide(self) -> float:
        return (WIDTH - _LEFT - _RIGHT) / len(self.columns)

    def _levels(self, high: float) -> list[str]:
        """One path for the cells of each colour; neighbours in a row are one rectangle."""
        paths: list[list[str]] = [[] for _ in _WORDS]
        for place, row in enumerate(self.cells):
            levels = [bisect_right(BOUNDS, value) for value in row]
            top, begin = _TOP + place * high, 0
            for column in range(1, len(levels) + 1):
                if column == len(levels) or levels[column] != levels[begin]:
                    left, width = _LEFT + begin * self._wide, (column - begin) * self._wide
                    paths[levels[begin]].append(f"M{left:.1f} {top:.1f}h{width:.1f}v{high:.1f}h-{width:.1f}z")
                    begin = column
        return [f'<path class="m{level}" d="{"".join(path)}"/>' for level, path in enumerate(paths) if path]

    def _tips(self, high: float) -> list[str]:
        width = WIDTH - _LEFT - _RIGHT
        return [
            f'<rect class="tip" x="{_LEFT}" y="{_TOP + place * high:.1f}" width="{width}" height="{high:.1f}">'
            f"<title>{escape(tip)}</title></rect>"
            for place, tip in enumerate(self.tips)
        ]

    def _row_names(self, high: float) -> list[str]:
        every = max(1, math.ceil(14 / high))
        return [
            f'<text class="tick right" x="{_LEFT - 6}" y="{_TOP + (place + 0.5) * high + 4:.1f}">{escape(name)}</text>'
            for place, name in enumerate(self.rows)
            if place % every == 0
        ]

    def _column_names(self, height: float) -> list[str]:
        y = _TOP + height + 15
        lines = [f'<text class="tick right" x="{_LEFT - 6}" y="{y:.0f}">{escape(self.across)}</text>']
        for tick in nice_ticks(self.columns[0], self.columns[-1]):
            if self.columns[0] <= tick <= self.columns[-1] and tick == int(tick):
                x = _LEFT + (bisect_left(self.columns, tick) + 0.5) * self._wide
                lines.append(f'<text class="tick middle" x="{x:.1f}" y="{y:.0f}">{int(tick)}</text>')
        return lines
