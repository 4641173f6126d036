"""Shard table: the ranks and the stage that hold each part of every parameter.

It is built once from the model, on any device, without processes. Clipping, gradient sums, the ZeRO layout, checkpoints
and memory budgets read this one table, so they cannot disagree.

Each logical parameter has one row; a tied parameter is one row with aliases. The ranges of a row describe its sharding
over the tensor axis. A row that is not sharded over it has a single range, held by every tensor rank:

    replicated over tp=2      Range(0, 8, holders=(0, 1))
    sharded over tp=2         Range(0, 4, holders=(0,))  Range(4, 8, holders=(1,))
    a shared kv head, tp=4    Range(0, 4, holders=(0, 1))  Range(4, 8, holders=(2, 3))

Parameters of experts that data ranks share have ranges of the first dim over the expert axis too. A rank holds the
elements that are in ranges of both:

    8 experts over ep=3       Range(0, 3, holders=(0,))  Range(3, 6, holders=(1,))  Range(6, 8, holders=(2,))

Exactly one copy of each element over pipeline, tensor and expert ranks is counted (the first owner's, the first
holder's), so that a norm contains every element once.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor, nn

from engine.kernels.codecs.weight_format import QuantizedShape, WeightFormat
from engine.parallel.grid import ShardHolder


@dataclass(frozen=True, slots=True)
class Range:
    """Rows ``start:stop`` along the sharded dim, and the indices along an axis that hold them."""

    start: int
    stop: int
    holders: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ShardRow:
    """Row of one logical parameter: its name, its owners, and its sharding."""

    name: str
    """First name of the parameter in ``model.named_parameters()``."""
    aliases: tuple[str, ...]
    """Other names of the parameter, if modules share it."""
    shape: tuple[int, ...]
    """Full shape, before sharding."""
    dtype: torch.dtype
    """Dtype in the model as the user gave it."""
    owners: tuple[int, ...]
    """Indices of axis pp that hold the parameter; several if it is tied across stages."""
    dim: int | None
    """Dim that the tensor axis shards, or None."""
    ranges: tuple[Range, ...]
    """The ranges of rows with the tensor indices that hold them; together they cover ``dim`` once."""
    partial: bool
    """Several tensor ranks hold the same elements, and each has only a partial gradient."""
    in_glue: bool
    """The parameter is read by code outside blocks and other modules, where no module hook fires."""
    trainable: bool
    group: int
    """Optimizer group, an index into the groups of the plan."""
    quantized: WeightFormat | None = None
    """Format of a quantized frozen weight; None: not quantized."""
    experts: tuple[Range, ...] = ()
    """Ranges of the first dim with the expert index that holds each; empty: no parameter of experts that are shared."""

    @property
    def equal_on_tensor_ranks(self) -> bool:
        """True if all tensor ranks hold the same elements."""
        return self.dim is None

    @property
    def sharded(self) -> bool:
        """True if a rank may hold a part of the parameter."""
        return self.dim is not None or len(self.experts) > 1

    def held(self, holder: ShardHolder) -> bool:
        """Returns True if a rank at ``holder`` holds elements of the parameter."""
        return holder.pp in self.owners and (not self.experts or bool(self.expert_ranges(holder)))

    def tensor_ranges(self, holder: ShardHolder) -> tuple[Range, ...]:
        """Returns the ranges along ``dim`` that a rank at ``holder`` holds, in order."""
        return tuple(each for each in self.ranges if holder.tp in each.holders)

    def expert_ranges(self, holder: ShardHolder) -> tuple[Range, ...]:
        """Returns the ranges of the first dim that a rank at ``holder`` holds of the experts, at most one."""
        return tuple(each for each in self.experts if holder.ep in each.holders)

    def local(self, full: Tensor, holder: ShardHolder) -> Tensor:
        """Returns the elements of the full parameter that a rank at ``holder`` holds, as a new contiguous tensor if the
        parameter is sharded."""
        if not self.sharded:
            return full
        if len(self.experts) > 1:
            full = torch.cat([full[each.start : each.stop] for each in self.expert_ranges(holder)] or [full[:0]])
        if self.dim is None:
            return full
        own = self.tensor_ranges(holder)
        return torch.cat([full.narrow(self.dim, each.start, each.stop - each.start) for each in own], self.dim)

    @property
    def elements(self) -> int:
        """Number of elements of the full parameter."""
        return math.prod(self.shape)

    def local_shape(self, holder: ShardHolder) -> tuple[int, ...]:
        """Returns the shape of the elements that a rank at ``holder`` holds."""
        sizes = list(self.shape)
        if len(self.experts) > 1:
            sizes[0] = sum(each.stop - each.start for each in self.expert_ranges(holder))
        if self.dim is not None:
            sizes[self.dim] = sum(each.stop - each.start for each in self.tensor_ranges(holder))
        return tuple(sizes)

    def local_elements(self, holder: ShardHolder) -> int:
        """Returns the number of elements that a rank at ``holder`` holds."""
        return math.prod(self.local_shape(holder))

    def quantized_shape(self, holder: ShardHolder) -> QuantizedShape | None:
        """Returns the shape of the codes and scales of a rank at ``holder``; None if the row is not quantized."""
        if self.quantized is None:
            return None
        cut_columns = self.dim is not None and self.dim == len(self.shape) - 1
        runs = tuple((each.start, each.stop) for each in self.tensor_ranges(holder) if cut_columns)
        return QuantizedShape(format=self.quantized, shape=self.local_shape(holder), runs=runs)

    def counted(self, holder: ShardHolder) -> bool:
        """Returns True if a norm counts the copy of this rank, except for its ``copies``."""
        return holder.pp == self.owners[0] and any(each.holders[0] == holder.tp for each in self.ranges)

    def copies(self, holder: ShardHolder) -> tuple[tuple[int, int], ...]:
        """Returns runs [start, stop) of the flat elements of a rank at ``holder`` that a norm counts at another one.

        They exist if a rank holds exclusive and shared rows of one parameter, such as a fused QKV weight with a shared
        key.
        """
        own = [(each.stop - each.start, each.holders[0] == holder.tp) for each in self.tensor_ranges(holder)]
        if self.dim is None or not any(first for _, first in own):
            return ()
        held, inner = sum(size for size, _ in own), math.prod(self.shape[self.dim + 1 :])
        ends = list(accumulate(size for size, _ in own))
        runs = [(end - size, end) for (size, mine), end in zip(own, ends, strict=True) if not mine]
        if not runs:
            return ()
        outer = range(math.prod(self.local_shape(holder)[: self.dim]))
        return tuple(((o * held + start) * inner, (o * held + stop) * inner) for o in outer for start, stop in runs)


@dataclass(frozen=True, slots=True)
class ShardTable:
    """All rows, in the order of ``model.named_parameters()``."""

    rows: tuple[ShardRow, ...]

    def __iter__(self) -> Iterator[ShardRow]:
        return iter(self.rows)

    def held_by(self, holder: ShardHolder) -> tuple[ShardRow, ...]:
        """Returns the rows with elements on a rank at ``holder``."""
        return tuple(row for row in self.rows if row.held(holder))

    @property
    def elements(self) -> int:
        """Number of elements of the full model, tied parameters counted once."""
        return sum(row.elements for row in self.rows)


class Cutting(Protocol):
    """Sharding of a parameter over the tensor axis."""

    @property
    def dim(self) -> int | None:
        """The dim that is sharded."""

    @property
    def ranges(self) -> tuple[Range, ...]:
        """The holders of each range of rows."""


@dataclass(frozen=True, slots=True)
class Division:
    """Division of the parameters over the grid, by their first names; the default replicates everything."""

    tp: int = 1
    cuts: Mapping[str, Cutting] = field(default_factory=dict)
    """Sharding over the tensor axis; parameters without an entry are replicated over it."""
    partial: Collection[str] = ()
    """Parameters replicated over the tensor axis with a partial gradient on each rank."""
    owners: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Indices of axis pp; parameters without an entry are on the first stage."""
    in_glue: Collection[str] = ()
    """Parameters read outside modules."""
    quantized: Mapping[str, WeightFormat] = field(default_factory=dict)
    """Formats of quantized frozen weights."""
    experts: Mapping[str, tuple[Range, ...]] = field(default_factory=dict)
    """Sharding of the parameters of experts along their first dim over the expert axis."""


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
    cut = division.cuts.get(name)
    whole = Range(0, shape[0] if shape else 1, tuple(range(division.tp)))
    return ShardRow(
        name=name,
        aliases=tuple(names[1:]),
        shape=shape,
        dtype=parameter.dtype,
        owners=division.owners.get(name) or (0,),
        dim=cut.dim if cut else None,
        ranges=cut.ranges if cut else (whole,),
        partial=any(len(part.holders) > 1 for part in cut.ranges) if cut else name in division.partial,
        in_glue=name in division.in_glue,
        trainable=parameter.requires_grad,
        group=group,
        quantized=division.quantized.get(name),
        experts=division.experts.get(name, ()),
    )
