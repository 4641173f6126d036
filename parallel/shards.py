"""The shard table: one truth about every parameter (who holds which part of it, on which stage).

Built once from the model, on any device, without processes. Clipping, gradient sums, the ZeRO layout,
checkpoints and memory budgets read this table and nothing else, so that no two parts can disagree.

One row per logical parameter. A tied parameter is one row with aliases; its ranges tell how the
tensor axis cuts it. A row that is not cut has a single range that every tensor rank holds:

    replicated over tp=2      Range(0, 8, holders=(0, 1))
    cut over tp=2             Range(0, 4, holders=(0,))  Range(4, 8, holders=(1,))
    a shared kv head, tp=4    Range(0, 4, holders=(0, 1))  Range(4, 8, holders=(2, 3))
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class Range:
    """Rows ``start:stop`` along the cut dim, and the tensor coordinates that hold them."""

    start: int
    stop: int
    holders: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ShardRow:
    """One logical parameter: what it is, who owns it, how it is cut."""

    name: str
    """Its first name in ``model.named_parameters()``."""
    aliases: tuple[str, ...]
    """Its other names, when modules share it."""
    shape: tuple[int, ...]
    """Full shape, before any cut."""
    dtype: torch.dtype
    """Dtype in the model as the user gave it."""
    stages: tuple[int, ...]
    """Pipeline stages that own it; several when it is tied across stages."""
    dim: int | None
    """Dim that the tensor axis cuts, or None."""
    ranges: tuple[Range, ...]
    """Which part every tensor rank holds; together they cover ``dim`` once."""
    trainable: bool
    group: int
    """Optimizer group, an index into the groups of the plan."""

    @property
    def elements(self) -> int:
        """Elements of the full parameter."""
        return math.prod(self.shape)

    def local_shape(self, tp: int) -> tuple[int, ...]:
        """Shape of the part that tensor coordinate ``tp`` holds."""
        if self.dim is None:
            return self.shape
        held = sum(part.stop - part.start for part in self.ranges if tp in part.holders)
        return (*self.shape[: self.dim], held, *self.shape[self.dim + 1 :])


@dataclass(frozen=True, slots=True)
class ShardTable:
    """All rows, in the order of ``model.named_parameters()``."""

    rows: tuple[ShardRow, ...]

    def __iter__(self) -> Iterator[ShardRow]:
        return iter(self.rows)

    def on_stage(self, stage: int) -> tuple[ShardRow, ...]:
        """Rows that a pipeline stage owns."""
        return tuple(row for row in self.rows if stage in row.stages)

    @property
    def elements(self) -> int:
        """Elements of the whole model, ties counted once."""
        return sum(row.elements for row in self.rows)


def build_table(model: nn.Module, groups: Mapping[str, int], tp: int = 1) -> ShardTable:
    """One row per parameter of ``model``; only shapes, dtypes and identities are read.

    ``groups`` maps the names of trainable parameters to optimizer groups. Every row lies on stage 0
    and is held by all ``tp`` tensor ranks.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return ShardTable(
        tuple(
            ShardRow(
                name=name,
                aliases=tuple(names[id(parameter)][1:]),
                shape=tuple(parameter.shape),
                dtype=parameter.dtype,
                stages=(0,),
                dim=None,
                ranges=(Range(0, parameter.shape[0] if parameter.ndim else 1, tuple(range(tp))),),
                trainable=parameter.requires_grad,
                group=groups.get(name, 0),
            )
            for name, parameter in model.named_parameters()
        )
    )
