"""Which parameters of a block are cut together, and which rows of each a rank needs.

A product R sums over the width of its input x. Rank r can do its share from a slice of x alone, and needs of the
products before only what that slice depends on. Backward from a random gradient on the slice shows it: rows of an
earlier weight whose gradient is exactly zero are not needed.

                                     q k v        q k v        rank 0 has x[0:4]: rows 0:4 of each third
    c_attn ── attention ── x ── R    # . # . # .               rank 1 has x[4:8]: rows 4:8
                                     . # . # . #

If the ranks need different rows that together are all, R is a row layer and the weights before it are its columns.
Nothing is known of heads or classes; rows stay in their order, which is what the code expects.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from engine.parallel.shards import Range
from engine.parallel.tensor.auto.products import Product, Products
from engine.parallel.tensor.cuts import ParameterCut
from engine.parallel.tensor.ranges import cut_parts, ranges_of
from engine.parallel.tensor.views.view import View

Given = tuple[tuple[Any, ...], dict[str, Any]]
"""args and kwargs of the block, with content."""


@dataclass(frozen=True, slots=True)
class Group:
    """A row layer and what is cut with it."""

    row: str
    """The parameter whose product is summed over the ranks."""
    columns: tuple[str, ...]
    """The parameters whose products give the parts."""
    cuts: Mapping[str, ParameterCut]
    """Everything that is cut, by parameter; a column that all ranks need whole has one range with all holders."""
    partial: tuple[str, ...]
    """Whole parameters that are used between columns and row: their gradient is a part on every rank."""


class Patterns:
    """One run of ``block`` under observation; ``groups`` may be asked for several numbers of ranks.

    ``block``: a copy with random weights in eval mode; ``given``: what it is called with, the hidden states
    random; ``others``: parameters that are cut otherwise; ``used``: which leaves of its output somebody reads.
    """

    def __init__(
        self, block: nn.Module, given: Given, others: Collection[str] = (), used: Collection[int] | None = None
    ) -> None:
        self._block, self._given, self._others, self._used = block, given, frozenset(others), used
        self._parameters = dict(block.named_parameters())
        self._generator = torch.Generator().manual_seed(0)
        self.products = self._run(())
        self._multiplied = {product.weight for product in self.products}
        # a key's bias has no gradient: it follows its weight
        self._bias_of = {product.weight: product.bias for product in self.products if product.bias}

    def groups(self, tp: int) -> tuple[Group, ...]:
        """The groups for ``tp`` ranks, in the order of their rows in the run.

        A row that is a column of a larger group is left to that: of a, b and o in a chain with a narrow place between
        a and b (queries by way of a low rank), b and o are cut.
        """
        taken = set(self._others)
        rows = [row for row in dict.fromkeys(product.weight for product in self.products) if row not in taken]
        alone = {row: group for row in rows if (group := self._group(row, tp, taken)) is not None}
        found = []
        for row in alone:
            if any(row in other.columns and self._size(other) > self._size(alone[row]) for other in alone.values()):
                continue
            if row not in taken and (group := self._group(row, tp, taken)) is not None:
                taken.update(group.cuts)
                found.append(replace(group, partial=self._between(group)))
        return tuple(found)

    def _size(self, group: Group) -> int:
        return sum(self._parameters[name].numel() for name in group.cuts)

    def width(self, row: str) -> int:
        """Inputs of a product."""
        return next(p.x.shape[p.x_dim] for p in self.products if p.weight == row)

    def _run(self, cut_off: Sequence[str]) -> list[Product]:
        args, kwargs = self._given
        watch = Products(self._block, cut_off)
        with torch.enable_grad(), watch:
            self._block(*args, **kwargs)
        return watch.seen

    def _group(self, row: str, tp: int, taken: set[str]) -> Group | None:
        products = [p for p in self.products if p.weight == row and p.x.requires_grad]
        if not products or any(p.x.shape[p.x_dim] % tp for p in products):
            return None
        needed = self._needed(products, tp)
        cuts = dict(self._cuts(row, needed, taken))
        columns = [name for name in cuts if name in self._multiplied]
        if not columns or self._goes_elsewhere(row, columns):
            return None
        inputs = {id(p.x) for p in self.products if p.weight in columns}
        for product in self.products:  # multi-query keys and values: every rank needs them whole
            name = product.weight
            shares = id(product.x) in inputs and name not in cuts and name not in taken and name != row
            if shares and name in needed and any(needed[name][0][0]):
                size = self._parameters[name].shape[0]
                cuts[name] = ParameterCut(0, (Range(0, size, tuple(range(tp))),))
                columns.append(name)
        for name in columns:
            if (bias := self._bias_of.get(name)) is not None:
                cuts[bias] = ParameterCut(0, cuts[name].ranges)
        cuts[row] = ParameterCut(
            products[0].weight_dim, cut_parts(self._parameters[row].shape[products[0].weight_dim], tp)
        )
        return Group(row, tuple(columns), cuts, ())

    def _needed(self, products: Sequence[Product], tp: int) -> dict[str, list[list[list[bool]]]]:
        """By parameter and rank: for each dim, which rows have a gradient."""
        names = list(self._parameters)
        found: dict[str, list[list[list[bool]]]] = {}
        for rank in range(tp):
            out = torch.zeros(())
            for product in products:
                width = product.x.shape[product.x_dim] // tp
                part = product.x.narrow(product.x_dim, rank * width, width)
                noise = torch.randn(part.shape, generator=self._generator, dtype=part.dtype)
                out = out + (part * noise).sum()
            grads = torch.autograd.grad(out, list(self._parameters.values()), retain_graph=True, allow_unused=True)
            for name, grad in zip(names, grads, strict=True):
                if grad is not None:
                    found.setdefault(name, []).append([_nonzero(grad, dim) for dim in range(grad.dim())])
        return {name: ranks for name, ranks in found.items() if len(ranks) == tp}

    def _cuts(
        self, row: str, needed: Mapping[str, list[list[list[bool]]]], taken: set[str]
    ) -> Iterator[tuple[str, ParameterCut]]:
        biases = set(self._bias_of.values())
        for name, ranks in needed.items():
            if name == row or name in taken or name in biases:
                continue
            for dim in range(self._parameters[name].dim()):
                rows = [by_dim[dim] for by_dim in ranks]
                if _is_cut(rows):
                    yield name, ParameterCut(dim, ranges_of(rows))
                    break

    def _goes_elsewhere(self, row: str, columns: Sequence[str]) -> bool:
        """Whether what the columns give reaches an output of the block beside the row, as a residual does."""
        outputs = [leaf for leaf in self._outputs((row,)) if leaf.requires_grad]
        total = sum((leaf.double().sum() for leaf in outputs), torch.zeros((), dtype=torch.float64))
        if not total.requires_grad:
            return False
        wanted = [self._parameters[name] for name in columns]
        grads = torch.autograd.grad(total, wanted, allow_unused=True)
        return any(grad is not None and bool(grad.any()) for grad in grads)

    def _outputs(self, cut_off: Sequence[str]) -> list[Tensor]:
        args, kwargs = self._given
        with torch.enable_grad(), Products(self._block, cut_off):
            out = self._block(*args, **kwargs)
        return float_leaves(out, self._used)

    def _between(self, group: Group) -> tuple[str, ...]:
        """Whole parameters that still reach the row when its columns give no gradient."""
        products = self._run([name for name in group.cuts if name != group.row])
        inputs = [p.x for p in products if p.weight == group.row and p.x.requires_grad]
        names = [name for name in self._parameters if name not in group.cuts]
        if not inputs or not names:
            return ()
        total: Tensor = torch.stack([x.sum() for x in inputs]).sum()
        grads = torch.autograd.grad(total, [self._parameters[name] for name in names], allow_unused=True)
        return tuple(name for name, grad in zip(names, grads, strict=True) if grad is not None)


def float_leaves(out: Any, used: Collection[int] | None) -> list[Any]:
    """The float tensors among the leaves of an output that are ``used``; a view is one leaf."""
    leaves = pytree.tree_leaves(out, is_leaf=lambda node: isinstance(node, View))
    read = [leaf for number, leaf in enumerate(leaves) if used is None or number in used]
    return [leaf for leaf in read if isinstance(leaf, Tensor | View) and leaf.is_floating_point()]


def _nonzero(grad: Tensor, dim: int) -> list[bool]:
    others = [d for d in range(grad.dim()) if d != dim]
    largest = grad.abs().amax(others) if others else grad.abs()
    return (largest > 0).tolist()


def _is_cut(rows: Sequence[Sequence[bool]]) -> bool:
    """Whether the ranks need different rows that together are all."""
    covered = all(any(held) for held in zip(*rows, strict=True))
    return covered and not all(all(own) for own in rows) and any(own != rows[0] for own in rows[1:])
