"""Tables of the README that tests write: ``pytest --write-readme`` puts the measured figures in."""

from dataclasses import dataclass, field
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


@dataclass(slots=True)
class Table:
    """A table by row and column, kept between ``<!-- NAME:begin -->`` and ``<!-- NAME:end -->``."""

    name: str
    corner: str
    cells: dict[tuple[str, str], str] = field(default_factory=dict)

    def render(self) -> str:
        """Markdown, rows and columns in the order of their first cell."""
        rows = list(dict.fromkeys(row for row, _ in self.cells))
        columns = list(dict.fromkeys(column for _, column in self.cells))
        lines = [f"| {self.corner} | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
        lines += [f"| {row} | {' | '.join(self.cells.get((row, c), '') for c in columns)} |" for row in rows]
        return "\n".join(lines)

    def write(self) -> None:
        """Replace the table in the README."""
        text = README.read_text(encoding="utf-8")
        begin, end = f"<!-- {self.name}:begin -->", f"<!-- {self.name}:end -->"
        head, rest = text.split(begin)
        README.write_text(f"{head}{begin}\n{self.render()}\n{end}{rest.split(end)[1]}", encoding="utf-8")
