"""The shard table: one truth about every parameter (who holds which part of it, on which stage).

Built once from the model, on any device, without processes. Clipping, gradient sums, the ZeRO layout,
checkpoints and memory budgets read this table and nothing else, so that no two parts can disagree.

One row per logical parameter. A tied parameter is one row with aliases; its ranges tell how the
tensor axis cuts it. A row that is not cut has a single range that every tensor rank holds:

    replicated over tp=2      Range(0, 8, holders=(0, 1))
    cut over tp=2             Range(0, 4, holders=(0,))  Range(4, 8, holders=(1,))
    a shared kv head, tp=4    Range(0, 4, holders=(0, 1))  Range(4, 8, holders=(2, 3))

Of all copies of an element, over pipeline and tensor ranks, exactly one is counted (the first owner's, the
first holder's), so that a norm sees every element once.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol

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
    owners: tuple[int, ...]
    """Indices of axis pp that hold it; several when it is tied across them."""
    dim: int | None
    """Dim that the tensor axis cuts, or None."""
    ranges: tuple[Range, ...]
    """Which part every tensor rank holds; together they cover ``dim`` once."""
    partial: bool
    """Several tensor ranks hold the same elements, and each has a part of their gradient only."""
    in_glue: bool
    """Read by code outside blocks and other modules, where no module hook sees it."""
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

    def counted(self, pp: int, tp: int) -> bool:
        """Whether a norm counts the copy that this pipeline and tensor coordinate hold, but for its ``copies``."""
        return pp == self.owners[0] and any(part.holders[0] == tp for part in self.ranges if tp in part.holders)

    def copies(self, tp: int) -> tuple[tuple[int, int], ...]:
        """Of what tensor coordinate ``tp`` holds, flat: the runs [start, stop) that a norm counts at another one.

        Queries in thirds with a shared key: own rows and shared rows lie in one parameter.
        """
        if self.dim is None or not self.counted(self.owners[0], tp):
            return ()
        own = [(part.stop - part.start, part.holders[0] == tp) for part in self.ranges if tp in part.holders]
        held, inner = sum(size for size, _ in own), math.prod(self.shape[self.dim + 1 :])
        ends = list(accumulate(size for size, _ in own))
        runs = [(end - size, end) for (size, mine), end in zip(own, ends, strict=True) if not mine]
        outer = range(math.prod(self.shape[: self.dim]))
        return tuple(((o * held + start) * inner, (o * held + stop) * inner) for o in outer for start, stop in runs)


@dataclass(frozen=True, slots=True)
class ShardTable:
    """All rows, in the order of ``model.named_parameters()``."""

    rows: tuple[ShardRow, ...]

    def __iter__(self) -> Iterator[ShardRow]:
        return iter(self.rows)

    def held_by(self, pp: int) -> tuple[ShardRow, ...]:
        """Rows that an index of axis pp holds."""
        return tuple(row for row in self.rows if pp in row.owners)

    @property
    def elements(self) -> int:
        """Elements of the whole model, ties counted once."""
        return sum(row.elements for row in self.rows)


class Cutting(Protocol):
    """How the tensor axis cuts a parameter."""

    @property
    def dim(self) -> int | None:
        """The dim that is cut."""

    @property
    def ranges(self) -> tuple[Range, ...]:
        """Who holds which rows of it."""


@dataclass(frozen=True, slots=True)
class Division:
    """How the grid divides the parameters, by their first names; the default divides nothing."""

    tp: int = 1
    cuts: Mapping[str, Cutting] = field(default_factory=dict)
    """Over the tensor axis; who is not named is held by all tensor ranks."""
    partial: Collection[str] = ()
    """Held by all tensor ranks, each of which has a part of the gradient."""
    owners: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Indices of axis pp; who is not named lies on the first."""
    in_glue: Collection[str] = ()
    """Read outside modules."""


def build_table(model: nn.Module, groups: Mapping[str, int], division: Division | None = None) -> ShardTable:
    """One row per parameter of ``model``, which is not cut yet; only shapes, dtypes and identities are read.

    ``groups`` maps the names of trainable parameters to optimizer groups.
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
    )
