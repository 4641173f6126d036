"""Shard table: the ranks and the stage that hold each part of every parameter.

Built once from the model, on any device; clipping, gradient sums, the ZeRO layout, checkpoints and memory budgets read
it.

Each logical parameter has one row; a tied parameter is one row with aliases. The ranges of a row describe its sharding
over the tensor axis. A row that is not sharded over it has a single range, held by every tensor rank:

    replicated over tp=2      Range(0, 8, holders=(0, 1))
    sharded over tp=2         Range(0, 4, holders=(0,))  Range(4, 8, holders=(1,))
    a shared kv head, tp=4    Range(0, 4, holders=(0, 1))  Range(4, 8, holders=(2, 3))

Parameters of experts that data ranks share have ranges over the expert axis too, of the first dim unless adapters stack
experts along another. A rank holds the elements that are in ranges of both:

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
    """Rows from ``start`` to ``stop`` - 1 of a sharded dim. ``holders``: indices of the ranks that store them."""

    start: int
    stop: int
    holders: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ShardRow:
    """Sharding of one parameter: its name, full shape, pipeline stages, and ranges of rows of its sharded dim. A tied
    parameter has one row.
    """

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
    """Dim sharded along tp; None: not sharded along it."""
    ranges: tuple[Range, ...]
    """Ranges of rows with their tensor indices; together they cover ``dim`` once."""
    partial: bool
    """True if several tensor ranks store the same elements and each computes a partial gradient."""
    in_glue: bool
    """True if code outside blocks and other modules reads the parameter, so that no module hook fires."""
    trainable: bool
    group: int
    """Index of the parameter's optimizer group."""
    quantized: WeightFormat | None = None
    """Storage format of a quantized frozen weight; None: not quantized."""
    experts: tuple[Range, ...] = ()
    """Ranges of ``expert_dim`` with the expert index that stores each; empty unless data ranks share these experts."""
    expert_dim: int = 0
    """Dim along which experts are stacked; tensor ranks shard the parameter only if it is the first."""

    @property
    def equal_on_tensor_ranks(self) -> bool:
        """True if all tensor ranks store the same elements of the parameter."""
        return self.dim is None

    @property
    def sharded(self) -> bool:
        """True if a rank stores only a part of the parameter, because tensor or expert ranks shard it."""
        return self.dim is not None or len(self.experts) > 1

    def held(self, holder: ShardHolder) -> bool:
        """Returns True if the rank ``holder`` (its pipeline, tensor and expert index) stores elements of the parameter
        before ZeRO.
        """
        return holder.pp in self.owners and (not self.experts or bool(self.expert_ranges(holder)))

    def tensor_ranges(self, holder: ShardHolder) -> tuple[Range, ...]:
        """Returns the ranges of rows along ``dim`` that the rank ``holder`` stores, in the order of its shard."""
        return tuple(each for each in self.ranges if holder.tp in each.holders)

    def expert_ranges(self, holder: ShardHolder) -> tuple[Range, ...]:
        """Returns the ranges of experts along ``expert_dim`` that the rank ``holder`` stores."""
        return tuple(each for each in self.experts if holder.ep in each.holders)

    def local(self, full: Tensor, holder: ShardHolder) -> Tensor:
        """Returns the elements of the parameter ``full`` that the rank ``holder`` stores, as a new contiguous tensor.
        Returns ``full`` itself if it is not sharded.
        """
        if not self.sharded:
            return full
        if len(self.experts) > 1:
            full = _rows(full, self.expert_dim, self.expert_ranges(holder))
        return full if self.dim is None else _rows(full, self.dim, self.tensor_ranges(holder))

    @property
    def elements(self) -> int:
        """Number of elements of the full parameter."""
        return math.prod(self.shape)

    def local_shape(self, holder: ShardHolder) -> tuple[int, ...]:
        """Returns the shape of the shard on the rank ``holder`` (its pipeline, tensor and expert index) before ZeRO."""
        sizes = list(self.shape)
        if len(self.experts) > 1:
            sizes[self.expert_dim] = sum(each.stop - each.start for each in self.expert_ranges(holder))
        if self.dim is not None:
            sizes[self.dim] = sum(each.stop - each.start for each in self.tensor_ranges(holder))
        return tuple(sizes)

    def local_elements(self, holder: ShardHolder) -> int:
        """Returns the number of elements of the shard on the rank ``holder`` (its pipeline, tensor and expert index)
        before ZeRO.
        """
        return math.prod(self.local_shape(holder))

    def quantized_shape(self, holder: ShardHolder) -> QuantizedShape | None:
        """Returns shape and format of the quantized shard on the rank ``holder``; None if the parameter is not
        quantized.
        """
        if self.quantized is None:
            return None
        dim, own = self.dim, self.tensor_ranges(holder)
        if dim is None and len(self.experts) > 1:
            dim, own = self.expert_dim, self.expert_ranges(holder)
        runs = tuple((each.start, each.stop) for each in own if dim == len(self.shape) - 1)
        return QuantizedShape(format=self.quantized, shape=self.local_shape(holder), runs=runs)

    def counted(self, holder: ShardHolder) -> bool:
        """Returns True if the rank ``holder`` counts its shard in global norms, such as the gradient norm.

        Each element is counted on one of the pipeline and tensor ranks that store it. If True, parts of this shard may
        still be counted elsewhere: :meth:`copies` returns them.
        """
        return holder.pp == self.owners[0] and any(each.holders[0] == holder.tp for each in self.ranges)

    def copies(self, holder: ShardHolder) -> tuple[tuple[int, int], ...]:
        """Returns the parts of a shard that rank ``holder`` omits from global norms, since another rank counts them.

        Parts are ranges [start, stop) of the flattened shard, such as key heads of a fused QKV weight that several
        tensor ranks store. Empty if other tensor ranks count the whole shard (see :meth:`counted`).
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
    """Table of the sharding of a model: a row for each parameter, in the order of ``model.named_parameters()``."""

    rows: tuple[ShardRow, ...]

    def __iter__(self) -> Iterator[ShardRow]:
        return iter(self.rows)

    def held_by(self, holder: ShardHolder) -> tuple[ShardRow, ...]:
        """Returns the rows of all parameters of which the rank ``holder`` (its pipeline, tensor and expert index)
        stores elements.
        """
        return tuple(row for row in self.rows if row.held(holder))

    @property
    def elements(self) -> int:
        """Number of elements of the full model; a tied parameter is counted once."""
        return sum(row.elements for row in self.rows)


class Cutting(Protocol):
    """Interface of one parameter's sharding over the tensor axis."""

    @property
    def dim(self) -> int | None:
        """Dim along which the parameter is sharded; None: it is not sharded."""

    @property
    def ranges(self) -> tuple[Range, ...]:
        """Ranges of rows along the sharded dim, each with the tensor ranks that store it."""


@dataclass(frozen=True, slots=True)
class Division:
    """Input for :func:`build_table`: shardings of parameters by name (the first name of a tied parameter). By default
    every parameter is replicated on the first pipeline stage.
    """

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
    experts: Mapping[str, tuple[Range, ...]] = field(default_factory=dict)
    """Sharding of expert parameters over the expert axis."""
    expert_dims: Mapping[str, int] = field(default_factory=dict)
    """Dims that stack experts, where it is not the first."""


def build_table(model: nn.Module, groups: Mapping[str, int], division: Division | None = None) -> ShardTable:
    """Returns the shard table of ``model``, with a row for each parameter; ``model`` must not be sharded yet.

    Args:
        groups: index of the optimizer group of each trainable parameter, by name.
        division: shardings of the parameters; None replicates all of them.
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
        expert_dim=division.expert_dims.get(name, 0),
    )


def _rows(full: Tensor, dim: int, ranges: Sequence[Range]) -> Tensor:
    """Returns the ``ranges`` of ``full`` along ``dim``, in order, as a new contiguous tensor."""
    found = [full.narrow(dim, each.start, each.stop - each.start) for each in ranges]
    return torch.cat(found or [full.narrow(dim, 0, 0)], dim)
