"""The same seed gives the same bits: losses, weights, moments and counters of a run that is made twice."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.engine.checkpoint.lasting import GRIDS, course, digest, settings, world_of

RunRanks = Callable[..., list[Any]]
STEPS = 100


def trained(grid: str, steps: int) -> tuple[list[float], str]:
    """Losses of a run, and a digest of all that it has made on this rank."""
    with course(settings(grid)) as run:
        return run.until(steps), digest(run.eng)


def twice(grid: str, steps: int) -> bool:
    """Body of a rank: whether two runs are the same; they are not all alike, since one more step makes others."""
    first, again, further = trained(grid, steps), trained(grid, steps), trained(grid, steps + 1)
    assert first[1] != further[1] and first[0] == further[0][:-1] and len(set(first[0])) == steps
    return first == again


@pytest.mark.long
@pytest.mark.parametrize("grid", GRIDS)
def test_a_run_repeats_to_the_bit(run_ranks: RunRanks, grid: str) -> None:
    assert run_ranks(twice, world_of(grid), grid, STEPS, seconds=280) == [True] * world_of(grid)
    print(f"{STEPS} steps twice on {grid}")
