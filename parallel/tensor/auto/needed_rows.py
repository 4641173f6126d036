"""Which rows of each parameter have a gradient from one rank's part of the input of a product.

x of a product    rank 0 | rank 1 | .. | rank t-1      backward from random numbers on one part at a time
rows of W         # . # .  . # . #                     # has a gradient
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.parallel.tensor.auto.low_rank_weight import LowRankWeight, gradient_leaves

Rows = list[Tensor]
"""For each dim of a parameter, whether each of its rows has a gradient: bool [size]."""
Needed = dict[str, list[Rows]]
"""For each parameter that all ranks need something of: the rows of each rank."""

_DRAWS = 4
_ROUNDING = 1e-11
"""Gradients below this share of the largest are rounding errors of float64."""


class SharedInput(NamedTuple):
    """The input of a product, or its weight, of which each rank has a part."""

    x: Tensor
    dim: int


class NeededRows:
    """Backward passes from parts of inputs; what one has shown is kept.

    ``parameters``: of the block, by name; ``seed``: of the random numbers.
    """

    def __init__(self, parameters: Mapping[str, Tensor], seed: int) -> None:
        self._parameters = parameters
        self._leaves = {name: gradient_leaves(parameter) for name, parameter in parameters.items()}
        self._generator = torch.Generator().manual_seed(seed)
        self._seen: dict[tuple[str, int], Needed] = {}

    def of_ranks(self, row: str, inputs: Sequence[SharedInput], tp: int) -> Needed:
        """What each of ``tp`` ranks needs for its part of ``inputs``, those of the products with ``row``.

        What k ranks need together is needed by the one that has their parts, so a multiple of ``tp`` that was tried
        before answers for ``tp``.
        """
        if (row, tp) not in self._seen:
            more = next((size for known, size in self._seen if known == row and size % tp == 0), None)
            if more is None:
                self._seen[row, tp] = self._tried(inputs, tp)
            else:
                finer = self._seen[row, more]
                self._seen[row, tp] = {name: _joined(ranks, more // tp) for name, ranks in finer.items()}
        return self._seen[row, tp]

    def gradients(self, out: Tensor, names: Iterable[str], again: bool = False) -> dict[str, tuple[Tensor, ...]]:
        """The gradients of the parameters that ``out`` depends on; ``again``: its graph is needed once more."""
        leaves = [(name, leaf) for name in names for leaf in self._leaves[name]]
        grads = torch.autograd.grad(out, [leaf for _, leaf in leaves], retain_graph=again, allow_unused=True)
        found: dict[str, tuple[Tensor, ...]] = {}
        for (name, _), grad in zip(leaves, grads, strict=True):
            if grad is not None:
                found[name] = (*found.get(name, ()), grad)
        return found

    def _tried(self, inputs: Sequence[SharedInput], tp: int) -> Needed:
        ranks = [self._rows_of_rank(inputs, rank, tp) for rank in range(tp)]
        everywhere = [name for name in self._parameters if all(name in rows for rows in ranks)]
        return {name: [rows[name] for rows in ranks] for name in everywhere}

    def _rows_of_rank(self, inputs: Sequence[SharedInput], rank: int, tp: int) -> dict[str, Rows]:
        """For each parameter and dim, the rows that have a gradient from one rank's part.

        A gradient that is zero in theory (a key's bias) is a rounding error, which may be exactly zero by chance. Where
        such errors are seen, a row is zero only if it is so in several draws.
        """
        found: dict[str, Rows] = {}
        for _ in range(_DRAWS):
            sizes = {name: [grad.abs() for grad in own] for name, own in self._draw(inputs, rank, tp).items()}
            for name, own in sizes.items():
                rows = [_nonzero(own, dim, size) for dim, size in enumerate(self._parameters[name].shape)]
                found[name] = [a | b for a, b in zip(found.get(name, rows), rows, strict=True)]
            tensors = [size for own in sizes.values() for size in own if size.numel()]
            largest = max((float(size.max()) for size in tensors), default=0.0)
            if all(map(_complete, found.values())) or not any(_has_rounding(size, largest) for size in tensors):
                break
        return found

    def _draw(self, inputs: Sequence[SharedInput], rank: int, tp: int) -> dict[str, tuple[Tensor, ...]]:
        out = torch.zeros(())
        for x, dim in inputs:
            width = x.shape[dim] // tp
            out = out + self._random_sum(x.narrow(dim, rank * width, width))
        return self.gradients(out, self._parameters, again=True)

    def reaching(self, tensors: Iterable[Tensor]) -> dict[str, tuple[Tensor, ...]]:
        """Gradients of the parameters that one of the tensors depends on, from random numbers."""
        out = sum((self._random_sum(tensor) for tensor in tensors), torch.zeros(()))
        return self.gradients(out, self._parameters, again=True)

    def _random_sum(self, part: Tensor) -> Tensor:
        """A random linear function; of a low-rank weight one that its factors compute."""
        if isinstance(part, LowRankWeight):
            part = part @ torch.randn(part.shape[-1], 1, generator=self._generator, dtype=part.dtype)
        noise = torch.randn(part.shape, generator=self._generator, dtype=part.dtype)
        return (part * noise).sum()


def is_partition(rows: Sequence[Tensor]) -> bool:
    """Whether the ranks need different rows of a dim that together are all rows."""
    table = torch.stack(list(rows))
    return bool(table.any(0).all()) and not bool(table.all()) and bool((table != table[0]).any())


def _joined(ranks: Sequence[Rows], together: int) -> list[Rows]:
    """Rows by rank and dim, where each rank takes the parts of ``together`` ranks."""
    runs = [ranks[first : first + together] for first in range(0, len(ranks), together)]
    return [[torch.stack(dims).any(0) for dims in zip(*run, strict=True)] for run in runs]


def _complete(rows: Rows) -> bool:
    return all(bool(held.all()) for held in rows)


def _nonzero(sizes: Sequence[Tensor], dim: int, extent: int) -> Tensor:
    """Whether each of the rows of a parameter has a gradient, by one that was not multiplied along ``dim``; ``sizes``:
    the absolute values of its gradients."""
    size = next(size for size in sizes if size.shape[dim] == extent)
    others = [d for d in range(size.dim()) if d != dim]
    return (size.amax(others) if others else size) > 0


def _has_rounding(size: Tensor, largest: float) -> bool:
    return bool(((size > 0) & (size < _ROUNDING * largest)).any())
