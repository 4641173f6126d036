"""What sharded parameters cannot do is said, on every rank, before anything is sent."""

from collections.abc import Callable
from typing import Any

import pytest

from engine.errors import EngineError
from tests.zero.awkward import Chain
from tests.zero.test_gather_ranks import batch, start

RunRanks = Callable[..., list[Any]]


def message(act: Callable[[], object]) -> str:
    """What an EngineError says."""
    try:
        act()
    except EngineError as error:
        return str(error)
    return ""


def opened(grid: dict[str, int]) -> list[str]:
    """Body of a rank: what is refused while parameters of the first stage are open, and that training goes on."""
    with start(Chain(), {"stage": 3}, parallel=grid) as eng:
        eng.train_batch(batch(eng, 0))
        with eng.full_parameters("embed.*"):
            calls: tuple[Callable[[], object], ...] = (
                lambda: eng.train_batch(batch(eng, 1)),
                lambda: eng.eval_batch(batch(eng, 1)),
                eng.full_state_dict,
            )
            told = [message(call) for call in calls]
        eng.train_batch(batch(eng, 1))
    return told


@pytest.mark.parametrize("grid", [{"data": 2}, {"data": 2, "pipeline": 2}], ids=str)
def test_steps_and_states_inside_full_parameters_are_refused_on_every_stage(
    run_ranks: RunRanks, grid: dict[str, int]
) -> None:
    for told in run_ranks(opened, 2 * grid.get("pipeline", 1), grid):
        end = " inside full_parameters, which holds them open; leave its `with` block first."
        assert told == [what + end for what in ("a step", "a step", "full_state_dict")]
