"""Adafactor over flat shards of matrices: only row and column sums are all-reduced.

    squares of own gradients, by row and column, and of own weights   -> summed over data, then tensor ranks
    means of all rows and columns, whole on every rank
    squares of own updates                                            -> summed over data, then tensor ranks
    steps on own weights

Two small sums a step on each axis, label "statistics": a row and a column for each matrix, and two numbers.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from engine.kernels.optim.update_rules import (
    COLUMNS,
    ROWS,
    SQUARES,
    AdafactorRule,
    mean_elements,
    mean_shapes,
    scales_of,
    step_size,
    take_in,
)
from engine.parallel.comm.comm import Comm
from engine.parallel.comm.traffic import Traffic, sent_bytes
from engine.parallel.shard_table import Range, ShardRow
from engine.zero.optim.composite import CompositeOptimizer
from engine.zero.optim.flat_optimizers import FlatOptimizer
from engine.zero.optim.optimizer_tensors import OptimizerTensor, WholeShapes, WholeState
from engine.zero.optim.rules.counted_parts import LABEL, CountedPart, SummedUpdates, SumRoutes, counted_parts


class FlatAdafactor(FlatOptimizer):
    """Adafactor over flat tensors. ``step`` only records the tensors; :class:`FactoredUpdates` updates them across
    ranks.
    """

    def __init__(self, params: ParamsT, **options: Any) -> None:
        """Takes ``options``: all params of the configuration."""
        super().__init__(params, options)
        self.due: set[Tensor] = set()
        """Tensors that wait for their update."""

    def _update_group(self, weights: list[Tensor], group: dict[str, Any]) -> None:
        self.due.update(weights)


@dataclass(frozen=True, slots=True)
class FactorRoutes(SumRoutes):
    """Parameters that Adafactor updates, and the axes over which their row and column statistics are all-reduced."""

    @property
    def elements(self) -> int:
        """Number of elements in a step's first all-reduce: row and column sums of squared gradients (of a vector: one
        per element), and the sum of squared weights of each parameter.
        """
        return sum(mean_elements(row.shape) + 1 for row in self.rows)

    def traffic(self) -> tuple[Traffic, ...]:
        """Returns the traffic of a step: two all-reduces for each axis, first of row and column statistics, then of
        squared updates.
        """
        sizes = [count * self.dtype.itemsize for count in (self.elements, len(self.rows))]
        return tuple(
            Traffic(axis, LABEL, 2, sum(sent_bytes("all_reduce", size, ranks) for size in sizes))
            for axis, ranks in self.axes
        )


class FactoredUpdates(SummedUpdates):
    """Adafactor's updates of all sharded parameters on this rank, once per step. Sums over a parameter, such as row
    means, are all-reduced between the ranks with its shards.

    Args:
        places: the optimizer's flat tensors, with this rank's shards of the parameters.
        inner: Adafactor, or a composite of several optimizers that contains it.
    """

    families = frozenset({ROWS, COLUMNS, SQUARES})
    _routes: FactorRoutes

    def __init__(
        self, places: Sequence[OptimizerTensor], inner: torch.optim.Optimizer, routes: FactorRoutes, comm: Comm
    ) -> None:
        super().__init__(places, inner, routes, comm)
        self._holder = comm.grid.holder()
        parts = inner.parts.values() if isinstance(inner, CompositeOptimizer) else [inner]
        self._makers = [part for part in parts if isinstance(part, FlatAdafactor)]
        self.state: dict[str, dict[str, Tensor]] = {}

    @property
    def shapes(self) -> WholeShapes:
        """Shapes of the running means of squared gradients: parameter name -> state name -> shape. A matrix has row
        means and column means; a vector has one mean for each element.
        """
        return {row.name: mean_shapes(row.shape) for row in self._routes.rows}

    def forget(self) -> None:
        """Deletes the running means of squared gradients; the next update starts new ones."""
        self.state.clear()

    def prepare(self) -> WholeState:
        """Returns the running means of squared gradients: parameter name -> state name -> tensor. Allocates zeros
        before the first update.
        """
        if not self.state:
            self.state.update(self._views(self._zeros(self._routes.elements - len(self._numbers))))
        return self.state

    @torch.no_grad()
    def run(self, unused: frozenset[str], missed: Mapping[str, int]) -> Iterator[frozenset[str]]:
        """Updates all parameters of this object except ``unused`` ones (without a gradient). Yields one set, at the
        end: the names of all parameters of this object. ``missed``: parameter name -> number of earlier updates without
        a gradient.
        """
        due = {weight for maker in self._makers for weight in maker.due}
        for maker in self._makers:
            maker.due.clear()
        used = [row for row in self._routes.rows if row.name not in unused]
        every = counted_parts(self._places, due, self._routes, self._comm.grid)
        parts = [part for part in every if part.row.name not in unused]
        steps = {row.name: self._group(row)["step"] - missed.get(row.name, 0) for row in used}
        sums = self._zeros(self._routes.elements)
        weights = self._add_squares(parts, sums)
        self._reduce(sums)
        means, new = self.prepare(), self._views(sums)
        for row in used:
            take_in(means[row.name], new[row.name], AdafactorRule.of(self._group(row)).newest(steps[row.name]))
        scales = {row.name: self._scales(row) for row in used}
        squares = self._zeros(len(self._numbers))
        for part in parts:
            squares[part.number] += part.own(self._update(part, scales).square_()).sum()
        self._reduce(squares)
        for part in parts:
            rule, row = AdafactorRule.of(self._group(part.row)), part.row
            size = step_size(weights[part.number], squares[part.number], row.elements, rule, steps[row.name])
            part.weights.mul_(1 - rule.lr * rule.weight_decay).sub_(self._update(part, scales).mul_(size))
        yield frozenset(self._numbers)

    def _add_squares(self, parts: Sequence[CountedPart], sums: Tensor) -> Tensor:
        """Adds the squares of this rank; returns the part of the result that belongs to the weights [parameters]."""
        own = {row.name: self._local_zeros(row) for row in {part.row.name: part.row for part in parts}.values()}
        norms = sums[len(sums) - len(self._numbers) :]
        for part in parts:
            part.piece.add_squares(part.own(part.grads.square()), own[part.row.name])
            norms[part.number] += part.own(part.weights.square()).sum()
        whole = self._views(sums)
        for name, local in own.items():
            for kind, values in local.items():
                self._add(whole[name][kind], values, self._routes.rows[self._numbers[name]], kind)
        return norms

    def _update(self, part: CountedPart, scales: WholeState) -> Tensor:
        least = AdafactorRule.of(self._group(part.row)).least(part.weights.dtype)
        return part.piece.update(part.grads, scales[part.row.name], least)

    def _scales(self, row: ShardRow) -> dict[str, Tensor]:
        """Returns factors of the mean squares of this rank's part of a parameter."""
        whole = scales_of(self.state[row.name], AdafactorRule.of(self._group(row)).least(self._routes.dtype))
        views, dim = {kind: self._held(values, row, kind) for kind, values in whole.items()}, self._cut(row)[0] or 0
        return {kind: own[0].contiguous() if len(own) == 1 else torch.cat(own, dim) for kind, own in views.items()}

    def _add(self, whole: Tensor, local: Tensor, row: ShardRow, kind: str) -> None:
        """Adds sums in the shape of this rank's shard to the sums of the full parameter."""
        views, dim = self._held(whole, row, kind), self._cut(row)[0] or 0
        sizes = [view.shape[dim] if view.dim() else 0 for view in views]
        parts = torch.split(local, sizes, dim) if len(views) > 1 else [local]
        for view, own in zip(views, parts, strict=True):
            view.add_(own)

    def _held(self, whole: Tensor, row: ShardRow, kind: str) -> list[Tensor]:
        """Returns views of the ranges of means, or of sums, that this rank's part of a parameter has."""
        over = {ROWS: len(row.shape) - 1, COLUMNS: len(row.shape) - 2}.get(kind)
        if row.dim is not None and len(row.experts) > 1 and over != 0:
            (experts,) = row.expert_ranges(self._holder)
            whole = whole[experts.start : experts.stop]
        dim, own = self._cut(row)
        if dim is None or dim == over:
            return [whole]
        return [whole.narrow(dim, each.start, each.stop - each.start) for each in own]

    def _cut(self, row: ShardRow) -> tuple[int | None, tuple[Range, ...]]:
        """Returns the dim of a parameter that is cut over tensor ranks, or over expert ranks alone, and its ranges."""
        if row.dim is None and len(row.experts) > 1:
            return row.expert_dim, row.expert_ranges(self._holder)
        return row.dim, row.tensor_ranges(self._holder)

    def _group(self, row: ShardRow) -> dict[str, Any]:
        return self._inner.param_groups[row.group]

    def _zeros(self, elements: int) -> Tensor:
        return torch.zeros(elements, dtype=self._routes.dtype, device=self._device)

    def _local_zeros(self, row: ShardRow) -> dict[str, Tensor]:
        shapes = mean_shapes(row.local_shape(self._holder))
        return {kind: self._zeros(prod(shape)).view(shape) for kind, shape in shapes.items()}

    def _views(self, flat: Tensor) -> dict[str, dict[str, Tensor]]:
        """Returns views of the sums of all parameters by name, in the shapes of the means."""
        found: dict[str, dict[str, Tensor]] = {}
        start = 0
        for row in self._routes.rows:
            own = found[row.name] = {}
            for kind, shape in mean_shapes(row.shape).items():
                own[kind] = flat[start : start + prod(shape)].view(shape)
                start += prod(shape)
        return found
