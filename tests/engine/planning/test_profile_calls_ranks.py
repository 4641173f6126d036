"""All ranks plan with what rank 0 has measured, or none starts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import engine
from engine.errors import EngineError
from tests.engine.planning.test_profile_calls import ROWS, WIDTH, Block, Chain, config, example, slow_at
from tests.selection import wide

RunRanks = Callable[..., list[Any]]


def differently_slow(settings: dict[str, Any], with_example: bool) -> Any:
    """Each rank finds another block slow; what counts is what rank 0 finds."""
    rank = torch.distributed.get_rank()
    model = slow_at(0 if rank == 0 else 5)
    eng = engine.initialize(model, settings, example_batch=example() if with_example else None)
    losses = [eng.train_batch(torch.ones(4 * ROWS, WIDTH)).loss for _ in range(2)]
    assert eng.plan.partition is not None
    return eng.plan.partition.boundaries, eng.plan.decision, eng.plan.schedule, losses


@pytest.mark.parametrize("with_example", [True, wide(False)])
@pytest.mark.parametrize("parallel", [
    {"balance": "time"}, wide({"balance": "time", "schedule": "auto"}),
    {"balance": "time", "schedule": "auto", "activation_limit_bytes": 10**9},
])  # fmt: skip
def test_all_ranks_plan_alike(run_ranks: RunRanks, parallel: dict[str, Any], with_example: bool) -> None:
    settings = config(**parallel).to_json()
    first, second = run_ranks(differently_slow, 2, settings, with_example)
    assert first == second
    assert first[3][1] < first[3][0]
    assert ("blocks.1", 0) in first[0]  # where the slow block of rank 0 ends


class Breaks(Chain):
    """Cannot be followed on one rank."""

    def __init__(self, rank: int) -> None:
        super().__init__(Block(), Block())
        self.rank = rank

    def forward(self, x: Tensor) -> Tensor:
        if torch.distributed.get_rank() == self.rank:
            raise ValueError("here")
        return super().forward(x)


def breaking(rank: int) -> str:
    try:
        engine.initialize(Breaks(rank), config(balance="time"), example_batch=example())
    except (EngineError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize("rank", [0, 1])
def test_what_fails_on_one_rank_fails_on_all(run_ranks: RunRanks, rank: int) -> None:
    said = run_ranks(breaking, 2, rank, seconds=60)
    assert said[rank] == "ValueError: here"
    assert said[1 - rank].startswith(f"EngineError: rank {rank} could not prepare")
