"""Ranks that are parts of one process take turns through the whole protocol; on a GPU they run at once."""

import pytest
import torch

from benchmarks.overlap.cases import OverlapCase, tiny_cases
from benchmarks.overlap.measure import check_ways
from benchmarks.overlap.places import VirtualPlace
from benchmarks.overlap.trial import OverlapTrial, deviating
from engine.kernels.gpu.launch_shapes import Tile
from tests.kernels.interpreter import repair


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


@pytest.mark.long
@pytest.mark.parametrize("case", tiny_cases((2,)), ids=lambda case: case.name)
def test_ranks_that_take_turns_give_what_plain_products_give(case: OverlapCase) -> None:
    repair()
    prove(case, torch.device("cpu"), calls=4)
