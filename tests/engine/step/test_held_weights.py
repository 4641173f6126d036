"""Late backwards: after updates, a backward through an earlier forward has the gradient of that forward's weights."""

import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import engine
from engine.errors import EngineError
from engine.parallel.comm.threads import run_thread_ranks
from engine.parallel.comm.world import World
from tests import models

GRIDS: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "one": ({}, {"zero_optimization": {"stage": 0}}),
    "dp2 ZeRO-1": ({"data": 2}, {"zero_optimization": {"stage": 1}}),
    "dp2 ZeRO-2": ({"data": 2}, {"zero_optimization": {"stage": 2, "reduce": "microbatch"}}),
    "dp2 ZeRO-3": ({"data": 2}, {"zero_optimization": {"stage": 3}}),
    "dp2 ZeRO-3 bf16 recomputed": (
        {"data": 2},
        {
            "zero_optimization": {"stage": 3}, "bf16": {"enabled": True},
            "activation_checkpointing": {"mode": "full"},
        },
    ),
    "tp2": ({"tensor": 2}, {"zero_optimization": {"stage": 1}}),
    "pp2": ({"pipeline": 2}, {"zero_optimization": {"stage": 1}}),
    "dp2 x pp2 ZeRO-3": ({"data": 2, "pipeline": 2}, {"zero_optimization": {"stage": 3}}),
}  # fmt: skip


def rows(seed: int) -> Tensor:
    """Draw token ids."""
    return torch.randint(models.VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(seed))


def gradient_of(world: World, grid: str, updates: int) -> dict[str, Tensor]:
    """Return the gradient of the first forward, whose backward comes after ``updates``."""
    parallel, options = GRIDS[grid]
    config = {
        "train_micro_batch_size_per_gpu": 2, "parallel": dict(parallel),
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}, **options,
    }  # fmt: skip
    with engine.initialize(models.llama(), config, example_batch={"input_ids": rows(0)}, world=world) as eng:
        if eng.config.pp > 1:
            eng.open_pipeline()

        def loss(seed: int) -> Tensor:
            found: Tensor = eng({"input_ids": rows(seed)}).logits.float().square().mean()
            return found

        first = loss(eng.grid.coord().dp)
        if not updates:
            eng.backward(first)
        else:
            held = eng.hold_weights()
            assert eng.hold_weights() is held and held.bytes == 0, "a hold copies nothing"
            for update in range(updates):
                eng.backward(loss(5 + update))
                eng.step()
            before = {name: value.clone() for name, value in eng.full_state_dict().items()}
            stored = sum(value.nbytes for value in held.copies or ())
            loss(8)  # at ZeRO 3 it leaves newer weights gathered
            with held.restored():
                eng.backward(first)
            after = eng.full_state_dict()
            assert all(torch.equal(before[name], value) for name, value in after.items())
            assert held.bytes == stored > 0
        with eng.gradients() as found:
            gradient = {name: value.clone() for name, value in found.items()}
        eng.step()
        eng.backward(loss(9))  # the next forward and backward find everything as always
        eng.step()
        return gradient


@pytest.mark.parametrize("grid", GRIDS)
def test_a_late_backward_has_the_gradient_of_its_own_weights(grid: str) -> None:
    size = int(np.prod(list(GRIDS[grid][0].values()), dtype=int))
    expected = run_thread_ranks(size, lambda world: gradient_of(world, grid, 0))
    for updates in (1, 2):
        found = run_thread_ranks(size, partial(gradient_of, grid=grid, updates=updates))
        for late, own in zip(found, expected, strict=True):
            assert late and all(torch.equal(late[name], value) for name, value in own.items())


def test_holds_of_one_version_share_a_copy_that_ends_with_them() -> None:
    def trained(world: World) -> None:
        config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
        with engine.initialize(models.llama(), config, example_batch={"input_ids": rows(0)}, world=world) as eng:
            losses = [eng({"input_ids": rows(seed)}).logits.square().mean() for seed in range(3)]
            one, other = eng.hold_weights(), eng.hold_weights()
            eng.backward(losses[0])
            eng.step()
            part = weakref.ref((one.copies or ())[0])
            assert one.copies is other.copies
            with pytest.raises(EngineError, match="weights have changed since the forward"):
                eng.backward(losses[1])
            with one.restored():
                eng.backward(losses[2])
            eng.step()
            del one
            assert part() is not None
            del other
            assert part() is None, "the copy of a version ends with its last hold"

    run_thread_ranks(1, trained)
