"""Groups of a block's parameters that are sharded together, and the rows of each parameter that a rank needs.

A product R sums over the width of its input x. Rank r can compute a partial sum from a slice of x alone, and needs only
the rows of earlier weights that the slice depends on. Backward from a random gradient on the slice finds these rows: a
row with a gradient of exactly zero is not needed.

                                     q k v        q k v        rank 0 has x[0:4]: rows 0:4 of each third
    c_attn ── attention ── x ── R    # . # . # .               rank 1 has x[4:8]: rows 4:8
                                     . # . # . #

If the ranks need different rows, and together need all rows, R is a row layer and the weights before it are its
columns. The search knows neither heads nor module classes; rows stay in their order, as the code expects.

Other products of the same input as R are row layers too. An adapter is a pair of thin products parallel to a layer: for
a column layer, the first is replicated and the second a column; for a row layer, the first is a row and the second
replicated.

    x ─┬─ W ─────── + ── y sharded        x sharded ─┬─ W ── sum ────── + ── y
       └─ A ── B ───┘                                └─ A ── sum ── B ──┘

The product of an adapter may also be added to the weight itself (PEFT's pairs for a stack of experts). Parameters that
reach a product through the weight alone are called factors: they are sharded as the weight is.

    W + B A       rows of W and of B on a rank, all of A       columns of W and of A, all of B

Backward from one rank's slice of a product's input marks the rows of each parameter with a gradient:

x of a product    rank 0 | rank 1 | .. | rank t-1      backward from random numbers on one slice at a time
rows of W         # . # .  . # . #                     # has a gradient
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from engine.parallel.model.name_patterns import is_inside
from engine.parallel.model.parametrized_weights import unchanged_by_itself
from engine.parallel.shard_table import Range
from engine.parallel.tensor.auto.low_rank_weight import LowRankWeight, gradient_leaves
from engine.parallel.tensor.auto.matmul_trace import MatmulRecord, MatmulTrace
from engine.parallel.tensor.global_tensor.global_tensor import GlobalTensor
from engine.parallel.tensor.plan.ranges import cut_parts, ranges_of_runs
from engine.parallel.tensor.plan.tensor_plan import ParameterCut

Rows = list[Tensor]
"""Bool masks [size], one per dim of a parameter: True for rows with a nonzero gradient."""
Needed = dict[str, list[Rows]]
"""For each parameter, the rows that each rank needs; only parameters needed by all ranks."""

_DRAWS = 4
_ROUNDING = 1e-11
"""Gradients below this share of the largest are rounding errors of float64."""


class SharedInput(NamedTuple):
    """Tensor ``x``, an activation or a weight, to split along ``dim`` into one equal slice per tensor rank."""

    x: Tensor
    dim: int


class NeededRows:
    """Finder of the weight rows that each tensor rank needs: rows with nonzero gradients in random backward runs.

    ``parameters``: parameters of one block by name; ``seed``: seed of the random gradients.
    """

    def __init__(self, parameters: Mapping[str, Tensor], seed: int) -> None:
        self._parameters = parameters
        self._leaves = {name: gradient_leaves(parameter) for name, parameter in parameters.items()}
        self._generator = torch.Generator().manual_seed(seed)
        self._seen: dict[tuple[str, int], Needed] = {}

    def of_ranks(self, row: str, inputs: Sequence[SharedInput], tp: int) -> Needed:
        """Finds the part of each weight that each of ``tp`` ranks needs for its slices of ``inputs``, by backward runs.

        Returns bool masks by weight name, [rank][dim]: True for each needed index of this dim of the weight. ``row``:
        name that identifies ``inputs`` in the cache.
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
        """Returns the gradients of the scalar ``out`` for the parameters in ``names`` that ``out`` depends on.

        Each value is a tuple: one gradient of a dense parameter, or two of a low-rank weight. ``again``: True to retain
        the autograd graph.
        """
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
        """Returns the rows with a gradient from one rank's slice, for each parameter and dim.

        A gradient that is zero in theory (a key's bias) is a rounding error, which may be exactly zero by chance. If
        such errors appear, a row counts as zero only after several draws without a gradient.
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
        """Runs backward from ``tensors`` with random output gradients; returns parameter gradients by name.

        Each value is a tuple: one gradient of a dense parameter, or two of a low-rank weight.
        """
        out = sum((self._random_sum(tensor) for tensor in tensors), torch.zeros(()))
        return self.gradients(out, self._parameters, again=True)

    def _random_sum(self, part: Tensor) -> Tensor:
        """Returns a random linear function of ``part``; for a low-rank weight a product that its factors can
        compute."""
        if isinstance(part, LowRankWeight):
            part = part @ torch.randn(part.shape[-1], 1, generator=self._generator, dtype=part.dtype)
        noise = torch.randn(part.shape, generator=self._generator, dtype=part.dtype)
        return (part * noise).sum()


def is_partition(rows: Sequence[Tensor]) -> bool:
    """Returns True if the bool masks ``rows``, one per rank, are not all equal and together cover every index."""
    table = torch.stack(list(rows))
    return bool(table.any(0).all()) and not bool(table.all()) and bool((table != table[0]).any())


def _joined(ranks: Sequence[Rows], together: int) -> list[Rows]:
    """Returns the rows by rank and dim after every ``together`` ranks have become one."""
    runs = [ranks[first : first + together] for first in range(0, len(ranks), together)]
    return [[torch.stack(dims).any(0) for dims in zip(*run, strict=True)] for run in runs]


def _complete(rows: Rows) -> bool:
    return all(bool(held.all()) for held in rows)


def _nonzero(sizes: Sequence[Tensor], dim: int, extent: int) -> Tensor:
    """Returns True for each row of ``dim`` with a gradient; ``sizes``: absolute values of the parameter's gradients."""
    size = next(size for size in sizes if size.shape[dim] == extent)
    others = [d for d in range(size.dim()) if d != dim]
    return (size.amax(others) if others else size) > 0


def _has_rounding(size: Tensor, largest: float) -> bool:
    return bool(((size > 0) & (size < _ROUNDING * largest)).any())


Given = tuple[tuple[Any, ...], dict[str, Any]]
"""Pair (arguments, keyword arguments) of the block, with real tensors."""


@dataclass(frozen=True, slots=True)
class CoupledParameters:
    """Group of parameters to shard together: a row-parallel layer and the column-parallel layers before it."""

    row: str
    """Name of the row layer's parameter; its product is summed over the ranks."""
    columns: tuple[str, ...]
    """Names of the column layers' parameters, which compute the row layer's input."""
    cuts: Mapping[str, ParameterCut]
    """Sharding of every parameter of the group, by name. A column layer that every rank needs in full has one range,
    with all ranks as its holders.
    """
    partial: tuple[str, ...]
    """Replicated parameters used between columns and row, with a partial gradient on each rank."""
    beside: tuple[str, ...] = ()
    """Other parameters multiplied with the row layer's input; their products are summed as well."""
    factors: tuple[str, ...] = ()
    """Sharded factors of a weight, such as low-rank factors, that no product reads directly."""


class GradientSparsity:
    """Search for the groups of parameters of ``block`` to shard together.

    In backward from one rank's slice of an activation, rows with nonzero gradients are the rows that the rank needs.

    ``block``: copy of a model's block in eval mode, with random weights; ``given``: its arguments; ``others``: names of
    parameters to leave out; ``used``: indices of the output leaves that the model reads, None for all; ``seed``: seed
    of the gradients.
    """

    def __init__(
        self,
        block: nn.Module,
        given: Given,
        others: Collection[str] = (),
        used: Collection[int] | None = None,
        seed: int = 0,
    ) -> None:
        self._block, self._given, self._others, self._used = block, given, frozenset(others), used
        self._parameters = dict(block.named_parameters())
        self._found: dict[int, tuple[CoupledParameters, ...]] = {}
        self._products: list[MatmulRecord] | None = None
        self._widths = {product.weight: product.x.shape[product.x_dim] for product in reversed(self.products)}
        self._multiplied = {product.weight for product in self.products}
        # the bias of a key has a zero gradient (softmax ignores it), so a bias takes the sharding of its weight
        self._bias_of = {product.weight: product.bias for product in self.products if product.bias}
        self._rows = NeededRows(self._parameters, seed)
        self._elsewhere: dict[tuple[tuple[str, ...], tuple[str, ...]], bool] = {}
        self._direct: dict[tuple[str, tuple[str, ...]], tuple[str, ...]] = {}

    @property
    def products(self) -> list[MatmulRecord]:
        """Matrix products of activations with parameters in a run of ``block``, cached until :meth:`forget`."""
        if self._products is None:
            self._products = self._run(())
        return self._products

    def forget(self) -> None:
        """Frees the activations that :attr:`products` has recorded."""
        self._products = None

    def groups(self, tp: int) -> tuple[CoupledParameters, ...]:
        """Returns the groups of parameters to shard on ``tp`` ranks, in execution order of their row layers."""
        if tp not in self._found:
            self._found[tp] = self._find_groups(tp)
        return self._found[tp]

    def _find_groups(self, tp: int) -> tuple[CoupledParameters, ...]:
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

    def may_shard(self, rows: Collection[str], tp: int) -> bool:
        """Returns True if a parameter in ``rows`` could be the row layer of a group on ``tp`` ranks."""
        return any(self._group(row, tp, set(self._others)) is not None for row in rows)

    def try_sizes(self, sizes: Sequence[int]) -> None:
        """Finds and caches the groups of parameters to shard for each number of ranks in ``sizes``."""
        for size in sorted(sizes, reverse=True):
            self.groups(size)

    def _size(self, group: CoupledParameters) -> int:
        return sum(self._parameters[name].numel() for name in group.cuts)

    def width(self, row: str) -> int:
        """Returns the number of input features of the product with the parameter ``row``."""
        return self._widths[row]

    def _run(self, cut_off: Sequence[str]) -> list[MatmulRecord]:
        args, kwargs = self._given
        watch = MatmulTrace(self._block, cut_off)
        # reads of weights must not change them: the graph of the first run is still read after later runs
        with torch.enable_grad(), unchanged_by_itself(self._parameters.values()), watch:
            self._block(*args, **kwargs)
        return watch.seen

    def _group(self, row: str, tp: int, taken: set[str]) -> CoupledParameters | None:
        products = [p for p in self.products if p.weight == row and p.x.requires_grad]
        if not products or any(p.x.shape[p.x_dim] % tp for p in products):
            return None
        alike = self._same_input(products)
        needed = self._rows.of_ranks(alike[0], [SharedInput(p.x, p.x_dim) for p in products], tp)
        cuts = dict(self._cuts(row, needed, taken))
        columns = [name for name in cuts if name in self._multiplied]
        rows = [row, *(name for name in alike if name != row and name not in taken and name not in columns)]
        if not columns or self._is_adapter(row, columns) or self._draws_beside(columns, cuts):
            return None
        if self._goes_elsewhere(rows, columns):
            return None
        for name in self._used_whole(rows, columns, taken):
            if name in needed and bool(needed[name][0][0].any()):
                size = self._parameters[name].shape[0]
                cuts[name] = ParameterCut(0, (Range(0, size, tuple(range(tp))),))
                columns.append(name)
        for name in columns:
            if (bias := self._bias_of.get(name)) is not None:
                cuts[bias] = ParameterCut(0, cuts[name].ranges)
        inside = self._inside_weights([*rows, *columns])
        for name in rows:
            dim = next(p.weight_dim for p in self.products if p.weight == name)
            cuts |= self._cuts_inside(name, dim, tp, taken)
            cuts[name] = ParameterCut(dim, cut_parts(self._parameters[name].shape[dim], tp))
        factors = tuple(name for name in cuts if name in inside and name not in (*rows, *columns))
        return CoupledParameters(row, tuple(columns), cuts, (), tuple(rows[1:]), factors)

    def _inside_weights(self, weights: Collection[str]) -> list[str]:
        """Returns the parameters that code adds to ``weights`` before a product."""
        made = [p.made for p in self.products if p.weight in weights and p.made is not None]
        return list(self._rows.reaching(made)) if made else []

    def _cuts_inside(self, row: str, dim: int, tp: int, taken: set[str]) -> dict[str, ParameterCut]:
        """Returns the sharding of the factors of a row layer's weight, which is sharded along ``dim``."""
        made = {id(p.made): p.made for p in self.products if p.weight == row and p.made is not None}
        if not made:
            return {}
        inputs = [SharedInput(weight, dim) for weight in made.values()]
        return dict(self._cuts(row, self._rows.of_ranks(f"weight of {row}", inputs, tp), taken))

    def _same_input(self, products: Sequence[MatmulRecord]) -> list[str]:
        """Returns the parameters of products with the same inputs as ``products``: they need the same rows."""
        inputs = [_elements(product) for product in products]
        mine: dict[str, list[object]] = {}
        for product in self.products:
            if product.x.requires_grad:
                mine.setdefault(product.weight, []).append(_elements(product))
        return [weight for weight, found in mine.items() if found == inputs]

    def _used_whole(self, rows: Sequence[str], columns: Sequence[str], taken: Collection[str]) -> list[str]:
        """Returns other products that reach the row layer past the columns: multi-query keys and values.

        Every rank needs all their rows. The first product of an adapter reaches the row layer through a column alone.
        """
        inputs = {id(p.x) for p in self.products if p.weight in columns}
        others = dict.fromkeys(p.weight for p in self.products if id(p.x) in inputs)
        found = [name for name in others if not (name in columns or name in taken or name in rows)]
        asked = rows[0], tuple(sorted(columns))
        if found and asked not in self._direct:  # the same for every number of ranks
            self._direct[asked] = self._reaching(rows[0], columns, list(self._parameters))
        return [name for name in found if name in self._direct[asked]]

    def _is_adapter(self, row: str, columns: Sequence[str]) -> bool:
        """Returns True if the product of ``columns`` and ``row`` has a low rank and a layer has the same input and
        output size.

        The sharding of such a pair follows the layer.
        """
        (first, *more), second = columns, self._parameters[row]
        if more or second.dim() != 2:
            return False
        pairs = zip(first.split("."), row.split("."), strict=False)
        owner = ".".join(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        edges = {self._parameters[first].shape[1], second.shape[0]}
        inputs = {_elements(p) for p in self.products if p.weight == first}
        others = (p.weight for p in self.products if _elements(p) in inputs and is_inside(p.weight, owner))
        shapes = [self._parameters[name].shape for name in {*others} - {first, row}]
        return any(set(shape) == edges and second.shape[1] < min(shape) for shape in shapes)

    def _cuts(self, row: str, needed: Needed, taken: set[str]) -> Iterator[tuple[str, ParameterCut]]:
        biases = set(self._bias_of.values())
        for name, ranks in needed.items():
            if name == row or name in taken or name in biases:
                continue
            for dim in range(self._parameters[name].dim()):
                rows = [by_dim[dim] for by_dim in ranks]
                if is_partition(rows):
                    yield name, ParameterCut(dim, ranges_of_runs([_runs(own) for own in rows]))
                    break

    def _draws_beside(self, columns: Sequence[str], cuts: Collection[str]) -> bool:
        """Returns True if a dropout is between the input of the columns and a replicated product.

        Between columns and row each rank draws its own mask, and the product would get different gradients on each
        rank. PEFT's dropouts draw equal masks there (``layers.adapter_layers``).
        """
        before = [p for p in self.products if p.weight in columns]
        inputs, same = {_elements(p) for p in before}, {id(p.x) for p in before}
        others = (p for p in self.products if p.dropped and p.weight not in cuts and not _is_peft(p.weight, columns))
        return any(_elements(p) in inputs and id(p.x) not in same for p in others)

    def _goes_elsewhere(self, rows: Sequence[str], columns: Sequence[str]) -> bool:
        """Returns True if the columns' outputs also reach an output of the block past the row layers, as a residual
        does."""
        asked = tuple(rows), tuple(sorted(columns))
        if asked not in self._elsewhere:
            self._elsewhere[asked] = self._reach_an_output(rows, columns)
        return self._elsewhere[asked]

    def _reach_an_output(self, rows: Sequence[str], columns: Sequence[str]) -> bool:
        outputs = [leaf for leaf in self._outputs(rows) if leaf.requires_grad]
        total = sum((leaf.double().sum() for leaf in outputs), torch.zeros((), dtype=torch.float64))
        if not total.requires_grad:
            return False
        found = self._rows.gradients(total, columns)
        return any(bool(grad.any()) for own in found.values() for grad in own)

    def _outputs(self, cut_off: Sequence[str]) -> list[Tensor]:
        args, kwargs = self._given
        with torch.enable_grad(), unchanged_by_itself(self._parameters.values()), MatmulTrace(self._block, cut_off):
            out = self._block(*args, **kwargs)
        return float_leaves(out, self._used)

    def _between(self, group: CoupledParameters) -> tuple[str, ...]:
        """Returns replicated parameters that reach the row layer past the detached columns, or are added to weights."""
        names = [name for name in self._parameters if name not in group.cuts]
        found = self._reaching(group.row, [name for name in group.cuts if name != group.row], names)
        inside = self._inside_weights([group.row, *group.columns, *group.beside])
        return tuple(dict.fromkeys((*found, *(name for name in names if name in inside))))

    def _reaching(self, row: str, cut_off: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
        """Returns the ``names`` that reach the input of ``row`` while the products of ``cut_off`` are detached."""
        inputs = [p.x for p in self._run(cut_off) if p.weight == row and p.x.requires_grad]
        if not inputs or not names:
            return ()
        total: Tensor = torch.stack([x.sum() for x in inputs]).sum()
        return tuple(self._rows.gradients(total, names))


def _runs(own: Tensor) -> list[tuple[int, int]]:
    """Returns the runs [start, stop) of rows where ``own`` is true."""
    edges = torch.diff(own.int(), prepend=own.new_zeros(1).int(), append=own.new_zeros(1).int()).nonzero().flatten()
    return [(start, stop) for start, stop in edges.view(-1, 2).tolist()]


def _is_peft(weight: str, columns: Sequence[str]) -> bool:
    """Returns True if ``weight`` is the first factor of a PEFT adapter of one of the columns."""
    layer, _, adapter = weight.partition(".lora_A.")
    return f"{layer}.base_layer.weight" in columns and adapter not in ("", "weight")


def _elements(product: MatmulRecord) -> object:
    """Returns a key of the product's input, equal for views of the same elements with the same summed dim."""
    x, dim = product.x, product.x_dim
    base = x if x._base is None else x._base
    return id(base), x.storage_offset(), x.numel(), x.shape[dim], x.stride(dim), x.is_contiguous()


def float_leaves(out: Any, used: Collection[int] | None) -> list[Any]:
    """Returns the float tensors among the pytree leaves of a module's output ``out``.

    ``used``: indices of the leaves to consider, None for all.
    """
    leaves = pytree.tree_leaves(out, is_leaf=lambda node: isinstance(node, GlobalTensor))
    read = [leaf for number, leaf in enumerate(leaves) if used is None or number in used]
    return [leaf for leaf in read if isinstance(leaf, Tensor | GlobalTensor) and leaf.is_floating_point()]
