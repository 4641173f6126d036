"""Runs on real text whose stages and tensor ranks send fewer bits, beside exact traffic: int8 within one per cent.

The decoder, the text and the steps are those of ``test_fewer_bits_training``; the figure shows the mean loss of the
last 50 of 300 steps.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.engine.parity.test_fewer_bits_training import LAST, STEPS, losses, off_exact
from tests.selection import wide
from tests.tables import Table

RunRanks = Callable[..., list[Any]]
BOUNDS = {"int8": 0.01, "int4": 0.1}
"""Of the loss; int4 has no promise, its figure is in docs/guides/compression.md."""
WAYS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "int8 between stages": ({"pipeline": 2}, {"pipeline": "int8"}),
    "int8 between stages, error feedback": ({"pipeline": 2}, {"pipeline": "int8", "error_feedback": True}),
    "int4 between stages": ({"pipeline": 2}, {"pipeline": "int4"}),
    "int4 between stages, error feedback": ({"pipeline": 2}, {"pipeline": "int4", "error_feedback": True}),
    "int8 between tensor ranks": ({"tensor": 2}, {"tensor": "int8"}),
    "int4 between tensor ranks": ({"tensor": 2}, {"tensor": "int4"}),
    "int8 between stages and tensor ranks": ({"pipeline": 2, "tensor": 2}, {"pipeline": "int8", "tensor": "int8"}),
}


@pytest.fixture(scope="module")
def table(request: pytest.FixtureRequest) -> Iterator[Table]:
    found = Table("wire", f"mean loss of the last {LAST} of {STEPS} steps")
    yield found
    print(found.render())
    if request.config.getoption("--write-figures"):
        found.write()


@pytest.fixture(scope="module")
def exact() -> dict[str, tuple[float, int]]:
    """(loss, bytes) of exact traffic, by grid."""
    return {}


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("way", [*list(WAYS)[:-1], wide(list(WAYS)[-1])])
def test_the_loss_stays_near_that_of_exact_traffic(
    run_ranks: RunRanks, table: Table, exact: dict[str, tuple[float, int]], way: str
) -> None:
    grid, wire = WAYS[way]
    ranks = 2 ** len(grid)
    if str(grid) not in exact:
        exact[str(grid)] = run_ranks(losses, ranks, {"stage": 0}, {"parallel": grid}, STEPS, seconds=500)[0]
    plain = exact[str(grid)]
    found = run_ranks(losses, ranks, {"stage": 0}, {"parallel": grid, "wire": wire}, STEPS, seconds=500)[0]
    bound = max(BOUNDS[name] for name in BOUNDS if name in way)
    assert off_exact(table, way, plain, found) < bound, f"{found[0]} instead of {plain[0]}"
