"""What launches of all kernels share: how many programs a GPU runs at once, and sizes of blocks and warps."""

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
