"""Set-up and one training step of one rank by the real engine; the backend imitates the other ranks."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import engine
from benchmarks.scale.worlds import SMALL, ScaledWorld
from engine.launch.planner.planned_model import KNOWN_STYLES
from engine.models.decoder import Decoder, DecoderConfig, loss_sum
from engine.parallel.comm.backend import RecordingBackend, Reduction, Wait
from engine.parallel.comm.world import World
from engine.parallel.grid import Axis
from engine.planning.budgets import CONTROL_SCALARS
from engine.step.state import StepTotals

_WEIGHT = StepTotals._fields.index("weight")


class AlikeBackend(RecordingBackend):
    """Backend without communication, in which all other ranks have this rank's data."""

    def all_reduce(self, tensor: Tensor, axis: Axis, op: Reduction = "sum") -> Wait:
        """Leaves ``tensor`` unchanged, except that the step's weight is at least 1."""
        if axis == "world" and op == "sum" and tensor.numel() == CONTROL_SCALARS:
            tensor[_WEIGHT].clamp_(min=1.0)
        return lambda: None

    def all_gather(self, full: Tensor, shard: Tensor, axis: Axis) -> Wait:
        """Copies ``shard`` to every slice of ``full``."""
        full.view(self._grid.size(axis), -1).copy_(shard.clone().view(1, -1))
        return lambda: None

    def gather_parameters(
        self, pairs: Sequence[tuple[Tensor, Tensor]], within: int | None = None, axis: Axis | None = None
    ) -> Wait:
        """Copies each shard to every slice of its full tensor."""
        ranks = within or self._grid.size(axis or self._grid.shard_line)
        for full, shard in pairs:
            full.view(ranks, -1).copy_(shard.clone().view(1, -1))
        return lambda: None


@dataclass(frozen=True, slots=True)
class ReplayedRank:
    """Traffic of one replayed rank."""

    setup_calls: int
    setup_bytes: int
    step_calls: int
    """Number of collectives and messages in a step."""
    step_bytes: int
    by_axis: Counter[str]
    """Number of calls in a step, by axis."""


def replay(world: ScaledWorld, rank: int) -> ReplayedRank:
    """Starts the engine as ``rank`` on a small decoder with a block per stage, and trains one step."""
    shape = SMALL
    torch.manual_seed(1)
    with torch.device("meta"):
        model = Decoder(
            DecoderConfig(
                vocabulary=shape.vocabulary,
                layers=world.pp,
                width=shape.width,
                heads=shape.heads,
                context=shape.context,
            )
        )
    ids = torch.zeros(2 * world.pp, shape.context, dtype=torch.int64)
    batch = {"input_ids": ids, "labels": ids}
    example = {name: rows[:1] for name, rows in batch.items()}
    here = World(rank, world.size, 0, torch.device("cpu"), connect=lambda grid: AlikeBackend(grid))
    with engine.initialize(model, _settings(world), loss_sum, example, world=here) as eng:
        before = eng.sent
        eng.train_batch(batch)
        rows = eng.sent.since(before).rows()
        started = before.rows()
    calls: Counter[str] = Counter()
    for row in rows:
        calls[row.axis] += row.calls
    return ReplayedRank(
        setup_calls=sum(row.calls for row in started),
        setup_bytes=sum(row.bytes for row in started),
        step_calls=calls.total(),
        step_bytes=sum(row.bytes for row in rows),
        by_axis=calls,
    )


def _settings(world: ScaledWorld) -> dict[str, Any]:
    """Those of the world, in fp32, with the tensor plan given: every process would search the same one."""
    settings = dict(world.settings())
    settings["parallel"] |= {"tensor_plan": dict(KNOWN_STYLES["decoder"]), "prove_plan": False, "check_replicas": False}
    return settings | {"bf16": {"enabled": False}, "activation_checkpointing": {"mode": "none"}}
