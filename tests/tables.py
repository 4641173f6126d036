"""Tables of the documents that tests measure: ``pytest --write-figures`` keeps the figures and shows them."""

from dataclasses import dataclass, field

from benchmarks.harness.figures import record_cells, render


@dataclass(slots=True)
class Table:
    """A table by row and column, kept as docs/figures/NAME.json."""

    name: str
    corner: str
    cells: dict[tuple[str, str], str] = field(default_factory=dict)

    def render(self) -> str:
        """Markdown of these cells alone, rows and columns in the order of their first cell."""
        rows: dict[str, dict[str, str]] = {}
        for (row, column), text in self.cells.items():
            rows.setdefault(row, {})[column] = text
        columns = list(dict.fromkeys(column for _, column in self.cells))
        return render({"corner": self.corner, "columns": columns, "rows": rows})

    def write(self) -> None:
        """Keep the cells, beside those that are not tried here, and show the table."""
        record_cells(self.name, self.corner, self.cells)
