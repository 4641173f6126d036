"""Two real ranks: a user's optimizer at stage 1 trains to the same bits as at stage 0, and bad ones are refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.zero.optim.inner_optimizer import OptimizerFactory
from tests.zero.optim.test_sharded_optimizer import Elementwise, Rowwise
from tests.zero.small import batch, start

RunRanks = Callable[..., list[Any]]

USERS: dict[str, OptimizerFactory] = {
    "RMSprop": lambda groups: torch.optim.RMSprop(groups, lr=0.01, momentum=0.5, foreach=False),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.05, foreach=False),
    "Elementwise": Elementwise,
}


def train(name: str, stage: int, changes: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    """Losses, and the weights on rank 0."""
    zero = {"stage": stage, "reduce_bucket_size": 900}
    eng = start({"zero_optimization": zero, "gradient_clipping": 0.1} | changes, USERS[name])
    losses = [eng.train_batch(batch(eng, step)).loss for step in range(4)]
    state = eng.full_state_dict()
    eng.close()
    return losses, state


def compare_stages() -> list[str]:
    """Body of a rank: what differs between the stages."""
    wrong = []
    for name in USERS:
        for changes in ({}, {"bf16": {"enabled": True}}):
            (losses, whole), (again, parts) = (train(name, stage, changes) for stage in (0, 1))
            wrong += [f"{name} {changes} {key}" for key in whole if not torch.equal(whole[key], parts[key])]
            wrong += [f"{name} {changes} losses {losses} {again}"] * (losses != again or losses[0] <= losses[-1])
    return wrong


def test_a_users_optimizer_gives_the_same_bits_at_both_stages(run_ranks: RunRanks) -> None:
    assert run_ranks(compare_stages, 2) == [[], []]


def refuse() -> list[str]:
    """Body of a rank: the sentence at stage 1, then training at stage 0."""
    with pytest.raises(ConfigError) as caught:
        start({"zero_optimization": {"stage": 1}}, Rowwise)
    eng = start({}, Rowwise)
    losses = [eng.train_batch(batch(eng, 0)).loss for _ in range(4)]
    assert losses[-1] < losses[0], losses
    shapes = getattr(eng.optimizer, "shapes", [])
    assert (53, 11) in shapes and (0, 3) in shapes and () in shapes
    eng.close()
    return [str(caught.value)]


def test_an_optimizer_that_needs_whole_parameters_trains_at_stage_0_only(run_ranks: RunRanks) -> None:
    first, second = run_ranks(refuse, 2)
    assert first == second
    assert "optimizer Rowwise is given shards of parameters by zero_optimization.stage 1" in first[0]
