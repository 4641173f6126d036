"""Cases of the overlap benchmark: matmuls of Llama layers on tensor ranks, and tiny ones for the interpreter."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import get_args

import torch

from benchmarks.kernels.cases.case import short
from engine.kernels.overlap import Operation, ProductSizes

OPERATIONS: tuple[Operation, ...] = get_args(Operation)
TOKENS = 8192
"""Rows of a product over all ranks: one sequence."""
RANKS = (2, 4, 8)
WIDTHS: Mapping[str, tuple[int, int]] = MappingProxyType({"8B": (4096, 14336), "70B": (8192, 28672)})
"""Hidden and MLP sizes of Llama 3."""
TINY_ROWS, TINY_DEPTH, TINY_COLUMNS = 21, 24, 40
"""Sizes of one rank in tiny cases, no multiples of a tile."""
TILES = ((128, 128, 64, 8, 3), (128, 256, 64, 8, 3), (64, 128, 64, 4, 4), (128, 128, 32, 8, 4))
"""Tried tiles for 16-bit elements: rows, columns, depth, warps, stages. The first is the default."""
TINY_TILES = ((16, 16, 16, 4, 2), (32, 16, 16, 4, 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapCase:
    """One operation at one size, on a number of ranks."""

    operation: Operation
    of: str
    """Name of the layer, such as "8B up"."""
    ranks: int
    sizes: ProductSizes
    dtype: torch.dtype
    tiles: tuple[tuple[int, int, int, int, int], ...]

    @property
    def name(self) -> str:
        """Unique name of the case."""
        return f"{self.operation} {self.of} tp{self.ranks} {short(self.dtype)}"

    @property
    def rows(self) -> int:
        """Number of rows per rank."""
        return self.sizes.rows // self.ranks

    @property
    def sent_rows(self) -> int:
        """Number of rows that a rank sends to another at once."""
        return self.sizes.rows if self.operation == "product_sum" and self.ranks == 2 else self.rows

    @property
    def capacity(self) -> int:
        """Maximum bytes that a rank sends to another."""
        gathered, scattered = self.rows * self.sizes.depth, self.sent_rows * self.sizes.columns
        return max(gathered, scattered) * self.dtype.itemsize


def llama_cases(ranks: Sequence[int], quick: bool = False) -> list[OverlapCase]:
    """Returns cases of the MLP layers of Llama 3 8B and 70B in bf16; ``quick``: 8B only."""
    models = list(WIDTHS)[: 1 if quick else None]
    return [
        OverlapCase(
            operation=operation,
            of=f"{model} {'up' if operation == 'gather_product' else 'down'}",
            ranks=count,
            sizes=_sizes(operation, *WIDTHS[model], count),
            dtype=torch.bfloat16,
            tiles=TILES,
        )
        for model in models
        for count in ranks
        for operation in OPERATIONS
    ]


def _sizes(operation: Operation, width: int, inner: int, ranks: int) -> ProductSizes:
    if operation == "gather_product":
        return ProductSizes(TOKENS, columns=inner // ranks, depth=width)
    return ProductSizes(TOKENS, columns=width, depth=inner // ranks)


def tiny_cases(ranks: Sequence[int], quick: bool = False) -> list[OverlapCase]:
    """Returns small cases for interpreted kernels; ``quick``: fp32 only."""
    dtypes = (torch.float32,) if quick else (torch.float32, torch.bfloat16)
    return [
        OverlapCase(
            operation=operation,
            of="tiny",
            ranks=count,
            sizes=ProductSizes(count * TINY_ROWS, TINY_COLUMNS, TINY_DEPTH),
            dtype=dtype,
            tiles=TINY_TILES,
        )
        for count in ranks
        for dtype in dtypes
        for operation in OPERATIONS
    ]
