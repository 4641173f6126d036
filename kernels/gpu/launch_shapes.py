"""What launches of all kernels share: how many programs a GPU runs at once, and sizes of blocks and warps.

Tiles that matrix products are cut into, and which one a product takes: data and a pure function, nothing is tried.

A tile costs its area over its share of the peak rate; programs take tiles in rounds, and all rounds last as long as a
full one. The shares are expectations until ``benchmarks.kernels`` has measured them on a GPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
import triton

_ASSUMED_PROCESSORS = 132
"""Of an H100 or H200: for shapes on the meta device, which are compiled and not run."""
_INTERPRETED_PROCESSORS = 2
_ASSUMED_CAPABILITY = (9, 0)
_ELEMENTS_PER_THREAD = 16
_COLUMNS = 1024
WIDEST_ROW = 16384
"""Elements that a program holds in registers at once."""


@cache
def processors(device: torch.device) -> int:
    """Streaming multiprocessors of ``device``."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    return _ASSUMED_PROCESSORS if device.type == "meta" else _INTERPRETED_PROCESSORS


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of ``device``; of an H100 where there is no GPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else _ASSUMED_CAPABILITY


@dataclass(frozen=True, slots=True)
class RowShape:
    """How a program holds a row of a matrix, or a piece of it."""

    block: int
    """Elements: the row's width, rounded up to a power of two, or less."""
    warps: int


def row_shape(width: int, elements_per_thread: int = _ELEMENTS_PER_THREAD) -> RowShape:
    """Enough warps that a thread holds about ``elements_per_thread`` elements."""
    block = triton.next_power_of_2(max(width, 16))
    return RowShape(block, min(16, max(1, block // (32 * elements_per_thread))))


def column_shape(width: int, elements_per_thread: int = 8) -> RowShape:
    """For pieces of a row, where elements need not meet."""
    return row_shape(min(width, _COLUMNS), elements_per_thread)


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
