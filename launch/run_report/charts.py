"""Small charts as inline SVG: curves over steps with readable axes. Colours and fonts are those of the page."""

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT = 360, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 10, 24
_POINTS = 300
"""Points of a curve; of more, the lowest and highest of each stretch are drawn."""
_TIPS = 80
"""Points of a curve that have tooltips."""

Form = Callable[[float], str]
"""A number as text, for an axis."""


class Curve(NamedTuple):
    """Values over steps; None leaves a gap."""

    name: str
    points: Sequence[tuple[float, float | None]]

    @property
    def last(self) -> float | None:
        """The newest value."""
        return next((y for _, y in reversed(self.points) if y is not None), None)


class _Frame(NamedTuple):
    """The ranges of both axes."""

    left: float
    right: float
    low: float
    high: float

    def x(self, value: float) -> float:
        return _LEFT + (value - self.left) / ((self.right - self.left) or 1) * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - _BOTTOM - (value - self.low) / ((self.high - self.low) or 1) * (HEIGHT - _TOP - _BOTTOM)


def chart(title: str, curves: Sequence[Curve], form: Form, zero: bool = False, note: str = "") -> str:
    """A figure of one or more curves; with one, its newest value stands beside the title.

    Args:
        form: how values are written.
        zero: the axis of values begins at 0.
        note: a line under the picture.
    """
    found = [(x, y) for curve in curves for x, y in curve.points if y is not None]
    if not found:
        return figure(title, "", '<p class="empty">no values</p>', note)
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
    return figure(title, shown, "".join(parts) + f'<p class="keys">{legend}</p>' * (len(curves) > 1), note)


def figure(title: str, shown: str, picture: str, note: str = "") -> str:
    """A picture under its title; ``shown`` stands beside that, ``note`` below."""
    head = f"<figcaption>{escape(title)}<b>{escape(shown)}</b></figcaption>"
    below = f'<p class="note">{escape(note)}</p>' * bool(note)
    return f'<figure class="chart">{head}{picture}{below}</figure>'


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
    """At most about ``_POINTS`` points that keep every peak."""
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


def nice_ticks(low: float, high: float, wanted: int = 4) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten that span a range, about ``wanted`` of them."""
    if high - low <= abs(high) * 1e-12:
        low, high = (low - abs(low) * 0.5, high + abs(high) * 0.5) if low else (0.0, 1.0)
    rough = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(number * step, 12 - math.floor(math.log10(step))) for number in range(first, last + 1)]
