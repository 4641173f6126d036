"""Ranks that are parts of one process run the whole protocol on its device: by turns on a CPU, at once on one GPU
(``pytest -m gpu tests/kernels``)."""

import pytest
import torch

from benchmarks.overlap.cases import OPERATIONS, TILES, OverlapCase, tiny_cases
from benchmarks.overlap.measure import check_ways
from benchmarks.overlap.places import VirtualPlace
from benchmarks.overlap.trial import OverlapTrial, deviating
from engine.kernels.gpu.launch_shapes import Tile
from engine.kernels.overlap_choices import Operation, ProductSizes
from tests.kernels.interpreter import repair

TILES_OF = {torch.bfloat16: TILES, torch.float32: ((64, 64, 16, 8, 2),)}
SIZES = ((300, 648, 264), (1024, 1024, 512))
"""Rows of a rank, columns and depth: ragged, and whole tiles."""


def prove(case: OverlapCase, device: torch.device, calls: int) -> None:
    """Every way is right in every tile, and every call of our kernels with other content too."""
    trial = OverlapTrial(case, place := VirtualPlace(case.ranks, device))
    tiles = [Tile(*sizes, parts=2, described=False) for sizes in case.tiles]
    for tile in tiles:
        found = check_ways(trial, tile, place)
        assert found["passed"] and all(row["passed"] for row in found["ways"].values()), (case.name, tile, found)
    ways = trial.ways(tiles[0])
    for call in range(1, calls):
        trial.fill(whole_numbers=True, turn=call)
        wanted = trial.expected()
        for name in ("fused", "copied"):
            if name in ways:
                assert not any(deviating(ways[name](), wanted)), (case.name, name, call)
                trial.check()


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("dtype", TILES_OF, ids=str)
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.gpu
@pytest.mark.filterwarnings("default")  # compilers warn of themselves
def test_ranks_of_one_gpu_give_what_plain_products_give(
    operation: Operation, dtype: torch.dtype, ranks: int, sizes: tuple[int, int, int]
) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    rows, columns, depth = sizes
    product = ProductSizes(ranks * rows, columns, depth)
    case = OverlapCase(operation=operation, of="test", ranks=ranks, sizes=product, dtype=dtype, tiles=TILES_OF[dtype])
    prove(case, torch.device("cuda", 0), calls=40)


@pytest.mark.long
@pytest.mark.parametrize("case", tiny_cases((2,)), ids=lambda case: case.name)
def test_ranks_that_take_turns_give_what_plain_products_give(case: OverlapCase) -> None:
    repair()
    prove(case, torch.device("cpu"), calls=4)
