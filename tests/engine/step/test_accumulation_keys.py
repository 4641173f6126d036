"""Two keys that decide by what the sum of gradients is divided: whose call ends a step, and what joins data ranks."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.parallel.comm.threads import run_thread_ranks
from engine.parallel.comm.world import World

OPTIMIZER = {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-5}}
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "gradient_clipping": 0.05,
    "optimizer": OPTIMIZER, "checkpoint": {"async": False},
}  # fmt: skip
BACKWARDS = (3, 1, 4)
"""Microbatches of each step."""


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def rows(step: int, micro: int, rank: int) -> Tensor:
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank))


def loss_of(model: Callable[..., Any], *place: int) -> Tensor:
    loss: Tensor = model(rows(*place)).square().mean()
    return loss


def one_process(divisor: float, ranks: int, backwards: tuple[int, ...]) -> tuple[list[float], dict[str, Tensor]]:
    """Norms and weights of plain torch, whose gradient is the sum over microbatches and ranks by ``divisor``."""
    model, norms = net(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5)
    for step, count in enumerate(backwards):
        for micro in range(count):
            for rank in range(ranks):
                torch.autograd.backward(loss_of(model, step, micro, rank) / divisor)
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.05)))
        optimizer.step()
        optimizer.zero_grad()
    return norms, model.state_dict()


def train(config: dict[str, Any], backwards: tuple[int, ...], world: World) -> tuple[list[float], dict[str, Tensor]]:
    eng, norms = engine.initialize(net(), config, world=world), []
    for step, count in enumerate(backwards):
        for micro in range(count):
            eng.backward(loss_of(eng, step, micro, world.rank))
            assert not (micro < count - 1 and eng.is_gradient_accumulation_boundary())
        report = eng.step()
        assert report is not None
        norms.append(report.grad_norm)
    state = eng.full_state_dict()
    eng.close()
    return norms, state


def compare(config: dict[str, Any], divisor: float, ranks: int, backwards: tuple[int, ...]) -> None:
    norms, state = run_thread_ranks(ranks, partial(train, config, backwards))[0]
    expected, weights = one_process(divisor, ranks, backwards)
    assert norms == pytest.approx(expected, rel=1e-5)
    assert all(torch.allclose(state[name], value, atol=1e-5) for name, value in weights.items())


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_each_step_updates_where_the_loop_owns_the_accumulation(stage: int) -> None:
    config = CONFIG | {"managed_gradient_accumulation": False, "zero_optimization": {"stage": stage}}
    compare(config, 4 * 2, 2, BACKWARDS)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_gradients_of_data_ranks_are_added(stage: int) -> None:
    config = CONFIG | {"gradient_allreduce_op": "sum", "zero_optimization": {"stage": stage}}
    compare(config, 4, 2, (4, 4))


def test_gradients_of_data_ranks_are_added_in_a_whole_step() -> None:
    def whole(op: str, world: World) -> tuple[float, float]:
        eng = engine.initialize(
            net(), CONFIG | {"gradient_allreduce_op": op}, lambda out, _: out.square().mean(), world=world
        )
        report = eng.train_batch(torch.cat([rows(0, micro, world.rank) for micro in range(4)]))
        eng.close()
        return report.loss, report.grad_norm

    mean, added = (run_thread_ranks(2, partial(whole, op))[0] for op in ("mean", "sum"))
    assert added == pytest.approx((mean[0], 2 * mean[1]))


def test_a_weighted_loss_and_a_pipeline_are_refused() -> None:
    config = CONFIG | {"managed_gradient_accumulation": False}
    eng = engine.initialize(net(), config)
    with pytest.raises(engine.EngineError, match="managed_gradient_accumulation is false and the loss"):
        eng.backward((loss_of(eng, 0, 0, 0), 2.0))
    eng.close()
    with pytest.raises(engine.ConfigError, match=r"managed_gradient_accumulation: false with parallel.pipeline 2"):
        engine.load_config(config | {"parallel": {"pipeline": 2}})
