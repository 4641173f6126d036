"""Updates of full matrices that are sharded over data and tensor ranks (Muon, SOAP, Shampoo under ZeRO and tp).

    the optimizer step computes directions of this rank's pieces of matrices
        -> all-to-all over data ranks: each matrix's owner gets its whole tensor shard
        -> all-to-all over tensor ranks, for matrices sharded over them: the owner gets the full matrix
        -> the owner computes the update, with state that it alone stores
        -> the same exchanges in reverse order, to the ranks that own the weights

A matrix that is replicated over tensor ranks is updated by each of them, from equal bits, with equal state.

Matrices are updated in rounds; communication of one round overlaps with computation of another:

    round 0   | gather | update, scatter | apply |
    round 1            | gather | update, scatter | apply |
    round 2                     | gather | update, scatter | apply |

In every column the newest round starts first, so that its gather overlaps with the update of the round before. All
ranks make all calls in this order, even if they own no matrix. Tensor ranks add two columns, for their exchanges.

The updates cannot be part of the following parameter gather, which sends rounded weights: fp32 masters are sharded in
equal slices of buckets, which divide matrices, so a matrix's owner lacks the masters to round. The gather of a bucket
starts when its last matrix is updated.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import TypeVar

import torch
from torch import Tensor

from engine.kernels.optim.matrix_rule import MatrixRule
from engine.parallel.comm.comm import Comm
from engine.parallel.grid import ShardHolder
from engine.parallel.shard_table import ShardRow
from engine.zero.flat_buckets import FlatBucket
from engine.zero.optim.composite import ENTRY, CompositeOptimizer
from engine.zero.optim.matrix.matrix_optimizers import FlatMatrixOptimizer
from engine.zero.optim.matrix.owner_exchange import OwnerExchange, OwnerRoute
from engine.zero.optim.optimizer_tensors import OptimizerTensor, WholeShapes

Made = TypeVar("Made")
_UNDER_WAY = frozenset[str]()


@dataclass(frozen=True, kw_only=True)
class MatrixRound:
    """Routes, to the owner ranks and back, of the matrices that one round of a step updates together."""

    data: OwnerRoute
    """Route over the data ranks that share buckets, for shards of one tensor rank."""
    tensor: OwnerRoute | None
    """Route over the tensor ranks, for the tensor-parallel matrices that this data rank owns; None: there are none."""


@dataclass(frozen=True, kw_only=True)
class MatrixRoutes:
    """Plan that assigns each matrix to an owner, the rank that updates it, and divides the matrices into rounds."""

    rows: Mapping[str, ShardRow]
    """Matrices by name, as rows of the shard table."""
    rounds: tuple[MatrixRound, ...]
    dtype: torch.dtype
    """Dtype of messages: the widest dtype of the updated weights."""
    place: int
    """Index of this rank among the data ranks that share buckets."""
    tp: int
    crossed: bool
    """True if tensor ranks shard any matrix of this pipeline coordinate, so that each round communicates over tp
    too.
    """

    @cached_property
    def made(self) -> tuple[str, ...]:
        """Names of the matrices that this rank owns: it updates them and stores their state."""
        found: list[str] = []
        for each in self.rounds:
            cut = each.tensor.owners if each.tensor is not None else {}
            found += [name for name in each.data.owned(self.place) if cut.get(name, self.tp) == self.tp]
        return tuple(found)


class MatrixUpdates:
    """Updates of sharded matrices, once per step. The shards are sent to each matrix's owner rank, which computes the
    update and sends it back.

    Args:
        places: the optimizer's flat tensors, with this rank's shards of the parameters.
        inner: a matrix optimizer, or a composite of several optimizers. The matrix optimizers in it are set to compute
            only update directions.
    """

    by_owner = True

    def __init__(
        self, places: Sequence[OptimizerTensor], inner: torch.optim.Optimizer, routes: MatrixRoutes, comm: Comm
    ) -> None:
        self._places, self._inner, self._routes = places, inner, routes
        parts = inner.parts.values() if isinstance(inner, CompositeOptimizer) else [inner]
        self._makers = [part for part in parts if isinstance(part, FlatMatrixOptimizer)]
        for maker in self._makers:
            maker.apart = True
        self._reads_weights = any(maker.reads_weights for maker in self._makers)
        self._exchanges = [
            (OwnerExchange(each.data, comm), OwnerExchange(each.tensor, comm) if each.tensor is not None else None)
            for each in routes.rounds
        ]
        self._blank = torch.empty(0, dtype=routes.dtype, device=places[0].flat.params.device if places else None)
        self.state: dict[str, dict[str, Tensor]] = {}
        self.shapes: WholeShapes = {name: self._rule(name).state_shapes(row.shape) for name, row in routes.rows.items()}
        """State of each matrix on its owner."""
        self._begun: set[str] = set()
        """Matrices with state that is known to be from earlier updates, or from the first one."""

    @property
    def families(self) -> frozenset[str]:
        """Names of the state tensors of full matrices, such as preconditioners."""
        return frozenset(family for maker in self._makers for family in maker.families)

    @property
    def on_all_data_ranks(self) -> bool:
        """True if every data rank updates all matrices and stores all of their state."""
        return all(len(each.data.members) == 1 for each in self._routes.rounds)

    def names(self, flat: FlatBucket) -> frozenset[str]:
        """Returns the names of the parameters in the bucket ``flat`` that this object updates."""
        return frozenset(slot.name for slot in flat.bucket.slots if slot.name in self._routes.rows)

    def forget(self) -> None:
        """Deletes the state of all matrices; the next update starts from new state."""
        self.state.clear()
        self._begun.clear()

    def prepare(self) -> dict[str, dict[str, Tensor]]:
        """Returns the state of the matrices that this rank owns: matrix name -> state name -> tensor. Allocates zeros
        if there is none yet.
        """
        for name in self._routes.made if not self.state else ():
            if own := self.shapes[name]:
                dtype, device = state_dtype(self._routes.rows[name]), self._blank.device
                self.state[name] = {k: torch.zeros(shape, dtype=dtype, device=device) for k, shape in own.items()}
        return self.state

    @torch.no_grad()
    def run(self, unused: frozenset[str], missed: Mapping[str, int]) -> Iterator[frozenset[str]]:
        """Updates all matrices except ``unused`` ones (without a gradient) from the stored update directions. Yields
        the names of matrices that are done, with ``unused`` ones, or an empty set while a round is in progress.

        ``missed``: matrix name -> number of earlier updates without a gradient.
        """
        step = _Step(self._places, self._take_directions(), self._routes.dtype, unused, missed)
        self.prepare()
        return staggered(self._round(number, step) for number in range(len(self._exchanges)))

    def _take_directions(self) -> dict[Tensor, Tensor]:
        directions = {weight: found for maker in self._makers for weight, found in maker.directions.items()}
        for maker in self._makers:
            maker.directions.clear()
        return directions

    @torch.no_grad()
    def _round(self, number: int, step: "_Step") -> Iterator[frozenset[str]]:
        data, tensor = self._exchanges[number]
        route, rows = self._routes.rounds[number].data, self._routes.rows
        gathered = [
            data.gather({name: kind[name] for name in route.owners if name in kind}, self._blank)
            for kind in step.kinds(self._reads_weights, self._routes.dtype)
        ]
        yield _UNDER_WAY
        parts = [{name: torch.cat(found) for name, found in each.wait().items()} for each in gathered]
        meeting = [tensor.gather(each, self._blank) for each in parts] if tensor is not None else []
        if self._routes.crossed:  # also on ranks without such a matrix: all ranks make the same rounds
            yield _UNDER_WAY
        cut = [each.wait() for each in meeting]
        whole = [name for name in parts[0] if tensor is None or rows[name].dim is None]
        made = {name: self._update([each[name] for each in parts], name, step) for name in whole}
        if tensor is not None:
            joined = {name: self._join_and_cut([each[name] for each in cut], name, step) for name in cut[0]}
            returning = tensor.scatter(joined, self._blank)
            del joined
            yield _UNDER_WAY
            made |= returning.wait()
        elif self._routes.crossed:
            yield _UNDER_WAY
        split = {name: torch.split(made[name].reshape(-1), list(route.sizes[name])) for name in parts[0]}
        arriving = data.scatter(split, self._blank)
        del gathered, parts, meeting, cut, made, split  # while a round waits, it holds no more than its messages
        yield _UNDER_WAY
        self._apply(arriving.wait(), step)
        yield frozenset(route.owners)

    def _apply(self, updates: Mapping[str, Tensor], step: "_Step") -> None:
        for name, update in updates.items():
            if name in step.weights and name not in step.unused:
                rule = self._rule(name)
                rule.apply_(step.weights[name], update, self._routes.rows[name].shape, self._number(name, step))

    def _join_and_cut(self, kinds: Sequence[Sequence[Tensor]], name: str, step: "_Step") -> list[Tensor]:
        """Joins the shards of all tensor ranks, updates, and cuts the update as the matrix is sharded."""
        row = self._routes.rows[name]
        update = self._update([_whole(parts, row) for parts in kinds], name, step).view(row.shape)
        return [_joined(_ranges(update, row, tp), update, row) for tp in range(len(kinds[0]))]

    def _update(self, kinds: Sequence[Tensor], name: str, step: "_Step") -> Tensor:
        """Returns the update of a full matrix, flat; zeros without a gradient, with unchanged state."""
        if name in step.unused:
            return torch.zeros_like(kinds[0]).reshape(-1)
        views = [each.view(self._shape(name)) for each in kinds]
        whole = torch.stack(views) if self._reads_weights else views[0]
        state, number = self.state.get(name, {}), self._number(name, step)
        if state:
            whole = whole.to(state_dtype(self._routes.rows[name]))
            if name not in self._begun:  # a checkpoint that was loaded without strict may have had no state of it
                self._begun.add(name)
                number = number if any(bool(kept.any()) for kept in state.values()) else 1
        return self._rule(name).update(whole, state, number).to(self._routes.dtype).reshape(-1)

    def _shape(self, name: str) -> tuple[int, ...]:
        return self._routes.rows[name].shape

    def _number(self, name: str, step: "_Step") -> int:
        """Returns the number of this update of a matrix."""
        group = self._inner.param_groups[self._routes.rows[name].group]
        return int(group["step"]) - step.missed.get(name, 0)

    def _rule(self, name: str) -> MatrixRule:
        group = self._inner.param_groups[self._routes.rows[name].group]
        maker = self._inner.parts[group[ENTRY]] if isinstance(self._inner, CompositeOptimizer) else self._inner
        assert isinstance(maker, FlatMatrixOptimizer)
        return maker.rule(group)


class _Step:
    """Directions and the weights of this rank's parts in one update."""

    def __init__(
        self,
        places: Sequence[OptimizerTensor],
        directions: Mapping[Tensor, Tensor],
        dtype: torch.dtype,
        unused: frozenset[str],
        missed: Mapping[str, int],
    ) -> None:
        self.unused, self.missed = unused, missed
        self.pieces: dict[str, Tensor] = {}
        """Directions, flat, by matrix."""
        self.weights: dict[str, Tensor] = {}
        """Weights, flat, by matrix."""
        for place in [place for place in places if place.parameter in directions]:
            for slot, part in place.slots():
                self.pieces[slot.name] = directions[place.parameter].view(-1)[part].to(dtype)
                self.weights[slot.name] = place.parameter.detach().view(-1)[part]

    def kinds(self, weights: bool, dtype: torch.dtype) -> list[Mapping[str, Tensor]]:
        """Returns the tensors that ranks send to owners: directions, and with ``weights`` the weights in ``dtype``."""
        own = {name: value.to(dtype) for name, value in self.weights.items()} if weights else {}
        return [self.pieces, own] if weights else [self.pieces]


def staggered(rounds: Iterable[Iterator[Made]]) -> Iterator[Made]:
    """Runs the iterators ``rounds`` overlapped, and yields all results. Each cycle starts one more iterator, and then
    takes one result from every started iterator, from the newest to the oldest.
    """
    waiting, begun = iter(rounds), list[Iterator[Made]]()
    while True:
        new = next(waiting, None)
        begun = begun if new is None else [new, *begun]
        if not begun:
            return
        for each in list(begun):
            found = list(islice(each, 1))
            if found:
                yield found[0]
            else:
                begun.remove(each)


def state_dtype(row: ShardRow) -> torch.dtype:
    """Returns the dtype of a matrix's optimizer state and of the computations with it: fp64 for an fp64 parameter,
    otherwise fp32.
    """
    return torch.float64 if row.dtype == torch.float64 else torch.float32


def _whole(parts: Sequence[Tensor], row: ShardRow) -> Tensor:
    """Returns the full matrix, from the shards of all tensor ranks."""
    whole = parts[0].new_empty(row.shape)
    for tp, part in enumerate(parts):
        for view, own in zip(_ranges(whole, row, tp), _ranges_of(part, row, tp), strict=True):
            view.copy_(own)
    return whole


def _dim(row: ShardRow) -> int:
    return row.dim or 0


def _ranges(whole: Tensor, row: ShardRow, tp: int) -> list[Tensor]:
    """Returns views of the ranges of the full matrix that a tensor rank has, in order."""
    own = [each for each in row.ranges if tp in each.holders]
    return [whole.narrow(_dim(row), each.start, each.stop - each.start) for each in own]


def _ranges_of(part: Tensor, row: ShardRow, tp: int) -> tuple[Tensor, ...]:
    """Returns the same ranges in the shard of the tensor rank, flat."""
    sizes = [each.stop - each.start for each in row.ranges if tp in each.holders]
    return torch.split(part.view(row.local_shape(ShardHolder(tp=tp))), sizes, _dim(row)) if sizes else ()


def _joined(ranges: Sequence[Tensor], whole: Tensor, row: ShardRow) -> Tensor:
    """Joins a tensor rank's ranges of ``whole`` into a flat tensor; it may have none."""
    return torch.cat(list(ranges), _dim(row)).reshape(-1) if ranges else whole.new_empty(0)
