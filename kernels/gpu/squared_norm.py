"""Sum of squares in Triton: a fixed number of programs adds in fp64, and their sums are added in a fixed order."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.gpu.launch_shapes import ceil_div, processors

_BLOCK = 2048
_PROGRAMS_EACH = 4
"""Programs on each processor."""


@triton.jit(do_not_specialize=["sums", "blocks_each"])
def squared_norm_kernel(values, sums, count, blocks_each, weight, BLOCK: tl.constexpr):
    """Add the squares of ``blocks_each`` consecutive blocks."""
    program = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.float64)
    first = program * blocks_each * BLOCK
    for number in range(0, blocks_each):
        place = first + number * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(values + place, mask=place < count, other=0.0).to(tl.float32).to(tl.float64)
        total += x * x
    tl.store(sums + program, tl.sum(total, axis=0) * weight)


def squared_norm(parts: Sequence[tuple[Tensor, bool]]) -> Tensor:
    """Return an fp64 scalar; ``parts`` are pairs (values, whether they count) on one device, none of them empty."""
    device = parts[0][0].device
    shapes = [_shape(values.numel(), device) for values, _ in parts]
    sums = torch.empty(sum(programs for programs, _ in shapes), dtype=torch.float64, device=device)
    places = torch.split(sums, [programs for programs, _ in shapes])
    for (values, counts), (programs, blocks_each), place in zip(parts, shapes, places, strict=True):
        squared_norm_kernel[(programs,)](
            values, place, values.numel(), blocks_each, 1.0 if counts else 0.0, BLOCK=_BLOCK, num_warps=8
        )
    return sums.sum()


def _shape(count: int, device: torch.device) -> tuple[int, int]:
    """Return (programs, blocks of each program)."""
    blocks = ceil_div(count, _BLOCK)
    each = ceil_div(blocks, _PROGRAMS_EACH * processors(device))
    return ceil_div(blocks, each), each
