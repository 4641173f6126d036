"""Grids of worlds of 64 to 16,384 ranks, and their model. Run as a module, it makes the plan of one world."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from engine.config import Config, load_config
from engine.launch.planner.plan_request import ModelSource
from engine.launch.planner.planned_model import build_model
from engine.parallel.grid import Grid
from engine.planning.cost_model.workload import DecoderShape
from engine.planning.plan import Plan

TRILLION = DecoderShape(layers=128, width=25600, heads=160, vocabulary=51200, context=2048)
"""Decoder with 1 T parameters (Narayanan et al. 2021, table 1)."""
SMALL = DecoderShape(layers=128, width=16, heads=8, vocabulary=64, context=8)
"""Small decoder with as many blocks, for tests."""
BUCKET = 64_000_000
"""Number of elements in a reduction bucket, as in ``trine plan``."""


@dataclass(frozen=True, slots=True)
class ScaledWorld:
    """Number of ranks and their grid."""

    pp: int
    dp: int
    tp: int

    @property
    def size(self) -> int:
        """Total number of ranks."""
        return self.pp * self.dp * self.tp

    def grid(self, rank: int) -> Grid:
        """Returns the grid with ``rank`` as this rank."""
        return Grid(pp=self.pp, dp=self.dp, tp=self.tp, rank=rank)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Sampled ranks: the first, one in the middle of every axis, the last."""
        middle = self.grid(0).rank_at(pp=self.pp // 2, dp=self.dp // 2, tp=self.tp // 2)
        return tuple(sorted({0, middle, self.size - 1}))

    def settings(self) -> Mapping[str, Any]:
        """Returns the configuration: ZeRO 1, and two microbatches of one row per pipeline stage."""
        return {
            "train_batch_size": 2 * self.pp * self.dp,
            "train_micro_batch_size_per_gpu": 1,
            "parallel": {"pipeline": self.pp, "data": self.dp, "tensor": self.tp},
            "zero_optimization": {"stage": 1, "reduce_bucket_size": BUCKET},
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "activation_checkpointing": {"mode": "full"},
            "watchdog": {"enabled": False},
        }

    def config(self) -> Config:
        """Returns the resolved configuration."""
        return load_config(self.settings(), self.size)

    def plan(self, shape: DecoderShape = TRILLION) -> Plan:
        """Plans a decoder of ``shape`` on this world."""
        return build_model(ModelSource(decoder=shape, shape=shape, context=shape.context)).plan(self.config())

    def __str__(self) -> str:
        return f"{self.size:,} = tp{self.tp} x pp{self.pp} x dp{self.dp}"


WORLDS: Mapping[int, ScaledWorld] = MappingProxyType(
    {
        64: ScaledWorld(pp=8, dp=1, tp=8),
        512: ScaledWorld(pp=8, dp=8, tp=8),
        1024: ScaledWorld(pp=8, dp=16, tp=8),
        3072: ScaledWorld(pp=64, dp=6, tp=8),
        4096: ScaledWorld(pp=8, dp=64, tp=8),
        16384: ScaledWorld(pp=8, dp=256, tp=8),
    }
)
"""Worlds by number of ranks; all but one grow along data ranks only."""

if __name__ == "__main__":
    scaled = WORLDS[int(sys.argv[1])]
    scaled.plan().rank(scaled.size - 1)
