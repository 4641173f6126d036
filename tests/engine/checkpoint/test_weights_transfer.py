"""An engine takes the weights of another one, whatever the two grids and precisions are."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
import torch

import engine
from engine.parallel.comm.threads import run_thread_ranks
from engine.parallel.comm.world import World
from tests import models
from tests.engine.every_grid import GRIDS as EVERY
from tests.engine.step.test_user_loop import loss_of
from tests.engine.test_training_changes import ROWS, data, settings
from tests.selection import wide

RunRanks = Callable[..., list[Any]]
GRIDS: dict[str, tuple[dict[str, int], int, dict[str, Any]]] = {
    "dp2-zero1": ({"data": 2}, 1, {}),
    "dp2-zero3": ({"data": 2}, 3, {}),
    "tp2": ({"data": 1, "tensor": 2}, 0, {}),
    "pp2": ({"data": 1, "pipeline": 2}, 0, {}),
    "dp2-zero3-bf16": ({"data": 2}, 3, {"bf16": {"enabled": True}}),
    **{name: (*EVERY[name], {}) for name in ("dp2-zero0", "dp2-zero2", "dp2-tp2-zero3", "dp2-pp2-zero3")},
}


class WithBuffer(torch.nn.Module):
    """A decoder whose forward counts, in a buffer that belongs to the last stage."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = models.decoder()
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, ids: torch.Tensor) -> Any:
        return self.inner(ids) + 0 * self.get_buffer("seen").sum()


def transferred(source: str, target: str) -> dict[str, float]:
    """Body of a rank: what differs after the target has taken the weights of a source that has trained; on rank 0."""
    example = data(1)[0][: ROWS // 2]
    engines = []
    for name in (source, target):
        grid, stage, more = GRIDS[name]
        engines.append(engine.initialize(WithBuffer(), settings(grid, stage, **more), loss_of, example_batch=example))
    policy, follower = engines
    with policy, follower:
        policy.module.get_buffer("seen").fill_(3.5)
        for ids in data(policy.grid.dp)[:2]:
            policy.train_batch(ids.chunk(policy.grid.dp)[policy.grid.coord().dp])
        follower.copy_weights_from(policy)
        theirs, own = policy.full_state_dict(), follower.full_state_dict()
        far = {name: float((own[name].float() - value.float()).abs().max()) for name, value in theirs.items()}
        ids = data(1)[3]
        logits = follower.predict(ids)  # the parameters themselves have followed too
        if theirs:
            model = WithBuffer()
            model.load_state_dict({name: value.float() for name, value in theirs.items()})
            with torch.no_grad():
                far["logits"] = float((model(ids) - logits.float()).abs().max()) / 10
        return far


def long(*names: str) -> list[Any]:
    return [wide(name) for name in names]


@pytest.mark.parametrize(
    "source", ["tp2", *long("dp2-zero3", "pp2", "dp2-zero0", "dp2-zero1", "dp2-zero2", "dp2-zero3-bf16")]
)
@pytest.mark.parametrize("target", ["tp2", *long("dp2-zero1", "dp2-zero0", "dp2-zero2", "dp2-zero3", "pp2")])
def test_weights_follow_over_any_two_grids(source: str, target: str, run_ranks: RunRanks) -> None:
    far = run_ranks(transferred, 2, source, target)[0]
    assert "seen" in far and max(far.values()) <= (4e-3 if "bf16" in source else 1e-6)


@pytest.mark.long
@pytest.mark.parametrize("target", ["dp2-tp2-zero3", "dp2-pp2-zero3"])
@pytest.mark.parametrize("source", ["dp2-tp2-zero3", "dp2-pp2-zero3"])
def test_weights_follow_over_four_ranks(source: str, target: str, run_ranks: RunRanks) -> None:
    far = run_ranks(transferred, 4, source, target)[0]
    assert "seen" in far and max(far.values()) <= 1e-6


def test_masters_are_taken_exactly(run_ranks: RunRanks) -> None:
    """The full state of a bf16 engine is rounded; a policy in bf16 on both sides has equal masters all the same."""
    assert run_ranks(masters_differ, 2)[0] == 0.0


def masters_differ() -> float:
    grid, stage, more = GRIDS["dp2-zero3-bf16"]
    engines = [
        engine.initialize(models.decoder(), settings(grid, which, **more), loss_of, example_batch=data(1)[0][:2])
        for which in (stage, 1)
    ]
    engines[0].train_batch(data(1)[0])
    engines[1].copy_weights_from(engines[0])
    with engines[0].masters() as theirs, engines[1].masters() as own:
        return max(float((own[name] - value).abs().max()) for name, value in theirs.items())


@pytest.mark.parametrize("bf16", [{"enabled": True}, {"enabled": True, "bf16_master_weights_and_grads": True}])
def test_weights_in_the_dtype_of_the_forward_are_taken(bf16: dict[str, Any]) -> None:
    """Frozen weights have no masters, and without masters no weight has the dtype of the model."""
    engines = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8).requires_grad_(False), torch.nn.Linear(8, 8))
        config = {"train_batch_size": 2, "bf16": bf16, "optimizer": {"type": "AdamW"}}
        engines.append(engine.initialize(model, config, lambda output, _: output.sum(), example_batch=torch.ones(2, 8)))
    with engines[0] as policy, engines[1] as follower:
        follower.copy_weights_from(policy)
        theirs, own = policy.full_state_dict(), follower.full_state_dict()
        assert theirs.keys() == own.keys() and all(torch.equal(own[name], theirs[name]) for name in theirs)


class Replacing(torch.nn.Module):
    """Layer that replaces its buffer in a forward by one of another dtype, or of another shape."""

    seen: torch.Tensor

    def __init__(self, grows: bool) -> None:
        super().__init__()
        self.layer, self.grows = torch.nn.Linear(8, 8), grows
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = torch.ones(5) if self.grows else self.seen.double() + 1
        return torch.nn.functional.linear(x, self.layer.weight)


def replaced(grows: bool, world: World) -> tuple[dict[str, Any], dict[str, Any]]:
    """Body of a rank: full states of a policy and of an engine with its weights."""

    def model() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), Replacing(grows))

    config = {"train_batch_size": 2, "parallel": {"pipeline": 2}, "optimizer": {"type": "AdamW"}}
    with ExitStack() as stack:
        policy, follower = (
            stack.enter_context(engine.initialize(model, config, loss_of_output, torch.ones(2, 8), world=world))
            for _ in range(2)
        )
        policy.train_batch(torch.ones(2, 8))
        state = policy.full_state_dict()
        if grows:
            with pytest.raises(engine.EngineError, match=r"'2.seen' is \[5\] in the other engine and \[2\]"):
                follower.copy_weights_from(policy)
            policy.load_full_state_dict(state)
            return state, policy.full_state_dict()
        follower.copy_weights_from(policy)
        return state, follower.full_state_dict()


def loss_of_output(output: torch.Tensor, _: Any) -> torch.Tensor:
    return output.square().mean()


@pytest.mark.parametrize("grows", [False, True])
def test_a_buffer_that_only_its_stage_has_replaced_is_gathered_and_taken(grows: bool) -> None:
    state, again = run_thread_ranks(2, partial(replaced, grows))[0]
    assert state["2.seen"].tolist() == ([1.0] * 5 if grows else [1.0] * 2)
    assert state.keys() == again.keys() and all(torch.equal(again[name], state[name]) for name in state)


def test_another_model_is_refused() -> None:
    config = settings({"data": 1}, 0)
    small, large = models.decoder(), models.decoder(layers=3)
    with engine.initialize(small, config, loss_of) as one, engine.initialize(large, config, loss_of) as other:
        with pytest.raises(engine.EngineError) as caught:
            one.copy_weights_from(other)
        assert str(caught.value) == (
            "copy_weights_from: 'blocks.2.attention.key.bias' is [32] in the other engine and nothing in this one; "
            "build both with the same model."
        )
