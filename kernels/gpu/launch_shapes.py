"""Launch shapes of the Triton kernels: processor counts, block and warp sizes, and the tiles of matrix products.

Tiles are data and their choice is a pure function; nothing is benchmarked at run time. The expected time of a tile is
the area over the tile's fraction of the peak rate. Programs process tiles in rounds, and every round takes the time of
a full one. The fractions are estimates until ``benchmarks.kernels`` has measured them on a GPU.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class GpuShape:
    """Compute capability and number of streaming multiprocessors of a GPU."""

    capability: tuple[int, int]
    processors: int


GPUS: Mapping[str, GpuShape] = MappingProxyType(
    {
        "a100": GpuShape((8, 0), 108),
        "h100": GpuShape((9, 0), 132),
        "h200": GpuShape((9, 0), 132),
        "b200": GpuShape((10, 0), 148),
    }
)
"""GPUs by name for which kernels can be compiled without a GPU."""
_ASSUMED = GPUS["h100"]
"""The GPU for the meta device, on which kernels are compiled but not run."""
_INTERPRETED_PROCESSORS = 2
_PLANNED: ContextVar[GpuShape | None] = ContextVar("planned", default=None)


@contextmanager
def planned_for(gpu: GpuShape) -> Iterator[None]:
    """Makes kernels inside the context choose launch shapes for ``gpu``, on any device."""
    token = _PLANNED.set(gpu)
    try:
        yield
    finally:
        _PLANNED.reset(token)


_ELEMENTS_PER_THREAD = 16
_COLUMNS = 1024


def processors(device: torch.device) -> int:
    """Returns the number of streaming multiprocessors of ``device``, or of ``gpu`` inside ``planned_for(gpu)``."""
    return (_PLANNED.get() or gpu_shape(device)).processors


def capability(device: torch.device) -> tuple[int, int]:
    """Returns the compute capability (major, minor) of ``device``, or of ``gpu`` inside ``planned_for(gpu)``.

    The CPU and the meta device count as an H100.
    """
    return (_PLANNED.get() or gpu_shape(device)).capability


@cache
def gpu_shape(device: torch.device) -> GpuShape:
    """Returns the compute capability and number of streaming multiprocessors of ``device``.

    The meta device has the values of an H100.
    """
    if device.type == "cuda":
        count = int(torch.cuda.get_device_properties(device).multi_processor_count)
        return GpuShape(torch.cuda.get_device_capability(device), count)
    return _ASSUMED if device.type == "meta" else GpuShape(_ASSUMED.capability, _INTERPRETED_PROCESSORS)


@dataclass(frozen=True, slots=True)
class RowShape:
    """Launch shape of a kernel that handles rows: number of elements in a block, and number of warps in a program."""

    block: int
    """Elements per block: the row width rounded up to a power of two, or fewer."""
    warps: int


def ceil_div(count: int, size: int) -> int:
    """Returns ``count / size`` rounded up to an integer."""
    return -(-count // size)


def power_of_two(count: int) -> int:
    """Returns the smallest power of two that is ``count`` or more."""
    return 1 << max(count - 1, 0).bit_length()


@cache
def row_shape(width: int, elements_per_thread: int = _ELEMENTS_PER_THREAD) -> RowShape:
    """Returns the launch shape for kernels with one program per row of ``width`` elements.

    ``elements_per_thread``: approximate number of elements that a thread handles.
    """
    block = power_of_two(max(width, 16))
    return RowShape(block, min(16, max(1, block // (32 * elements_per_thread))))


def column_shape(width: int, elements_per_thread: int = 8) -> RowShape:
    """Returns the launch shape for kernels in which a program handles some columns of a row of ``width`` elements.

    ``elements_per_thread``: approximate number of elements that a thread handles.
    """
    return row_shape(min(width, _COLUMNS), elements_per_thread)


GROUP = 8
"""Number of row tiles that run successively with common columns of b in the cache."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Launch shape of a matrix product kernel: tile of the result, number of warps, and number of pipeline stages."""

    rows: int
    columns: int
    depth: int
    """Size along the summed dim per shared-memory buffer; there are ``stages`` buffers."""
    warps: int
    stages: int
    parts: int
    """Number of column pieces in which a tile is finished and stored."""
    described: bool
    """True: matrices are loaded through tensor descriptors (TMA). False: through pointers."""
    peak: float = 1.0
    """Expected fraction of the GPU's peak rate for a full tile."""


HOPPER = (
    Tile(128, 256, 64, 8, 3, 4, described=True),
    Tile(128, 128, 64, 8, 4, 2, described=True, peak=0.85),
    Tile(64, 128, 64, 4, 4, 2, described=True, peak=0.65),
)
"""Tiles for 16-bit elements from sm_90 on."""
AMPERE = (
    Tile(128, 128, 32, 8, 4, 2, described=False),
    Tile(64, 128, 32, 4, 4, 2, described=False, peak=0.8),
)
"""Tiles for 16-bit elements on sm_80 up to sm_89."""
HALF = Tile(128, 128, 64, 8, 3, 2, described=False)
"""Tile for 16-bit elements without tensor descriptors: received rows, and rows of one of several experts."""
EXACT = Tile(64, 64, 16, 8, 2, 2, described=False)
"""Tile for 32-bit elements multiplied in full fp32, without tensor cores."""
TF32 = Tile(128, 128, 32, 8, 3, 2, described=False)
"""Tile for 32-bit elements that tensor cores multiply as TF32 (19 bits)."""
_DESCRIBED_FROM = (9, 0)


def tiles_for(itemsize: int, tf32: bool, capability: tuple[int, int]) -> tuple[Tile, ...]:
    """Returns the tiles from which :func:`choose_tile` chooses on a GPU of ``capability``.

    ``itemsize``: bytes of an element. ``tf32``: fp32 elements are multiplied as TF32.
    """
    if itemsize == 4:
        return (TF32 if tf32 else EXACT,)
    return HOPPER if capability >= _DESCRIBED_FROM else AMPERE


def choose_tile(rows: int, columns: int, tiles: Sequence[Tile], processors: int) -> Tile:
    """Returns the fastest of ``tiles``, by estimate, for a result of ``rows`` x ``columns``.

    ``processors``: number of streaming multiprocessors of the GPU.
    """

    def expected(tile: Tile) -> float:
        count = -(-rows // tile.rows) * -(-columns // tile.columns)
        return -(-count // processors) * tile.rows * tile.columns / tile.peak

    return min(tiles, key=expected)


def tile_of(dtype: torch.dtype) -> Tile:
    """Returns the tile for a matrix product in ``dtype`` that loads its matrices through pointers."""
    if dtype.itemsize == 2:
        return HALF
    return TF32 if multiplies_as_tf32() else EXACT


def tile_shape(tile: Tile, tf32: bool | None = None) -> dict[str, Any]:
    """Returns the keyword arguments of a kernel with ``tile``: BM, BN, BK, GROUP, PRECISION, num_warps and num_stages.

    ``tf32``: True if fp32 operands are multiplied as TF32; None: as torch is set.
    """
    return {
        "BM": tile.rows, "BN": tile.columns, "BK": tile.depth, "GROUP": GROUP,
        "PRECISION": "tf32" if (multiplies_as_tf32() if tf32 is None else tf32) else "ieee",
        "num_warps": tile.warps, "num_stages": tile.stages,
    }  # fmt: skip


def multiplies_as_tf32() -> bool:
    """Returns True if torch is set to multiply fp32 matrices on a GPU as TF32 (19 bits)."""
    return torch.get_float32_matmul_precision() != "highest"
