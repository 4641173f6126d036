"""Tiles that matrix products are cut into, and which one a product takes: data and a pure function, nothing is tried.

A tile costs its area over its share of the peak rate; programs take tiles in rounds, and all rounds last as long as a
full one. The shares are expectations until ``benchmarks.kernels`` has measured them on a GPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass

GROUP = 8
"""Tiles that lie below each other and share columns."""


@dataclass(frozen=True, slots=True)
class Tile:
    """A part of the result that one program computes at a time, and how."""

    rows: int
    columns: int
    depth: int
    """Terms of the sum that lie in shared memory at once, ``stages`` times."""
    warps: int
    stages: int
    parts: int
    """In how many parts of its columns a tile is finished and stored."""
    described: bool
    """Whether matrices come by tensor descriptors (TMA) or by pointers."""
    peak: float = 1.0
    """Share of the peak rate that a full tile is expected to reach."""


HOPPER = (
    Tile(128, 256, 64, 8, 3, 4, described=True),
    Tile(128, 128, 64, 8, 4, 2, described=True, peak=0.85),
    Tile(64, 128, 64, 4, 4, 2, described=True, peak=0.65),
)
"""16 bits, from sm_90 on."""
AMPERE = (
    Tile(128, 128, 32, 8, 4, 2, described=False),
    Tile(64, 128, 32, 4, 4, 2, described=False, peak=0.8),
)
"""16 bits, sm_80 and its kind."""
EXACT = Tile(64, 64, 16, 8, 2, 2, described=False)
"""32 bits, multiplied as they are, which no tensor core does."""
TF32 = Tile(128, 128, 32, 8, 3, 2, described=False)
"""32 bits, of which the tensor cores take 19."""
_DESCRIBED_FROM = (9, 0)


def tiles_for(itemsize: int, tf32: bool, capability: tuple[int, int]) -> tuple[Tile, ...]:
    """What may be chosen from, for elements of ``itemsize`` bytes."""
    if itemsize == 4:
        return (TF32 if tf32 else EXACT,)
    return HOPPER if capability >= _DESCRIBED_FROM else AMPERE


def choose_tile(rows: int, columns: int, tiles: Sequence[Tile], processors: int) -> Tile:
    """The tile that a product of ``rows`` x ``columns`` is expected to be fastest with; the first of equals."""

    def expected(tile: Tile) -> float:
        count = -(-rows // tile.rows) * -(-columns // tile.columns)
        return -(-count // processors) * tile.rows * tile.columns / tile.peak

    return min(tiles, key=expected)
