"""Shard table: the ranks and the stage that hold each part of every parameter.

Built once from the model, on any device; clipping, gradient sums, the ZeRO layout, checkpoints and memory budgets read
it.

Each logical parameter has one row; a tied parameter is one row with aliases. The ranges of a row describe its sharding
over the tensor axis or, for the parameters of experts, over the expert axis. A row that is not sharded has a single
range, held by every tensor rank:

    replicated over tp=2      Range(0, 8, holders=(0, 1))
    sharded over tp=2         Range(0, 4, holders=(0,))  Range(4, 8, holders=(1,))
    a shared kv head, tp=4    Range(0, 4, holders=(0, 1))  Range(4, 8, holders=(2, 3))
    8 experts over ep=3       Range(0, 3, holders=(0,))  Range(3, 6, holders=(1,))  Range(6, 8, holders=(2,))

Exactly one copy of each element over pipeline, tensor and expert ranks is counted (the first owner's, the first
holder's), so that a norm contains every element once.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal, Protocol

import torch
from torch import nn

from engine.kernels.codecs.weight_format import QuantizedShape, WeightFormat
from engine.parallel.grid import ShardHolder

ShardAxis = Literal["tp", "ep"]
"""Axis that shards a parameter: tensor or expert."""


@dataclass(frozen=True, slots=True)
class Range:
    """Rows ``start:stop`` of a sharded dim, with the indices on the row's axis that store them."""

    start: int
    stop: int
    holders: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ShardRow:
    """Sharding of one logical parameter: name, shape, pipeline owners, ranges of the sharded dim."""

    name: str
    """First name of the parameter in ``model.named_parameters()``."""
    aliases: tuple[str, ...]
    """Other names of a tied parameter."""
    shape: tuple[int, ...]
    """Full shape, before sharding."""
    dtype: torch.dtype
    """Dtype in the user's model."""
    owners: tuple[int, ...]
    """Indices on axis pp that store the parameter; several if it is tied across stages."""
    dim: int | None
    """Sharded dim; None: not sharded along ``axis``."""
    ranges: tuple[Range, ...]
    """Ranges of rows with their holders; together they cover ``dim`` once."""
    partial: bool
    """True if several tensor ranks store the same elements and each computes a partial gradient."""
    in_glue: bool
    """True if code outside blocks and other modules reads the parameter, so that no module hook fires."""
    trainable: bool
    group: int
    """Index of the parameter's optimizer group."""
    quantized: WeightFormat | None = None
    """Storage format of a quantized frozen weight; None: not quantized."""
    axis: ShardAxis = "tp"
    """Axis that shards ``dim``: tp, or ep for expert parameters."""

    @property
    def equal_on_tensor_ranks(self) -> bool:
        """True if all tensor ranks hold the same elements."""
        return self.dim is None or self.axis == "ep"

    def part(self, holder: ShardHolder) -> int:
        """Returns the index along ``axis`` of a rank at coordinates ``holder``."""
        return holder.tp if self.axis == "tp" else holder.ep

    def held(self, holder: ShardHolder) -> bool:
        """Returns True if a rank with coordinates ``holder`` stores elements of the parameter."""
        here = self.axis == "tp" or any(holder.ep in each.holders for each in self.ranges)
        return here and holder.pp in self.owners

    @property
    def elements(self) -> int:
        """Number of elements of the full parameter."""
        return math.prod(self.shape)

    def local_shape(self, part: int) -> tuple[int, ...]:
        """Returns the shape of the shard on index ``part`` of ``axis``."""
        if self.dim is None:
            return self.shape
        held = sum(each.stop - each.start for each in self.ranges if part in each.holders)
        return (*self.shape[: self.dim], held, *self.shape[self.dim + 1 :])

    def local_elements(self, part: int) -> int:
        """Returns the number of elements of the shard on index ``part`` of ``axis``."""
        return math.prod(self.local_shape(part))

    def quantized_shape(self, part: int) -> QuantizedShape | None:
        """Returns shape and format of the quantized shard on index ``part`` of ``axis``; None if not quantized."""
        if self.quantized is None:
            return None
        cut_columns = self.dim is not None and self.dim == len(self.shape) - 1
        runs = tuple((each.start, each.stop) for each in self.ranges if cut_columns and part in each.holders)
        return QuantizedShape(format=self.quantized, shape=self.local_shape(part), runs=runs)

    def counted(self, holder: ShardHolder) -> bool:
        """Returns True if global norms include the copy on the rank ``holder``, except for the ranges ``copies``.

        A parameter sharded only over the expert axis is counted on tensor rank 0.
        """
        part, first = self.part(holder), self.axis == "tp" or holder.tp == 0
        return first and holder.pp == self.owners[0] and any(each.holders[0] == part for each in self.ranges)

    def copies(self, part: int) -> tuple[tuple[int, int], ...]:
        """Returns ranges [start, stop) of the flat shard on index ``part`` that global norms count on another rank.

        They exist if a shard has both exclusive and shared rows, such as a fused QKV weight with a shared key.
        """
        own = [(each.stop - each.start, each.holders[0] == part) for each in self.ranges if part in each.holders]
        if self.dim is None or not any(first for _, first in own):
            return ()
        held, inner = sum(size for size, _ in own), math.prod(self.shape[self.dim + 1 :])
        ends = list(accumulate(size for size, _ in own))
        runs = [(end - size, end) for (size, mine), end in zip(own, ends, strict=True) if not mine]
        if not runs:
            return ()
        outer = range(math.prod(self.shape[: self.dim]))
        return tuple(((o * held + start) * inner, (o * held + stop) * inner) for o in outer for start, stop in runs)


@dataclass(frozen=True, slots=True)
class ShardTable:
    """Shardings of all parameters, in the order of ``model.named_parameters()``."""

    rows: tuple[ShardRow, ...]

    def __iter__(self) -> Iterator[ShardRow]:
        return iter(self.rows)

    def held_by(self, holder: ShardHolder) -> tuple[ShardRow, ...]:
        """Returns the rows of parameters with elements on a rank with coordinates ``holder``."""
        return tuple(row for row in self.rows if row.held(holder))

    @property
    def elements(self) -> int:
        """Number of elements of the full model, tied parameters counted once."""
        return sum(row.elements for row in self.rows)


class Cutting(Protocol):
    """Interface of one parameter's sharding: the sharded dim and its ranges."""

    @property
    def dim(self) -> int | None:
        """Sharded dim; None: not sharded."""

    @property
    def ranges(self) -> tuple[Range, ...]:
        """Ranges of rows with their holders."""


@dataclass(frozen=True, slots=True)
class Division:
    """Input of a shard table: shardings of the parameters by their first names; the default replicates everything."""

    tp: int = 1
    cuts: Mapping[str, Cutting] = field(default_factory=dict)
    """Sharding over the tensor axis; parameters without an entry are replicated over it."""
    partial: Collection[str] = ()
    """Parameters replicated over the tensor axis with a partial gradient on each rank."""
    owners: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Indices on axis pp that store each parameter; the default is the first stage."""
    in_glue: Collection[str] = ()
    """Parameters that are read outside modules."""
    quantized: Mapping[str, WeightFormat] = field(default_factory=dict)
    """Storage formats of quantized frozen weights."""
    experts: Mapping[str, Cutting] = field(default_factory=dict)
    """Sharding of expert parameters over the expert axis, in place of an entry in ``cuts``."""


def build_table(model: nn.Module, groups: Mapping[str, int], division: Division | None = None) -> ShardTable:
    """Builds one row per parameter of ``model``, before it is sharded; reads only shapes, dtypes and identities.

    Args:
        groups: optimizer group of each trainable parameter, by name.
    """
    division = division or Division()
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return ShardTable(
        tuple(
            _row(names[id(parameter)], parameter, groups.get(name, 0), division)
            for name, parameter in model.named_parameters()
        )
    )


def _row(names: Sequence[str], parameter: nn.Parameter, group: int, division: Division) -> ShardRow:
    name, shape = names[0], tuple(parameter.shape)
    experts = division.experts.get(name)
    cut = experts or division.cuts.get(name)
    whole = Range(0, shape[0] if shape else 1, tuple(range(division.tp)))
    return ShardRow(
        name=name,
        aliases=tuple(names[1:]),
        shape=shape,
        dtype=parameter.dtype,
        owners=division.owners.get(name) or (0,),
        dim=cut.dim if cut else None,
        ranges=cut.ranges if cut else (whole,),
        partial=any(len(part.holders) > 1 for part in cut.ranges) if cut and not experts else name in division.partial,
        in_glue=name in division.in_glue,
        trainable=parameter.requires_grad,
        group=group,
        quantized=division.quantized.get(name),
        axis="ep" if experts else "tp",
    )
