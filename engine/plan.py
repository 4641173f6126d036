"""The plan: what every rank holds and sends. Printed without processes, executed as it is.

Built from shapes alone, so a model on the meta device will do. The banner prints it, the engine takes
its layout from it, and the measured bytes are compared with it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import nn

from engine.config import Config
from engine.errors import PlanError
from engine.groups import assign_groups
from engine.parallel.grid import Coord, Grid
from engine.parallel.shards import ShardTable, build_table
from engine.parallel.traffic import Op, Tally, Traffic, sent_bytes
from engine.precision import Precision, make_precision
from engine.zero.layout import FlatLayout, Item, build_layout
from engine.zero.optimizer import GroupOptions

CONTROL_SCALARS = 5
"""fp64 values that one step sums over all ranks: loss, weight, norm squared, tokens, problems."""


@dataclass(frozen=True, slots=True)
class RankPlan:
    """What one rank holds between steps and sends in one step."""

    coord: Coord
    parameters: int
    """Elements of the parameters that take part in forward here, without padding."""
    state_bytes: Mapping[str, int]
    """Bytes by kind: parameters, frozen parameters, gradients, master, optimizer."""
    traffic: tuple[Traffic, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """Grid, shard table, flat layouts and budgets of one run."""

    config: Config
    table: ShardTable
    layouts: Mapping[tuple[int, int], FlatLayout]
    """By (pipeline stage, tensor coordinate)."""
    groups: tuple[GroupOptions, ...]
    precision: Precision
    moments: int | None
    """Optimizer values per element; None when the optimizer is the user's and we cannot know."""
    notes: tuple[str, ...]

    def grid(self, rank: int) -> Grid:
        """The grid as ``rank`` sees it."""
        return Grid(self.config.pp, self.config.dp, self.config.tp, rank)

    def layout(self, coord: Coord) -> FlatLayout:
        """The flat layout of a position."""
        return self.layouts[coord.pp, coord.tp]

    def rank(self, rank: int) -> RankPlan:
        """What ``rank`` holds and sends; pure arithmetic."""
        coord = self.grid(rank).coord()
        rows = self.table.on_stage(coord.pp)
        held = sum(prod(row.local_shape(coord.tp)) for row in rows)
        return RankPlan(coord, held, self._state(coord), self._traffic(coord))

    def _state(self, coord: Coord) -> dict[str, int]:
        share = self.config.dp if self.config.zero_optimization.stage else 1
        state = {"parameters": 0, "frozen parameters": 0, "gradients": 0, "master": 0, "optimizer": 0}
        for name, elements in self.layout(coord).elements_by_dtype().items():
            narrow, wide = (dtype.itemsize for dtype in _widths(name))
            state["parameters"] += elements * narrow
            state["gradients"] += elements * wide
            state["master"] += elements // share * wide if wide != narrow else 0
            state["optimizer"] += elements // share * wide * (self.moments or 0)
        for row in self.table.on_stage(coord.pp):
            if not row.trainable:
                dtype = self.precision.compute if row.dtype.is_floating_point else None
                state["frozen parameters"] += prod(row.local_shape(coord.tp)) * (dtype or row.dtype).itemsize
        return state

    def _traffic(self, coord: Coord) -> tuple[Traffic, ...]:
        ranks, tally = self.config.dp, Tally()
        for bucket in self.layout(coord).buckets if ranks > 1 else ():
            narrow, wide = _widths(bucket.dtype)
            wire = (self.precision.wire or wide).itemsize
            sharded = self.config.zero_optimization.stage > 0
            op: Op = "reduce_scatter" if sharded else "all_reduce"
            tally.add(Traffic("dp", "gradients", 1, sent_bytes(op, bucket.elements * wire, ranks)))
            if sharded:
                gathered = sent_bytes("all_gather", bucket.elements * narrow.itemsize, ranks)
                tally.add(Traffic("dp", "parameters", 1, gathered))
        world = self.grid(0).world_size
        if world > 1:
            tally.add(Traffic("world", "control", 1, sent_bytes("all_reduce", CONTROL_SCALARS * 8, world)))
        return tally.rows()


def build_plan(model: nn.Module, config: Config, own_optimizer: bool = False) -> Plan:
    """Plan a run of ``model`` under a resolved configuration. Reads shapes, dtypes and names only.

    With ``own_optimizer`` the user brings the optimizer and its state is not known.

    Raises:
        ConfigError: a pattern in the optimizer groups matches nothing.
        PlanError: no trainable parameter, or one whose dtype cannot be trained.
    """
    assigned, groups = assign_groups(model, config.optimizer)
    table = build_table(model, assigned, config.tp)
    precision = make_precision(config)
    if not assigned:
        raise PlanError("the model has no trainable parameter; set requires_grad on what is to be trained.")
    layouts = {
        (stage, tp): build_layout(
            _items(table, stage, tp, precision), config.dp, config.zero_optimization.reduce_bucket_size
        )
        for stage in range(config.pp)
        for tp in range(config.tp)
    }
    moments = None if own_optimizer else _moments(config)
    return Plan(config, table, layouts, groups, precision, moments, _notes(model, config, precision))


def _items(table: ShardTable, stage: int, tp: int, precision: Precision) -> list[Item]:
    return [
        Item(row.name, row.local_shape(tp), _dtype_name(precision.parameter(row.name, row.dtype)), row.group)
        for row in table.on_stage(stage)
        if row.trainable
    ]


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _widths(dtype_name: str) -> tuple[torch.dtype, torch.dtype]:
    """Dtype of computation, and of accumulation, master and moments."""
    narrow: torch.dtype = getattr(torch, dtype_name)
    return narrow, torch.promote_types(narrow, torch.float32)


def _moments(config: Config) -> int | None:
    if config.optimizer is None:
        return None
    if config.optimizer.type == "SGD":
        return int(config.optimizer.params["momentum"] != 0)
    return 1 if config.optimizer.type == "Lion" else 2


def _notes(model: nn.Module, config: Config, precision: Precision) -> tuple[str, ...]:
    notes = list(config.notes)
    if hasattr(model, "generate") and hasattr(model, "config"):
        notes.append(
            "loss: a Hugging Face output.loss is a mean per microbatch; with unequal token counts pass a loss_fn that "
            "returns (sum, weight) for the exact mean over tokens"
        )
    if config.bf16.enabled:
        frozen = [name for name, p in model.named_parameters() if p.is_floating_point() and not p.requires_grad]
        buffers = [
            name for name, buffer in model.named_buffers() if precision.buffer(name, buffer.dtype) != buffer.dtype
        ]
        for kind, names in (("frozen parameters", frozen), ("buffers", buffers)):
            if names:
                more = f" and {len(names) - 2} more" * (len(names) > 2)
                notes.append(f"{kind} are rounded to bf16, as Module.to does it: {', '.join(names[:2])}{more}")
    return tuple(notes)
