"""SVG pictures of timelines: one row per rank, one box per action; colour is the operation, shade is the stage.

The SVG text is self-contained, equal for equal input, and has a background in light and dark mode, so that a README can
show it. The tooltip of a box is the token of the action.
"""

from collections.abc import Iterator, Sequence
from html import escape  # that of xml.sax imports urllib, a tenth of the start of every command

from engine.parallel.pipeline.report.text import Panel, end_of
from engine.parallel.pipeline.schedule.actions import Op, Schedule
from engine.parallel.pipeline.schedule.simulate import Span

_ROW, _PITCH = 20, 23
"""Height of a row, and distance between rows, in pixels."""
_HEAD, _FOOT = 26, 24
"""Height of a headline, and of the legend, in pixels."""
_DIGIT = 6.2
"""Width of a digit in a box."""


# bright enough in all shades for black digits, and distinguishable for the colour-blind
_COLOUR = {
    Op.FORWARD: (0x5A, 0xAD, 0xE8), Op.BACKWARD: (0xE8, 0xA3, 0x2E),
    Op.BACKWARD_INPUT: (0xF0, 0x8A, 0x78), Op.BACKWARD_WEIGHT: (0x4F, 0xB9, 0x8C),
}  # fmt: skip
_PALEST = 0.5
"""The share of white in the shade of the last stage of a rank."""
_WORDS = {
    Op.FORWARD: "F forward", Op.BACKWARD: "B backward", Op.BACKWARD_INPUT: "I gradient of the input",
    Op.BACKWARD_WEIGHT: "W gradient of the weights",
}  # fmt: skip
_STYLE = """\
text{font:11px ui-monospace,Menlo,Consolas,monospace;fill:#1f2328}.title{font-size:12px}.end{text-anchor:end}
.page{fill:#fff}.idle{fill:#eaedf0}.n{fill:#111;font-size:10px;text-anchor:middle;pointer-events:none}
@media (prefers-color-scheme:dark){text{fill:#e6edf3}.page{fill:#0d1117}.idle{fill:#2a3038}.n{fill:#111}}"""


def svg(panels: Sequence[Panel], width: int = 960) -> str:
    """Draws timelines one above the other and returns the text of an SVG picture.

    Args:
        panels: timelines; timelines with the same unit of time have the same scale.
        width: width of the picture in pixels.
    """
    margin = 20 + 6.7 * max(len(f"rank {len(panel.timeline.spans) - 1}") for panel in panels)
    body: list[str] = []
    top = 0.0
    for panel in panels:
        room = width - margin - 10
        body += _panel(panel, (margin, top), room / (end_of(panel, panels) or 1))
        top += _HEAD + _PITCH * len(panel.timeline.spans)
    body += _legend(panels, top, margin, width)
    height = top + _FOOT
    shades = {(op, shade, of) for panel in panels for op, shade, of in _shades(panel.timeline.schedule)}
    fills = "".join(f".{_class(op, *place)}{{fill:{_fill(op, *place)}}}" for op, *place in sorted(shades))
    titles = escape("; ".join(panel.headline() for panel in panels))
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{_px(height)}" '
        f'viewBox="0 0 {width} {_px(height)}" role="img" aria-label="{titles}">',
        f"<style>\n{_STYLE}\n{fills}\n</style>",
        f'<rect class="page" width="{width}" height="{_px(height)}"/>',
        *body, "</svg>", "",
    ])  # fmt: skip


def _panel(panel: Panel, corner: tuple[float, float], scale: float) -> Iterator[str]:
    """Yields the elements of one timeline; ``scale``: pixels per unit of time."""
    margin, top = corner
    yield f'<text class="title" x="10" y="{_px(top + 17)}">{escape(panel.headline(), quote=False)}</text>'
    for rank, spans in enumerate(panel.timeline.spans):
        yield f'<g transform="translate({_px(margin)} {_px(top + _HEAD + rank * _PITCH)})">'
        yield f'<text class="end" x="-6" y="14">rank {rank}</text>'
        yield f'<rect class="idle" width="{_px(panel.timeline.makespan * scale)}" height="{_ROW}"/>'
        stages = panel.timeline.schedule.stages_of_rank[rank]
        for span in spans:
            yield _box(span, scale, _class(span.action.op, stages.index(span.action.stage), len(stages)))
        yield "</g>"


def _box(span: Span, scale: float, name: str) -> str:
    x, width = span.start * scale, (span.end - span.start) * scale
    gap = 0.6 if width > 3 else 0  # between neighbours of one colour
    box = (
        f'<rect class="{name}" x="{_px(x)}" width="{_px(width - gap)}" height="{_ROW}">'
        f"<title>{span.action}</title></rect>"
    )
    digits = str(span.action.microbatch)
    if len(digits) * _DIGIT + 2 > width:
        return box
    return f'{box}<text class="n" x="{_px(x + width / 2)}" y="14">{digits}</text>'


def _legend(panels: Sequence[Panel], top: float, margin: float, width: int) -> Iterator[str]:
    shades = [found for panel in panels for found in _shades(panel.timeline.schedule)]
    x = margin
    for op in Op:
        places = [place for found, *place in shades if found is op]
        if not places:
            continue
        yield f'<rect class="{_class(op, *places[0])}" x="{_px(x)}" y="{_px(top + 6)}" width="11" height="11"/>'
        yield f'<text x="{_px(x + 16)}" y="{_px(top + 16)}">{_WORDS[op]}</text>'
        x += 16 + 6.7 * (len(_WORDS[op]) + 2)
    if any(of > 1 for _, _, of in shades):
        yield f'<text x="{_px(x)}" y="{_px(top + 16)}">paler: later stages of a rank</text>'
    yield f'<text class="end" x="{width - 10}" y="{_px(top + 16)}">time →</text>'


def _shades(schedule: Schedule) -> list[tuple[Op, int, int]]:
    """Returns each operation of the schedule, with the index of its stage on the rank and the rank's number of
    stages."""
    places = {
        stage: (place, len(stages)) for stages in schedule.stages_of_rank for place, stage in enumerate(stages)
    }  # fmt: skip
    return sorted({(action.op, *places[action.stage]) for row in schedule.per_rank for action in row})


def _class(op: Op, place: int, of: int) -> str:
    return f"{op}{place}-{of}"


def _fill(op: Op, place: int, of: int) -> str:
    pale = _PALEST * place / max(of - 1, 1)
    return "#" + "".join(f"{round(part + (255 - part) * pale):02x}" for part in _COLOUR[op])


def _px(number: float) -> str:
    return f"{number:.2f}".rstrip("0").rstrip(".")
