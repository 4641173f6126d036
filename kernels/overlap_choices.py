"""Where products that communicate were measured to win: the rows of ``overlap.json``.

A row is for one operation, GPU, dtype, number of ranks, and columns and depth of a product; it applies from its number
of rows up to that of the next row of the same product. What has no row runs as where nothing was measured.
``python -m benchmarks overlap`` writes the rows.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

import torch

Operation = Literal["gather_product", "product_scatter", "product_sum"]
Way = Literal["fused", "copied", "chunks", "collectives"]
IN_KERNEL: frozenset[Way] = frozenset({"fused", "copied"})
"""Ways in which a kernel waits for rows or sends them; "copied": copies carry the rows to a kernel that waits."""


class ProductSizes(NamedTuple):
    """[rows, depth] x [depth, columns] as each rank multiplies; the rows are those of all ranks together."""

    rows: int
    columns: int
    depth: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapChoice:
    """The fastest way of an operation at one size."""

    operation: Operation
    device: str
    """Glob pattern for the GPU name, as ``device_name`` returns it."""
    dtype: str
    ranks: int
    rows: int
    """The fewest that the row applies to."""
    columns: int
    depth: int
    way: Way
    speedup: float
    """Time of the fastest way without such a kernel over the time of the fastest with one."""
    tile: tuple[int, int, int, int, int] | None = None
    """Rows, columns, depth, warps and stages; None: the tile that ships."""

    @property
    def fuses(self) -> bool:
        """Whether a kernel communicates."""
        return self.way in IN_KERNEL


class OverlapChoices:
    """The rows of one GPU and number of ranks."""

    def __init__(self, rows: Iterable[OverlapChoice]) -> None:
        self.rows = tuple(rows)

    def find(self, operation: Operation, sizes: ProductSizes, dtype: torch.dtype) -> OverlapChoice | None:
        """The row that applies."""
        product = (sizes.columns, sizes.depth)
        held = [
            row for row in self._of(operation, dtype) if (row.columns, row.depth) == product and row.rows <= sizes.rows
        ]
        return max(held, key=lambda row: row.rows, default=None)

    def may_fuse(
        self, operation: Operation, rows: int, dtype: torch.dtype, *, columns: int | None = None,
        depth: int | None = None,
    ) -> bool:  # fmt: skip
        """Whether some product of these rows fuses, of the columns or the depth that are known."""
        products = {
            ProductSizes(rows, row.columns, row.depth)
            for row in self._of(operation, dtype)
            if row.columns == (columns or row.columns) and row.depth == (depth or row.depth)
        }
        found = (self.find(operation, sizes, dtype) for sizes in products)
        return any(row is not None and row.fuses for row in found)

    def _of(self, operation: Operation, dtype: torch.dtype) -> list[OverlapChoice]:
        name = str(dtype).removeprefix("torch.")
        return [row for row in self.rows if row.operation == operation and fnmatchcase(name, row.dtype)]


def read_overlap(text: str) -> tuple[OverlapChoice, ...]:
    """Parse a table from JSON."""
    rows = json.loads(text)["winners"]
    return tuple(OverlapChoice(**(row | {"tile": tuple(row["tile"])} if row.get("tile") else row)) for row in rows)


@cache
def shipped_overlap() -> tuple[OverlapChoice, ...]:
    """The table that ships with this package."""
    return read_overlap((Path(__file__).resolve().parent / "overlap.json").read_text(encoding="utf-8"))


def overlap_choices(device: str, ranks: int) -> OverlapChoices:
    """What was measured on the GPU of this name with so many ranks."""
    return OverlapChoices(row for row in shipped_overlap() if row.ranks == ranks and fnmatchcase(device, row.device))
