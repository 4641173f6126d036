"""Ranks that are parts of one process and share its GPU run the whole protocol of products that communicate."""

import pytest
import torch

from benchmarks.overlap.cases import OPERATIONS, TILES, OverlapCase
from engine.kernels.overlap import Operation, ProductSizes
from tests.kernels.gpu.overlap.test_virtual_ranks import prove

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]  # compilers warn of themselves

TILES_OF = {torch.bfloat16: TILES, torch.float32: ((64, 64, 16, 8, 2),)}
SIZES = ((300, 648, 264), (1024, 1024, 512))
"""Rows of a rank, columns and depth: ragged, and whole tiles."""


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("dtype", TILES_OF, ids=str)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_ranks_of_one_gpu_give_what_plain_products_give(
    operation: Operation, dtype: torch.dtype, ranks: int, sizes: tuple[int, int, int]
) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    rows, columns, depth = sizes
    product = ProductSizes(ranks * rows, columns, depth)
    case = OverlapCase(operation=operation, of="test", ranks=ranks, sizes=product, dtype=dtype, tiles=TILES_OF[dtype])
    prove(case, torch.device("cuda", 0), calls=40)
