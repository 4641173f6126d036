"""Flat layouts of a plan: the assignment of each rank's parameters to buckets.

The parameters of one bucket are used by the same stages of a rank and, if they are sharded, in the same gather groups.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod

import torch
from torch import nn

from engine.config import Config
from engine.config.outer_section import site_optimizer
from engine.optim.built_in import block_of_codes
from engine.parallel.grid import Grid, ShardHolder
from engine.parallel.kernel_injection.inject import LAZY_HEAD, Replacement
from engine.parallel.model.name_patterns import is_inside
from engine.parallel.pipeline.partition.partition import Partition
from engine.parallel.shard_table import ShardRow, ShardTable
from engine.parallel.trace.model_trace import ModelTrace
from engine.planning.budgets import wire_formats
from engine.precision.dtypes import Precision
from engine.zero.gather.gather_groups import GatherGroups
from engine.zero.gather.gather_schedule import EVERYWHERE, stays_for_loss
from engine.zero.layout import FlatLayout, Item, Turn, build_layout


@dataclass(frozen=True)
class Users:
    """Lookup of the pipeline stages and gather groups (ZeRO 3) that use a parameter."""

    stages_of_rank: tuple[tuple[int, ...], ...]
    partition: Partition | None
    trace: ModelTrace | None
    gathers: GatherGroups | None
    """Gather groups; None if parameters are not sharded."""

    def stages(self, row: ShardRow, pp: int) -> tuple[int, ...]:
        """Returns the stages of pipeline rank ``pp`` that use the parameter ``row``. If the rank has only one stage,
        returns (), which stands for that stage.
        """
        here = self.stages_of_rank[pp]
        if self.partition is None or len(here) == 1:
            return ()
        return tuple(stage for stage in here if row.name in self.partition.stages[stage].parameters)

    def turns(self, row: ShardRow, pp: int) -> tuple[Turn, ...]:
        """Returns the (stage, gather group) pairs for which pipeline rank ``pp`` gathers the parameter ``row``.

        Returns () if parameters are not sharded.
        """
        if self.gathers is None:
            return ()
        groups = self.gathers.of_parameter[row.name]
        if row.in_glue or not groups:
            return (EVERYWHERE,)
        stages = self.stages(row, pp) or self.stages_of_rank[pp]
        turns = [Turn(stage, group) for stage in stages for group in groups]
        called = [turn for turn in turns if turn in self._called]
        return tuple(called or turns[:1])  # a parameter of modules that no call reaches is still gathered, once

    @cached_property
    def _called(self) -> frozenset[Turn]:
        """Every turn (stage, gather group) of a stage that calls a module of the group."""
        if self.gathers is None:
            return frozenset()
        groups = enumerate(self.gathers.modules)
        group_of = {module: group for group, modules in groups for module in modules}
        if self.partition is None or self.trace is None:
            return frozenset(Turn(0, group) for group in group_of.values())
        units = {
            call.unit: [
                group
                for module, group in group_of.items()
                if is_inside(module, call.unit) or is_inside(call.unit, module)
            ]
            for call in self.trace.calls
        }
        calls = zip(self.trace.calls, self.partition.stage_of_call, strict=True)
        return frozenset(Turn(stage, group) for call, stage in calls for group in units[call.unit])


class FlatLayouts(Mapping[ShardHolder, FlatLayout]):
    """Mapping from grid position to flat layout, the division of parameters into buckets (flat buffers).

    Layouts are computed at first use.
    """

    def __init__(self, table: ShardTable, config: Config, precision: Precision, users: Users) -> None:
        self._table, self._config, self._precision, self.users = table, config, precision, users
        self._formats = wire_formats(config, precision)
        self._grid = config.grid(0)
        self._made: dict[ShardHolder, FlatLayout] = {}

    def __getitem__(self, holder: ShardHolder) -> FlatLayout:
        if holder not in self._made:
            if not all(0 <= index < size for index, size in zip(holder, self._sizes, strict=True)):
                raise KeyError(holder)
            self._made.setdefault(holder, self._make(holder))  # threads of one plan share what is made first
        return self._made[holder]

    def __iter__(self) -> Iterator[ShardHolder]:
        return (ShardHolder(*indices) for indices in product(*map(range, self._sizes)))

    def __len__(self) -> int:
        return prod(self._sizes)

    @property
    def _sizes(self) -> tuple[int, int, int]:
        return self._grid.pp, self._grid.tp, self._grid.experts

    def _make(self, holder: ShardHolder) -> FlatLayout:
        formats, config = self._formats, self._config
        return build_layout(
            _items(self._table.held_by(holder), holder, self._precision, self.users, self._grid, formats.any),
            config.shards,
            config.zero_optimization.bucket_elements,
            max(formats.alignment, block_of_codes(site_optimizer(config.outer, config.optimizer))),
            self._grid.spread,
        )


def _items(
    rows: Sequence[ShardRow], holder: ShardHolder, precision: Precision, users: Users, grid: Grid, encoded: bool
) -> list[Item]:
    """Returns the items of a rank at ``holder``: trained rows and, if parameters are sharded, frozen rows.

    ``encoded``: traffic of data ranks is, in blocks.
    """
    items, pp = [], holder.pp
    for row in rows:
        dtype = precision.parameter(row.name, row.dtype) if row.trainable else precision.frozen(row.name, row.dtype)
        if row.trainable or (users.gathers is not None and dtype in SHARDED_DTYPES):
            codes = row.quantized_shape(holder)
            items.append(
                Item(
                    name=row.name,
                    shape=row.local_shape(holder) if codes is None else (codes.bytes,),
                    dtype=str(dtype if codes is None else torch.uint8).removeprefix("torch."),
                    group=row.group,
                    counted=row.counted(holder),
                    shared=any(len(each.holders) > 1 for each in row.ranges),
                    ties=row.owners if row.trainable and len(row.owners) > 1 else (),
                    partial=row.trainable and row.partial,
                    gathers=users.turns(row, pp),
                    trainable=row.trainable,
                    stages=users.stages(row, pp),
                    copies=row.copies(holder) if pp == row.owners[0] else (),
                    exact=encoded and _has_own_and_shared_rows(row),
                    spread=grid.expert_spread if row.experts else None,
                )
            )
    return items


def _has_own_and_shared_rows(row: ShardRow) -> bool:
    """Returns True if some tensor rank has shared rows and rows of its own: blocks would mix them, and copies of a row
    differ."""
    holders = {tp: {part.holders for part in row.ranges if tp in part.holders} for tp in _holders(row)}
    return any(len(kinds) > 1 for kinds in holders.values())


def _holders(row: ShardRow) -> frozenset[int]:
    return frozenset(tp for part in row.ranges for tp in part.holders)


SHARDED_DTYPES = (
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int8, torch.uint8,
)  # fmt: skip
"""Dtypes that every communication backend gathers; frozen parameters of other dtypes are not sharded."""


def without_unread_heads(
    model: nn.Module, replacements: Sequence[Replacement], layouts: FlatLayouts
) -> tuple[tuple[Replacement, ...], tuple[str, ...]]:
    """Returns (``replacements`` without unusable chunked language-model heads, one note for each removed head).

    A head is unusable if its weight is not on the loss's pipeline stage, or is freed by ZeRO 3 before the loss.
    """
    users, names = layouts.users, {id(parameter): name for name, parameter in model.named_parameters()}
    stage = max(max(stages) for stages in users.stages_of_rank)
    last = next(pp for pp, stages in enumerate(users.stages_of_rank) if stage in stages)
    kept, notes = list[Replacement](), list[str]()
    for each in replacements:
        if each.operator == LAZY_HEAD:
            name = f"{each.module}.weight"
            here = users.partition is None or stage in users.partition.owners.get(name, ())
            first = names.get(id(model.get_submodule(each.module).weight), name)  # tied weights have the first name
            if not here or not stays_for_loss(layouts[ShardHolder(last, 0, 0)], stage, first):
                where = "ZeRO 3 frees its weight before" if here else "its weight is not on the pipeline stage of"
                notes.append(f"kernels: all logits of {each.module} exist at once, because {where} the loss")
                continue
        kept.append(each)
    return tuple(kept), tuple(notes)
