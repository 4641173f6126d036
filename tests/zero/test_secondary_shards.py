"""Engines whose nodes keep secondary shards (hpZ): bits of a run without them, bytes as planned, nothing stale."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.config import load_config
from engine.engine import Engine
from engine.errors import ConfigError
from engine.parallel.comm.threads.thread_backend import run_thread_ranks
from engine.parallel.comm.world import World
from tests.selection import wide

RunRanks = Callable[..., list[Any]]
WIDTH, ROWS = 6, 2
ZERO3: dict[str, Any] = {"stage": 3}
PAIRS: dict[str, Any] = ZERO3 | {"zero_hpz_partition_size": 2}
BF16: dict[str, Any] = {"bf16": {"enabled": True}}


class Blocks(nn.Module):
    """Four blocks between two layers, one of which is frozen; gives its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 9), nn.GELU(), nn.Linear(9, WIDTH)) for _ in "1234")
        self.last = nn.Linear(WIDTH, 3)
        self.first.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """Mean square of the outputs, fp32."""
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x).float().square().mean()


def rows(eng: Engine, step: int) -> Tensor:
    """This data rank's share of a step."""
    generator = torch.Generator().manual_seed(100 * step + eng.grid.coord().dp)
    return torch.randn(ROWS * eng.config.accumulation, WIDTH, generator=generator)


def begin(changes: dict[str, Any], world: World | None = None) -> Engine:
    """An engine over fresh blocks."""
    torch.manual_seed(3)
    config = {"train_micro_batch_size_per_gpu": ROWS, "gradient_clipping": 0.5} | changes
    return engine.initialize(Blocks(), config, example_batch=torch.ones(ROWS, WIDTH), world=world)


def on_threads(ranks: int, changes: dict[str, Any], body: Callable[[Engine], Any]) -> list[Any]:
    """``body(engine)`` of every rank, as threads."""

    def rank(world: World) -> Any:
        with begin(changes, world) as eng:
            return body(eng)

    return run_thread_ranks(ranks, rank)


def run(eng: Engine) -> tuple[list[float], dict[str, Tensor], list[str]]:
    """(losses of steps and an evaluation between them, weights, what steps have sent beside their plan)."""
    losses, wrong = [], []
    for step in range(3):
        before = eng.sent
        losses.append(eng.train_batch(rows(eng, step)).loss)
        found = {(r.axis, r.label): (r.calls, r.bytes) for r in eng.sent.since(before).rows() if r.label != "used"}
        planned = {(r.axis, r.label): (r.calls, r.bytes) for r in eng.plan.rank(eng.grid.rank).traffic}
        if found != planned:
            wrong.append(f"step {step}: found {found}, planned {planned}")
        losses.append(eng.eval_batch(rows(eng, 50 + step)).loss)
    return losses, eng.full_state_dict(), wrong


def alike(left: tuple[Any, ...], right: tuple[Any, ...]) -> bool:
    """Equal losses and weights, to the bit."""
    same = left[1].keys() == right[1].keys() and all(torch.equal(v, right[1][k]) for k, v in left[1].items())
    return left[0] == right[0] and same


def test_two_nodes_train_to_the_bits_of_none() -> None:
    plain, shards = (on_threads(4, {"zero_optimization": zero}, run) for zero in (ZERO3, PAIRS))
    for left, right in zip(plain, shards, strict=True):
        assert right[2] == [] and alike(left, right)
