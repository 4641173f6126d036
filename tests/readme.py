"""Tables of the README that tests write: ``pytest --write-readme`` puts the measured figures in."""

from dataclasses import dataclass, field

from benchmarks.readme import write_section


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
        write_section(self.name, self.render())
