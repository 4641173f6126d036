"""Draws a scaling record as SVG: seconds and efficiency by node count, and each grid of the largest node count next to
its prediction.

The SVG needs no other file, is equal for equal records, and is readable in light and dark mode.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from benchmarks.scaling.record import ScalingRecord, ScalingRow, measured_rows
from benchmarks.scaling.report import parts_of

_WIDTH, _CHART, _BAR = 960, 200, 34
"""Sizes in pixels: width of the picture, height of a chart, distance between bars."""
_MARGIN, _HEAD = 60, 30
_STYLE = """\
text{font:11px ui-monospace,Menlo,Consolas,monospace;fill:#1f2328}.title{font-size:12px}.end{text-anchor:end}
.mid{text-anchor:middle}.page{fill:#fff}.axis{stroke:#8b949e;fill:none}.measured{stroke:#1f6feb;fill:#1f6feb}
.predicted{stroke:#d4760b;fill:#d4760b}.line{fill:none;stroke-width:1.8}.dash{stroke-dasharray:5 4}
.p0{fill:#5aade8}.p1{fill:#c9d1d9}.p2{fill:#e8a32e}.p3{fill:#f08a78}.p4{fill:#4fb98c}.p5{fill:#b392f0}.p6{fill:#8b949e}
@media (prefers-color-scheme:dark){text{fill:#e6edf3}.page{fill:#0d1117}}"""
_PARTS = ("computation", "bubble", "dp", "tp", "pp", "replica", "world")


@dataclass(frozen=True, slots=True)
class _Point:
    """The best grid of a number of ranks."""

    nodes: int
    world: int
    measured: float
    predicted: float | None


def draw_record(record: ScalingRecord) -> str:
    """Draws a record as SVG; modes without measured grids are omitted."""
    body, top = list[str](), 0.0
    for mode in dict.fromkeys(row.mode for row in record.rows):
        found = list(measured_rows(record, mode))
        if not found:
            continue
        body += _charts(mode, found, top)
        top += _CHART + 2 * _HEAD + 20
        most = max(row.world for row, _ in found)
        rows = sorted((pair for pair in found if pair[0].world == most), key=lambda pair: pair[1])
        body += _bars(f"{mode}, {rows[0][0].nodes} nodes, {most} ranks: seconds of a step", rows, top)
        top += _HEAD + _BAR * len(rows) + 40
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_px(top)}" '
        f'viewBox="0 0 {_WIDTH} {_px(top)}" role="img" aria-label="Scaling, measured and predicted">',
        f"<style>\n{_STYLE}\n</style>",
        f'<rect class="page" width="{_WIDTH}" height="{_px(top)}"/>',
        *body, "</svg>", "",
    ])  # fmt: skip


def _charts(mode: str, found: Sequence[tuple[ScalingRow, float]], top: float) -> Iterator[str]:
    times = _best(found, lambda row, seconds: seconds, min)
    rates = _best(found, lambda row, seconds: row.tokens / seconds / row.world, max)
    first = rates[0]
    shares = [
        _Point(
            point.nodes, point.world, point.measured / first.measured,
            point.predicted / first.predicted if point.predicted and first.predicted else None,
        )
        for point in rates
    ]  # fmt: skip
    half = _WIDTH / 2
    yield from _chart(f"{mode}: seconds of a step, the best grid", times, (0.0, top), "{:.2f}")
    yield from _chart(f"{mode}: efficiency, the fewest ranks are 100%", shares, (half, top), "{:.0%}")
    y = top + _HEAD + _CHART + 34
    for x, name, words in ((_MARGIN, "measured", "measured"), (_MARGIN + 110, "predicted dash", "predicted")):
        yield f'<path class="{name} line" d="M{x} {_px(y - 4)}h24"/><text x="{x + 30}" y="{_px(y)}">{words}</text>'


def _best(
    found: Sequence[tuple[ScalingRow, float]],
    value: Callable[[ScalingRow, float], float],
    best: Callable[[list[float]], float],
) -> list[_Point]:
    points = []
    for nodes, world in sorted({(row.nodes, row.world) for row, _ in found}, key=lambda size: size[1]):
        rows = [(row, seconds) for row, seconds in found if (row.nodes, row.world) == (nodes, world)]
        told = [value(row, row.predicted.total) for row, _ in rows if row.predicted is not None]
        points.append(
            _Point(nodes, world, best([value(row, seconds) for row, seconds in rows]), best(told) if told else None)
        )
    return points


def _chart(title: str, points: Sequence[_Point], corner: tuple[float, float], form: str) -> Iterator[str]:
    left, top = corner[0] + _MARGIN, corner[1] + _HEAD
    width = _WIDTH / 2 - _MARGIN - 20
    most = 1.1 * max(max(point.measured, point.predicted or 0.0) for point in points)
    places = [left + width * (index + 0.5) / len(points) for index in range(len(points))]

    def height(value: float) -> float:
        return top + _CHART * (1 - value / most)

    yield f'<text class="title" x="{_px(left)}" y="{_px(top - 12)}">{escape(title)}</text>'
    yield f'<path class="axis" d="M{_px(left)} {_px(top)}v{_CHART}h{_px(width)}"/>'
    for step in (0.0, 0.5, 1.0):
        value = most * step / 1.1
        label = form.format(value)
        yield f'<text class="end" x="{_px(left - 6)}" y="{_px(height(value) + 4)}">{label}</text>'
    for x, point in zip(places, points, strict=True):
        words = f"{point.nodes} node{'s' * (point.nodes > 1)}, {point.world} ranks"
        yield f'<text class="mid" x="{_px(x)}" y="{_px(top + _CHART + 15)}">{words}</text>'
    for name, values in (
        ("measured", [point.measured for point in points]),
        ("predicted dash", [point.predicted for point in points]),
    ):
        known = [(x, height(value)) for x, value in zip(places, values, strict=True) if value is not None]
        path = " L".join(f"{_px(x)} {_px(y)}" for x, y in known)
        yield f'<path class="{name} line" d="M{path}"/>' if known else ""
        yield from (f'<circle class="{name}" cx="{_px(x)}" cy="{_px(y)}" r="3"/>' for x, y in known)


def _bars(title: str, rows: Sequence[tuple[ScalingRow, float]], top: float) -> Iterator[str]:
    """A measured bar above the parts of the prediction, for each grid."""
    left = 190.0
    longest = max(max(seconds, row.predicted.total if row.predicted else 0.0) for row, seconds in rows)
    scale = (_WIDTH - left - 90) / longest
    yield f'<text class="title" x="10" y="{_px(top + 17)}">{escape(title)}</text>'
    for index, (row, seconds) in enumerate(rows):
        y = top + _HEAD + index * _BAR
        yield f'<text class="end" x="{_px(left - 8)}" y="{_px(y + 17)}">{escape(str(row.choice))}</text>'
        yield f'<rect class="measured" x="{_px(left)}" y="{_px(y)}" width="{_px(seconds * scale)}" height="11"/>'
        yield f'<text x="{_px(left + seconds * scale + 6)}" y="{_px(y + 10)}">{seconds:.2f}</text>'
        x = left
        for name, part in parts_of(row):
            box = f'x="{_px(x)}" y="{_px(y + 13)}" width="{_px(part * scale)}" height="11"'
            yield f'<rect class="p{_PARTS.index(name)}" {box}><title>{name} {part:.3f} s</title></rect>'
            x += part * scale
        if row.predicted is not None:
            yield f'<text x="{_px(x + 6)}" y="{_px(y + 23)}">{row.predicted.total:.2f}</text>'
    x, y = left, top + _HEAD + _BAR * len(rows) + 12
    for place, name in enumerate(("measured", *_PARTS)):
        shown = "measured" if place == 0 else f"p{place - 1}"
        yield f'<rect class="{shown}" x="{_px(x)}" y="{_px(y - 9)}" width="10" height="10"/>'
        yield f'<text x="{_px(x + 14)}" y="{_px(y)}">{name}</text>'
        x += 24 + 6.8 * len(name)


def _px(number: float) -> str:
    return f"{number:.2f}".rstrip("0").rstrip(".")
