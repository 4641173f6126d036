"""Charts as inline SVG: curves over steps, heat maps, and charts of expert load.

Colours and fonts come from the page.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from statistics import median
from typing import Any, Final, NamedTuple

WIDTH, HEIGHT = 360, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 10, 24
_POINTS = 300
"""Maximal points of a curve; of a longer one, the lowest and highest of each stretch are drawn."""
_TIPS = 80
"""Maximal points of a curve with tooltips."""

Form = Callable[[float], str]
"""Function that formats a number on an axis."""


class Curve(NamedTuple):
    """Named series of (step, value) points for a line chart; the value None interrupts the line."""

    name: str
    points: Sequence[tuple[float, float | None]]

    @property
    def last(self) -> float | None:
        """Newest value of the curve; None if it has no values."""
        return next((y for _, y in reversed(self.points) if y is not None), None)


class _Frame(NamedTuple):
    """Ranges of both axes."""

    left: float
    right: float
    low: float
    high: float

    def x(self, value: float) -> float:
        return _LEFT + (value - self.left) / ((self.right - self.left) or 1) * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - _BOTTOM - (value - self.low) / ((self.high - self.low) or 1) * (HEIGHT - _TOP - _BOTTOM)


def chart(title: str, curves: Sequence[Curve], form: Form, zero: bool = False) -> str:
    """Returns an HTML figure with an SVG line chart of ``curves`` by step.

    Args:
        form: callback that formats a number as text.
        zero: True: the vertical axis includes 0.
    """
    found = [(x, y) for curve in curves for x, y in curve.points if y is not None]
    if not found:
        return figure(title, "", '<p class="empty">no values</p>')
    shown = f"{form(last)}" if len(curves) == 1 and (last := curves[0].last) is not None else ""
    values = [y for _, y in found] + [0.0] * zero
    ticks = nice_ticks(min(values), max(values))
    left, right = min(x for x, _ in found), max(x for x, _ in found)
    frame = _Frame(left, right, min(ticks[0], min(values)), max(ticks[-1], max(values)))
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">',
        *_axes(frame, ticks, form),
        *(line for number, curve in enumerate(curves) for line in _curve(curve, number, frame, form)),
        "</svg>",
    ]
    legend = "".join(f'<span class="key k{n % 6}">{escape(c.name)}</span>' for n, c in enumerate(curves))
    return figure(title, shown, "".join(parts) + f'<p class="keys">{legend}</p>' * (len(curves) > 1))


def figure(title: str, shown: str, picture: str) -> str:
    """Returns an HTML figure: ``title`` and the text ``shown`` on one line, below them ``picture``, HTML or SVG."""
    head = f"<figcaption>{escape(title)}<b>{escape(shown)}</b></figcaption>"
    return f'<figure class="chart">{head}{picture}</figure>'


def _axes(frame: _Frame, ticks: Sequence[float], form: Form) -> list[str]:
    lines = []
    for tick in ticks:
        y = frame.y(tick)
        lines.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        lines.append(f'<text class="tick right" x="{_LEFT - 7}" y="{y + 3.5:.1f}">{escape(form(tick))}</text>')
    lines.append(f'<text class="tick right" x="{_LEFT - 7}" y="{HEIGHT - 7}">step</text>')
    for tick in nice_ticks(frame.left, frame.right):
        if frame.left <= tick <= frame.right and tick == int(tick):
            x = frame.x(tick)
            lines.append(f'<text class="tick middle" x="{x:.1f}" y="{HEIGHT - 7}">{int(tick)}</text>')
    return lines


def _curve(curve: Curve, number: int, frame: _Frame, form: Form) -> list[str]:
    path, pen = [], "M"
    thin = _thinned(curve.points)
    for x, y in thin:
        if y is None:
            pen = "M"
            continue
        path.append(f"{pen}{frame.x(x):.1f} {frame.y(y):.1f}")
        pen = "L"
    lines = [f'<path class="curve k{number % 6}" d="{"".join(path)}"/>']
    real = [(x, y) for x, y in thin if y is not None]
    for x, y in real[:: max(1, math.ceil(len(real) / _TIPS))]:
        tip = f"step {x:g}: {form(y)}" + f" {escape(curve.name)}" * bool(curve.name)
        lines.append(
            f'<circle class="tip" cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="5"><title>{tip}</title></circle>'
        )
    if len(real) == 1:
        lines.append(
            f'<circle class="dot k{number % 6}" cx="{frame.x(real[0][0]):.1f}" cy="{frame.y(real[0][1]):.1f}" r="3"/>'
        )
    return lines


def _thinned(points: Sequence[tuple[float, float | None]]) -> list[tuple[float, float | None]]:
    """Returns at most about ``_POINTS`` points that keep every peak."""
    if len(points) <= _POINTS:
        return list(points)
    stretch = math.ceil(2 * len(points) / _POINTS)
    kept: list[tuple[float, float | None]] = []
    for start in range(0, len(points), stretch):
        part = points[start : start + stretch]
        real = [(y, place) for place, (_, y) in enumerate(part) if y is not None]
        ends = {min(real)[1], max(real)[1]} if real else {0}
        kept += [part[place] for place in sorted(ends)]
    return kept


def nice_ticks(low: float, high: float) -> list[float]:
    """Returns about five axis ticks from at most ``low`` to at least ``high``, at round numbers."""
    if high - low <= abs(high) * 1e-12:
        low, high = (low - abs(low) * 0.5, high + abs(high) * 0.5) if low else (0.0, 1.0)
    rough = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(number * step, 12 - math.floor(math.log10(step))) for number in range(first, last + 1)]


_MAP_LEFT, _MAP_RIGHT, _MAP_TOP, _MAP_BOTTOM = 44, 6, 4, 22
_LOWEST, _HIGHEST, _ROW = 164, 400, 3.0
"""Minimum and maximum height of all cells, and height of a row if there are many, in pixels."""
BOUNDS: Final = (0.25, 0.5, 0.8, 1.25, 2.0, 4.0)
"""Multiples of the mean at which the colour changes; the middle colour is even load."""
_WORDS: Final = ("under 1/4", "under 1/2", "under 4/5", "even", "over 5/4", "over 2", "over 4")
KEYS: Final = (
    '<p class="keys">times the mean of a layer: '
    + "".join(f'<span class="key m{level}">{word}</span>' for level, word in enumerate(_WORDS))
    + "</p>"
)
"""HTML legend of the heat maps' colours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatMap:
    """Heat map of the load of experts; the colour shows load divided by mean load."""

    title: str
    cells: Sequence[Sequence[float]]
    """Load by row and column, relative to the mean."""
    rows: Sequence[str]
    """Row names."""
    tips: Sequence[str]
    """Tooltip of each row, shown at the pointer."""
    columns: Sequence[float]
    """Numbers of the columns (steps), ascending."""
    across: str
    """Label of the columns."""

    def drawn(self, shown: str) -> str:
        """Returns the heat map as an HTML figure with an SVG; the text ``shown`` is after its title."""
        height = min(_HIGHEST, max(_LOWEST, _ROW * len(self.cells)))
        high = height / len(self.cells)
        size = f"{WIDTH} {_MAP_TOP + height + _MAP_BOTTOM:.0f}"
        parts = [
            f'<svg viewBox="0 0 {size}" role="img" aria-label="{escape(self.title)}">',
            *self._levels(high),
            *self._tips(high),
            *self._row_names(high),
            *self._column_names(height),
            "</svg>",
        ]
        return figure(self.title, shown, "".join(parts))

    @property
    def _wide(self) -> float:
        return (WIDTH - _MAP_LEFT - _MAP_RIGHT) / len(self.columns)

    def _levels(self, high: float) -> list[str]:
        """Returns one path for the cells of each colour; neighbours in a row are one rectangle."""
        paths: list[list[str]] = [[] for _ in _WORDS]
        for place, row in enumerate(self.cells):
            levels = [bisect_right(BOUNDS, value) for value in row]
            top, begin = _MAP_TOP + place * high, 0
            for column in range(1, len(levels) + 1):
                if column == len(levels) or levels[column] != levels[begin]:
                    left, width = _MAP_LEFT + begin * self._wide, (column - begin) * self._wide
                    paths[levels[begin]].append(f"M{left:.1f} {top:.1f}h{width:.1f}v{high:.1f}h-{width:.1f}z")
                    begin = column
        return [f'<path class="m{level}" d="{"".join(path)}"/>' for level, path in enumerate(paths) if path]

    def _tips(self, high: float) -> list[str]:
        width = WIDTH - _MAP_LEFT - _MAP_RIGHT
        return [
            f'<rect class="tip" x="{_MAP_LEFT}" y="{_MAP_TOP + place * high:.1f}" width="{width}" height="{high:.1f}">'
            f"<title>{escape(tip)}</title></rect>"
            for place, tip in enumerate(self.tips)
        ]

    def _row_names(self, high: float) -> list[str]:
        every, left = max(1, math.ceil(14 / high)), _MAP_LEFT - 6
        return [
            f'<text class="tick right" x="{left}" y="{_MAP_TOP + (place + 0.5) * high + 4:.1f}">{escape(name)}</text>'
            for place, name in enumerate(self.rows)
            if place % every == 0
        ]

    def _column_names(self, height: float) -> list[str]:
        y = _MAP_TOP + height + 15
        lines = [f'<text class="tick right" x="{_MAP_LEFT - 6}" y="{y:.0f}">{escape(self.across)}</text>']
        for tick in nice_ticks(self.columns[0], self.columns[-1]):
            if self.columns[0] <= tick <= self.columns[-1] and tick == int(tick):
                x = _MAP_LEFT + (bisect_left(self.columns, tick) + 0.5) * self._wide
                lines.append(f'<text class="tick middle" x="{x:.1f}" y="{y:.0f}">{int(tick)}</text>')
        return lines


_COLUMNS = 48
"""Maximal columns of a heat map over steps; of more steps, neighbours are summed."""
_LAYERS = 6
"""Maximal layers with their own heat map over steps."""
_RECENT = 0.1
"""Fraction of the logged steps that counts as the newest."""


class _Layer(NamedTuple):
    """Experts of one layer."""

    name: str
    short: str
    steps: Sequence[int]
    rows: Sequence[Sequence[int]]
    """Rows of each expert, by step."""
    recent: Sequence[float]
    """Share of each expert in the newest steps, over the mean."""

    @property
    def worst(self) -> float:
        """Share of the busiest expert in the newest steps, over the mean."""
        return max(self.recent)


def expert_charts(steps: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Returns the charts of expert load over ``steps`` as two HTML texts: figures and legend.

    Both are empty if no step has ``expert_load``.
    """
    layers = list(_layers([row for row in steps if row.get("expert_load")]))
    if not layers:
        return "", ""
    uneven = {layer.name for layer in sorted(layers, key=lambda layer: -layer.worst)[:_LAYERS]}
    pictures = [_imbalance(layers)]
    if len(layers) > 1:
        pictures.append(_by_layer(layers))
    pictures += [_over_steps(layer) for layer in layers if layer.name in uneven]
    left = len(layers) - len(uneven)
    note = f'<p class="note">Over steps: the {_LAYERS} of {len(layers)} layers that are least even.</p>' * bool(left)
    return "".join(pictures), KEYS + note


def _layers(rows: Sequence[Mapping[str, Any]]) -> Iterator[_Layer]:
    """Yields the layers that received any rows, in the order of the model."""
    names = list(dict.fromkeys(name for row in rows for name in row["expert_load"]))
    for name, short in zip(names, _shortened(names), strict=True):
        size = next(len(row["expert_load"][name]) for row in reversed(rows) if name in row["expert_load"])
        found = [(row["step"], row["expert_load"][name]) for row in rows if sum(row["expert_load"].get(name, ()))]
        found = [(step, counts) for step, counts in found if len(counts) == size]
        if found:
            counted = [counts for _, counts in found]
            recent = _shares(_summed(counted[-max(1, round(_RECENT * len(counted))) :]))
            yield _Layer(name, short, [step for step, _ in found], counted, recent)


def _shortened(names: Sequence[str]) -> list[str]:
    """Returns names without their common beginning and end: ``model.layers.3.mlp.experts`` becomes 3."""
    parts = [name.split(".") for name in names]
    if len(names) < 2:
        return [str(place) for place in range(len(names))]
    shortest = min(map(len, parts))
    head = next((n for n in range(shortest) if len({part[n] for part in parts}) > 1), shortest)
    tail = next((n for n in range(shortest - head) if len({part[-1 - n] for part in parts}) > 1), 0)
    return [".".join(part[head : len(part) - tail]) for part in parts]


def _summed(rows: Sequence[Sequence[int]]) -> list[int]:
    return [sum(counts) for counts in zip(*rows, strict=True)]


def _shares(counts: Sequence[int]) -> list[float]:
    """Returns counts divided by their mean."""
    total = sum(counts) or 1
    return [count * len(counts) / total for count in counts]


def _imbalance(layers: Sequence[_Layer]) -> str:
    """Charts the busiest expert over the mean of its layer, by step."""
    found: dict[int, list[float]] = {}
    for layer in layers:
        for step, counts in zip(layer.steps, layer.rows, strict=True):
            found.setdefault(step, []).append(max(_shares(counts)))
    steps = sorted(found)
    curves = [Curve("least even layer", [(step, max(found[step])) for step in steps])]
    if len(layers) > 1:
        curves.append(Curve("median of the layers", [(step, median(found[step])) for step in steps]))
    return chart("busiest expert, times the mean", curves, _times, zero=True)


def _by_layer(layers: Sequence[_Layer]) -> str:
    """Charts all experts of all layers in the newest steps."""
    most = max(len(layer.recent) for layer in layers)
    tips = [
        f"{layer.name}: {_times(min(layer.recent))} to {_times(layer.worst)} times the mean, "
        f"{sum(share == 0 for share in layer.recent)} of {len(layer.recent)} experts without rows"
        for layer in layers
    ]
    picture = HeatMap(
        title="newest steps, by layer and expert",
        cells=[[*layer.recent, *[1.0] * (most - len(layer.recent))] for layer in layers],
        rows=[layer.short for layer in layers],
        tips=tips,
        columns=range(most),
        across="expert",
    )
    return picture.drawn("")


def _over_steps(layer: _Layer) -> str:
    """Charts the experts of one layer, step by step."""
    stretch = -(-len(layer.steps) // _COLUMNS)
    starts = range(0, len(layer.steps), stretch)
    columns = [_shares(_summed(layer.rows[start : start + stretch])) for start in starts]
    picture = HeatMap(
        title=layer.name,
        cells=list(zip(*columns, strict=True)),
        rows=[str(expert) for expert in range(len(layer.recent))],
        tips=[f"expert {expert}: {_times(share)} times the mean" for expert, share in enumerate(layer.recent)],
        columns=[layer.steps[start] for start in starts],
        across="step",
    )
    return picture.drawn(f"{_times(layer.worst)}")


def _times(value: float) -> str:
    return f"{value:.3g}"
