"""Updates of whole matrices whose parts lie on data and tensor ranks (Muon under ZeRO and tensor parallelism).

    directions of the own parts, made by the step of the optimizer
        -> over the data ranks to the owner of each matrix: its part of a tensor rank, whole
        -> over the tensor ranks, of matrices that these cut: the whole matrix
        -> Newton-Schulz steps
        -> the same two ways back, to the weights that each rank owns

A matrix that tensor ranks hold in full is made by each of them, from equal bits, and not sent over that axis. The
directions of a step travel together, once all buckets have theirs, so that a step has two calls on each axis.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from engine.kernels.optim.muon_rule import MuonRule, apply_, orthogonal
from engine.parallel.comm.comm import Comm
from engine.parallel.shard_table import ShardRow
from engine.zero.flat_buckets import FlatBucket
from engine.zero.optim.composite import CompositeOptimizer
from engine.zero.optim.muon import FlatMuon
from engine.zero.optim.optimizer_tensors import OptimizerTensor, WholeState
from engine.zero.optim.owner_exchange import OwnerExchange, OwnerRoute


@dataclass(frozen=True)
class MatrixRoutes:
    """The ways of the matrices of one pipeline and tensor coordinate, and of one place among its shard groups."""

    rows: Mapping[str, ShardRow]
    """The matrices, by name."""
    data: OwnerRoute
    """Over the data ranks that share buckets: parts of a tensor rank."""
    tensor: OwnerRoute | None
    """Over the tensor ranks, of the cut matrices that this place among the data ranks owns; None: there are none."""
    dtype: torch.dtype
    """Of what is sent: the widest of the weights that are updated."""


class MatrixUpdates:
    """Makes the updates of all matrices of a rank, once a step; momenta are state of the optimizer.

    Args:
        places: the tensors of the optimizer.
        inner: the optimizer; its parts that are Muon then leave directions.
    """

    families = frozenset[str]()
    state: WholeState = MappingProxyType({})

    def __init__(
        self, places: Sequence[OptimizerTensor], inner: torch.optim.Optimizer, routes: MatrixRoutes, comm: Comm
    ) -> None:
        self._places, self._inner, self._routes = places, inner, routes
        self._makers = _muon_parts(inner)
        for maker in self._makers:
            maker.apart = True
        self._data = OwnerExchange(routes.data, comm)
        self._tensor = OwnerExchange(routes.tensor, comm) if routes.tensor is not None else None

    def waits(self, flat: FlatBucket) -> bool:
        """True if a parameter of the bucket is updated here, and not by the step of the optimizer."""
        return any(slot.name in self._routes.rows for slot in flat.bucket.slots)

    def forget(self) -> None:
        """Nothing is kept here."""

    def prepare(self) -> WholeState:
        """Nothing."""
        return self.state

    @torch.no_grad()
    def run(self, unused: frozenset[str], missed: Mapping[str, int]) -> None:
        """Update every matrix from the directions of the step; those without a gradient, ``unused``, stay."""
        del missed  # no update depends on the number of earlier ones
        directions = {weight: found for maker in self._makers for weight, found in maker.directions.items()}
        for maker in self._makers:
            maker.directions.clear()
        places = [place for place in self._places if place.parameter in directions]
        pieces = {
            slot.name: directions[place.parameter].view(-1)[part].to(self._routes.dtype)
            for place in places
            for slot, part in place.slots()
        }
        updates = self._exchange(pieces)
        for place in places:
            for slot, part in place.slots():
                if slot.name not in unused:
                    weights = place.parameter.detach().view(-1)[part]
                    apply_(weights, updates[slot.name], self._routes.rows[slot.name].shape, self._rule(slot.name))

    def _exchange(self, pieces: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The updates of this rank's pieces, flat."""
        routes = self._routes
        blank = torch.empty(0, dtype=routes.dtype, device=self._places[0].flat.params.device)
        parts = {name: torch.cat(found) for name, found in self._data.gather(pieces, blank).items()}
        made = {name: self._update(part, name) for name, part in parts.items() if routes.rows[name].dim is None}
        if self._tensor is not None:
            gathered = self._tensor.gather(parts, blank)
            cut = {name: self._join_and_cut(found, routes.rows[name]) for name, found in gathered.items()}
            made |= self._tensor.scatter(cut, blank)
        sizes = routes.data.sizes
        split = {name: torch.split(update.reshape(-1), list(sizes[name])) for name, update in made.items()}
        return self._data.scatter(split, blank)

    def _join_and_cut(self, parts: Sequence[Tensor], row: ShardRow) -> list[Tensor]:
        """Put the parts of all tensor ranks together, update, and cut the update as the matrix is cut."""
        whole = parts[0].new_empty(row.shape)
        for tp, part in enumerate(parts):
            for view, own in zip(_ranges(whole, row, tp), _ranges_of(part, row, tp), strict=True):
                view.copy_(own)
        update = self._update(whole, row.name).view(row.shape)
        return [_joined(_ranges(update, row, tp), update, row) for tp in range(len(parts))]

    def _update(self, matrix: Tensor, name: str) -> Tensor:
        """The update of a whole matrix, flat."""
        made = orthogonal(matrix.view(self._routes.rows[name].shape), self._rule(name))
        return made.to(self._routes.dtype).reshape(-1)

    def _rule(self, name: str) -> MuonRule:
        return MuonRule.of(self._inner.param_groups[self._routes.rows[name].group])


def _dim(row: ShardRow) -> int:
    return row.dim or 0


def _ranges(whole: Tensor, row: ShardRow, tp: int) -> list[Tensor]:
    """Views of the ranges of the full matrix that a tensor rank holds, in order."""
    own = [each for each in row.ranges if tp in each.holders]
    return [whole.narrow(_dim(row), each.start, each.stop - each.start) for each in own]


def _ranges_of(part: Tensor, row: ShardRow, tp: int) -> tuple[Tensor, ...]:
    """The same ranges in what the tensor rank holds, flat."""
    sizes = [each.stop - each.start for each in row.ranges if tp in each.holders]
    return torch.split(part.view(row.local_shape(tp)), sizes, _dim(row)) if sizes else ()


def _joined(ranges: Sequence[Tensor], whole: Tensor, row: ShardRow) -> Tensor:
    """What a tensor rank holds of ``whole``, flat; it may hold none of the ranges."""
    return torch.cat(list(ranges), _dim(row)).reshape(-1) if ranges else whole.new_empty(0)


def _muon_parts(inner: torch.optim.Optimizer) -> list[FlatMuon]:
    parts = inner.parts.values() if isinstance(inner, CompositeOptimizer) else [inner]
    return [part for part in parts if isinstance(part, FlatMuon)]
