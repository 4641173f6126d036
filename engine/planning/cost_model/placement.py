"""Which ranks share a node: tensor ranks are neighbours, then data ranks, then pipeline stages. Pure arithmetic."""

from collections.abc import Iterator
from math import ceil

from engine.parallel.grid import Grid


def tensor_groups_cross(tp: int, node: int) -> bool:
    """A tensor group lies on several nodes of ``node`` GPUs."""
    return tp > node or node % tp != 0


def placement_picture(grid: Grid, node: int) -> str:
    """The nodes of a grid, one a line: its ranks, and the stage, data and tensor coordinates that they have."""
    lines = list(_lines(grid, node))
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def _lines(grid: Grid, node: int) -> Iterator[tuple[str, ...]]:
    yield "node", "ranks", "stage", "data", "tensor"
    for number in range(ceil(grid.world_size / node)):
        ranks = range(number * node, min((number + 1) * node, grid.world_size))
        coords = [grid.coord(rank) for rank in ranks]
        axes = (sorted({coord[axis] for coord in coords}) for axis in ("pp", "dp", "tp"))
        yield str(number), _span(list(ranks)), *(_span(values) for values in axes)


def _span(values: list[int]) -> str:
    """As 3, or 0-3; the values of a node are consecutive."""
    return str(values[0]) if len(values) == 1 else f"{values[0]}-{values[-1]}"
