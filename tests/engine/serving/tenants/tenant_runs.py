"""Runs of many tenants on one grid of thread ranks, interleaved at random, or one alone."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from engine.config import load_config
from engine.engine import Engine
from engine.parallel.comm.threads import run_thread_ranks
from engine.parallel.comm.world import World
from engine.serving.commands import AdamParameters, Adapter, ForwardBackward, LossCall, OptimStep
from engine.serving.tenants.pool import TenantLimits, TenantPool
from engine.serving.training import TenantTrainer
from tests import models
from tests.engine.serving.test_training import make_data

Tenants = Mapping[str, Adapter | None]
GRIDS: Mapping[str, tuple[int, Mapping[str, Any]]] = MappingProxyType({
    "one rank": (1, {}),
    "tp2": (2, {"parallel": {"tensor": 2}}),
    "pp2": (2, {"parallel": {"pipeline": 2}}),
    "dp2 ZeRO 1": (2, {"zero_optimization": {"stage": 1}}),
    "dp2 ZeRO 2": (2, {"zero_optimization": {"stage": 2}}),
    "dp2 ZeRO 3": (2, {"zero_optimization": {"stage": 3}}),
    "tp2 x pp2": (4, {"parallel": {"tensor": 2, "pipeline": 2}}),
})  # fmt: skip
"""Ranks and settings of each grid."""


@dataclass(frozen=True, slots=True)
class Ran:
    """Run of a rank: trained weights of each tenant, and whether the base kept its bits."""

    weights: Mapping[str, Mapping[str, Tensor]]
    base_kept: bool


def open_pool(world: World | None, settings: Mapping[str, Any], full: int = 2) -> TenantPool:
    """A pool over a tiny Llama."""
    given = {"train_micro_batch_size_per_gpu": 1, **settings}
    config = load_config(given, world.size if world is not None else 1)
    return TenantPool(models.llama, config, TenantLimits(full=full), world=world)


def train(trainer: TenantTrainer, name: str, step: int, pool: TenantPool) -> list[Any]:
    """Calls of one step of a tenant: two requests of data of its own, and an update with its own AdamW parameters."""
    seed = 100 * sum(map(ord, name)) + step
    data = make_data(3, seed)
    adam = AdamParameters(
        lr=1e-3 * (1 + step + seed % 7), eps=1e-8, weight_decay=0.1 * (seed % 2), max_norm=0.1 * (seed % 3)
    )
    calls = [
        partial(trainer.forward_backward, ForwardBackward(name, part, LossCall("cross_entropy")))
        for part in (data[:2], data[2:])
    ]
    return [*calls, partial(trainer.optim_step, OptimStep(name, adam))]


def run(settings: Mapping[str, Any], tenants: Tenants, steps: int, world: World | None = None) -> Ran:
    """Body of a rank: creates the tenants, and makes their calls in a random order that is equal on all ranks."""
    pool = open_pool(world, settings)
    before = placed(pool.base)
    order, turns = random.Random(5), []
    trainers = {}
    for name, adapter in tenants.items():
        trainers[name] = TenantTrainer(pool.create(name, adapter), {})
        turns.append((name, [call for step in range(steps) for call in train(trainers[name], name, step, pool)]))
    while turns:
        name, calls = order.choice(turns)
        pool.get(name)
        calls.pop(0)()
        turns = [turn for turn in turns if turn[1]]
    weights = {}
    for name, adapter in tenants.items():
        state = pool.get(name).full_state_dict()
        weights[name] = {key: value for key, value in state.items() if adapter is None or ".lora_" in key}
    after = placed(pool.base)
    pool.close()
    return Ran(weights, before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before))


def placed(eng: Engine) -> dict[str, Tensor]:
    """Copies of the tensors that the engine of a base has on this rank."""
    runtime = eng._runtime
    held = {f"bucket {flat.bucket.index}": flat.kept.clone() for flat in runtime.frozen}
    inside = {slot.name for flat in runtime.frozen for slot in flat.bucket.slots}
    here = {row.name for row in runtime.plan.table.held_by(runtime.comm.grid.holder())} - inside
    return held | {name: p.detach().clone() for name, p in eng.module.named_parameters() if name in here}


def on(grid: str, tenants: Tenants, steps: int) -> list[Ran]:
    """Runs of all ranks of a grid."""
    ranks, settings = GRIDS[grid]
    return run_thread_ranks(ranks, lambda world: run(settings, tenants, steps, world))


def differing(together: Mapping[str, Tensor], alone: Mapping[str, Tensor]) -> Sequence[str]:
    """Names of tensors with other bits."""
    assert together.keys() == alone.keys()
    return [name for name, value in alone.items() if not torch.equal(value, together[name])]
