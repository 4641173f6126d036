"""A small SVG canvas: boxes, arrows and words in colours that follow the reader's light or dark mode."""

from html import escape
from pathlib import Path

STYLE = """
text{font-family:system-ui,"Segoe UI",Helvetica,Arial,sans-serif;font-size:13px;fill:#1f2933}
.title{font-size:16px;font-weight:600}.bold{font-weight:600}.small{font-size:11.5px}.tiny{font-size:10px}.muted{fill:#52606d}
.mono{font-family:ui-monospace,Menlo,Consolas,monospace;font-size:12px}
.page{fill:#ffffff;stroke:#dde3ea}.card{fill:#f5f7fa;stroke:#cbd2d9}.white{fill:#ffffff;stroke:#9aa5b1}
.idle{fill:#e4e7eb}
.tensor{fill:#dbeafe;stroke:#2563eb}.data{fill:#d1fae5;stroke:#059669}.pipe{fill:#ffedd5;stroke:#ea580c}
.other{fill:#ede9fe;stroke:#7c3aed}.weight{fill:#fce7f3;stroke:#db2777}
.line{fill:none;stroke:#52606d;stroke-width:1.6}.thin{fill:none;stroke:#9aa5b1;stroke-width:1}
.dash{stroke-dasharray:5 4}
.l-tensor{fill:none;stroke:#2563eb;stroke-width:2.2}.l-data{fill:none;stroke:#059669;stroke-width:2.2}
.l-pipe{fill:none;stroke:#ea580c;stroke-width:2.2}.l-other{fill:none;stroke:#7c3aed;stroke-width:2.2}
.t-tensor{fill:#1d4ed8}.t-data{fill:#047857}.t-pipe{fill:#c2410c}.t-other{fill:#6d28d9}.t-weight{fill:#be185d}
.h-line{fill:#52606d}.h-tensor{fill:#2563eb}.h-data{fill:#059669}.h-pipe{fill:#ea580c}.h-other{fill:#7c3aed}
@media (prefers-color-scheme:dark){
text{fill:#e4e7eb}.muted{fill:#a3b1c2}
.page{fill:#10161f;stroke:#2b3543}.card{fill:#18212d;stroke:#3a4658}.white{fill:#202b3a;stroke:#5b6b80}
.idle{fill:#2a3443}
.tensor{fill:#1b335c;stroke:#6ea8ff}.data{fill:#123f34;stroke:#34d399}.pipe{fill:#4b2a12;stroke:#fb923c}
.other{fill:#33275c;stroke:#a78bfa}.weight{fill:#4a1d3a;stroke:#f472b6}
.line{stroke:#a3b1c2}.thin{stroke:#5b6b80}
.l-tensor{stroke:#6ea8ff}.l-data{stroke:#34d399}.l-pipe{stroke:#fb923c}.l-other{stroke:#a78bfa}
.t-tensor{fill:#93c0ff}.t-data{fill:#6ee7b7}.t-pipe{fill:#fdba74}.t-other{fill:#c4b5fd}.t-weight{fill:#f9a8d4}
.h-line{fill:#a3b1c2}.h-tensor{fill:#6ea8ff}.h-data{fill:#34d399}.h-pipe{fill:#fb923c}.h-other{fill:#a78bfa}
}"""
WIDTH = 800


class Canvas:
    """A picture of 800 pixels width; ``save`` writes it."""

    def __init__(self, title: str, height: float, description: str) -> None:
        self._title, self._height, self._description = title, height, description
        self._parts: list[str] = []

    def box(self, x: float, y: float, w: float, h: float, kind: str = "white", radius: float = 5) -> None:
        """Draw a rectangle; ``kind`` names its colours."""
        self._parts.append(f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="{radius:g}"/>')

    def text(self, x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> None:
        """Write one line with its baseline at ``y``."""
        marks = f' class="{kind}"' if kind else ""
        marks += f' text-anchor="{anchor}"' if anchor != "start" else ""
        self._parts.append(f'<text x="{x:g}" y="{y:g}"{marks}>{escape(words, quote=False)}</text>')

    def label(self, x: float, y: float, w: float, h: float, words: str, kind: str = "", box: str = "white") -> None:
        """Draw a rectangle with lines of text in its middle; lines are parted by a bar."""
        self.box(x, y, w, h, box)
        lines = words.split("|")
        first = y + h / 2 + 4.5 - 8 * (len(lines) - 1)
        for number, line in enumerate(lines):
            self.text(x + w / 2, first + 16 * number, line, kind, "middle")

    def path(self, points: str, kind: str = "line", head: bool = True, both: bool = False) -> None:
        """Draw a line through the commands of an SVG path, with an arrowhead at its end or at both ends."""
        colour = kind.split()[0].removeprefix("l-")
        marks = f' marker-end="url(#{colour})"' if head or both else ""
        marks += f' marker-start="url(#{colour})"' if both else ""
        self._parts.append(f'<path class="{kind}" d="{points}"{marks}/>')

    def save(self, file: Path) -> None:
        """Write the picture."""
        heads = "".join(
            f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
            f'markerUnits="userSpaceOnUse" orient="auto-start-reverse">'
            f'<path class="h-{name}" d="M0 0L8 4L0 8Z"/></marker>'
            for name in ("line", "tensor", "data", "pipe", "other")
        )
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self._height:g}" width="{WIDTH}" '
            f'height="{self._height:g}" role="img" aria-label="{escape(self._description)}">',
            f"<title>{escape(self._title)}</title>",
            f"<style>{STYLE}\n</style>",
            f"<defs>{heads}</defs>",
            f'<rect class="page" x="0.5" y="0.5" width="{WIDTH - 1}" height="{self._height - 1:g}" rx="8"/>',
            f'<text class="title" x="20" y="30">{escape(self._title)}</text>',
            *self._parts,
            "</svg>",
            "",
        ]
        file.write_text("\n".join(lines), encoding="utf-8")
