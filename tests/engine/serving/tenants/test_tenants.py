"""Many tenants over one grid: each has the bits of its run alone, and the base is stored once."""

import pytest

from engine.serving.commands import Adapter
from tests.engine.serving.tenants.tenant_runs import GRIDS, Tenants, differing, on

pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning"),  # PEFT asks for it
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:peft"),
]
FEW: Tenants = {
    "small": Adapter(1, seed=1), "attention": Adapter(8, 2, True, False, False), "full": None,
    "rest": Adapter(64, 3, False, True, True), "other": None,
}  # fmt: skip
MANY: Tenants = {
    f"t{number}": Adapter(1 + number * 4, number, number % 3 != 1, number % 3 != 2, number % 2 == 0)
    for number in range(16)
} | {"full": None, "other": None}


def have_bits_of_runs_alone(grid: str, tenants: Tenants, steps: int) -> None:
    """Compares a run of all tenants with a run of each."""
    together = on(grid, tenants, steps)
    assert all(rank.base_kept for rank in together)
    for name, adapter in tenants.items():
        alone = on(grid, {name: adapter}, steps)
        weights = together[0].weights[name]
        assert weights and not differing(weights, alone[0].weights[name]), (grid, name)


def test_tenants_have_the_bits_of_their_runs_alone() -> None:
    have_bits_of_runs_alone("one rank", FEW, 2)


@pytest.mark.long
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("grid", GRIDS)
def test_sixteen_tenants_and_two_full_ones(grid: str) -> None:
    have_bits_of_runs_alone(grid, MANY, 3)
