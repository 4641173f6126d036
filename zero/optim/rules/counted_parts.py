"""Pieces of parameters on this rank for sums over whole parameters; each element is added by exactly one rank.

Data ranks that shard a bucket have other elements each. Where tensor ranks hold the same elements, one of them adds
them, so that all get the same bits.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.optim.update_rules import MatrixPiece
from engine.parallel.comm.comm import Comm
from engine.parallel.grid import Axis, Grid, ShardHolder
from engine.parallel.shard_table import ShardRow
from engine.zero.flat_buckets import FlatBucket
from engine.zero.optim.optimizer_tensors import OptimizerTensor

LABEL = "statistics"
"""Label of the all-reduces of norms and sums."""


@dataclass(frozen=True, slots=True)
class SumRoutes:
    """Parameters that need a sum over all of their elements, such as a norm, and the axes over which this sum is
    all-reduced.
    """

    rows: tuple[ShardRow, ...]
    """Parameters of one pipeline coordinate, as rows of the shard table."""
    axes: tuple[tuple[Axis, int], ...]
    """(axis, number of ranks) pairs that shard the elements: the ZeRO shard axis, and "tp"."""
    copied: bool
    """True if ranks of the first axis store equal elements, which only the first of them adds to the sum."""
    dtype: torch.dtype
    """Widest dtype of the weights."""


@dataclass(frozen=True, slots=True)
class CountedPart:
    """Elements of one parameter in one optimizer tensor of this rank. ``counted`` selects the elements that this rank
    adds to sums over the parameter, so that no element is added by two ranks.
    """

    row: ShardRow
    number: int
    """Number of the parameter's row."""
    piece: MatrixPiece
    place: OptimizerTensor
    part: slice
    """Slice of the optimizer tensor."""
    counted: tuple[slice, ...] | None
    """Slices of the elements that this rank adds to sums over the parameter; None: all."""

    @property
    def weights(self) -> Tensor:
        """Weights of the part's elements, a flat view [n]."""
        return self.place.parameter.detach().view(-1)[self.part]

    @property
    def grads(self) -> Tensor:
        """Gradients of the part's elements, a flat view [n]."""
        return self.place.grads.view(-1)[self.part]

    def own(self, squares_n: Tensor) -> Tensor:
        """Returns a copy of ``squares_n`` [n], one value per element of the part, with 0 for elements that another rank
        adds to the sum over the parameter. Returns the argument itself if ``counted`` is None.
        """
        if self.counted is None:
            return squares_n
        kept = torch.zeros_like(squares_n)
        for part in self.counted:
            kept[part] = squares_n[part]
        return kept

    def square(self, values_n: Tensor) -> Tensor:
        """Returns the sum of squares of ``values_n`` [n], one value per element of the part, as an fp64 scalar tensor.
        Omits elements that another rank adds to the sum over the parameter.
        """
        found = values_n.new_zeros((), dtype=torch.float64)
        for part in (slice(None),) if self.counted is None else self.counted:
            found += torch.linalg.vector_norm(values_n[part], dtype=torch.float64).square()
        return found


def counted_parts(
    places: Sequence[OptimizerTensor], due: Collection[Tensor], routes: SumRoutes, grid: Grid
) -> Iterator[CountedPart]:
    """Yields one item for each parameter with elements in an optimizer tensor of ``places``. Each item selects the
    elements that this rank adds to sums over the parameter. Places with a ``parameter`` that is not in ``due`` are
    skipped.
    """
    rows, holder = routes.rows, grid.holder()
    numbers = {row.name: number for number, row in enumerate(rows)}
    for place in places:
        adds = not routes.copied or grid.is_first(_copies(place.flat))
        for slot, part in place.slots() if place.parameter in due else ():
            row = rows[numbers[slot.name]]
            start = max(slot.start, place.part.start) - slot.start
            piece = MatrixPiece(slot.shape, start, start + part.stop - part.start)
            counted = _counted(row, piece, holder) if adds else ()
            yield CountedPart(row, numbers[slot.name], piece, place, part, counted)


def _copies(flat: FlatBucket) -> Axis:
    """The axis along which ranks update the same elements of a bucket."""
    spread = flat.bucket.spread
    return spread.copies if flat.owned == slice(0, flat.bucket.elements) else spread.shard_copies


def _counted(row: ShardRow, piece: MatrixPiece, holder: ShardHolder) -> tuple[slice, ...] | None:
    if not row.counted(holder._replace(pp=row.owners[0])):
        return ()
    runs, place = [], piece.start
    for start, stop in row.copies(holder):
        if place < min(start, piece.stop):
            runs.append(slice(place - piece.start, min(start, piece.stop) - piece.start))
        place = max(place, stop)
    if not runs and place == piece.start:
        return None
    return (*runs, slice(place - piece.start, piece.stop - piece.start)) if place < piece.stop else tuple(runs)


class SummedUpdates:
    """Base class of updates that need sums over whole parameters, which the ranks with their elements all-reduce."""

    by_owner = False
    on_all_data_ranks = True

    def __init__(
        self, places: Sequence[OptimizerTensor], inner: torch.optim.Optimizer, routes: SumRoutes, comm: Comm
    ) -> None:
        self._places, self._inner, self._routes, self._comm = places, inner, routes, comm
        self._numbers = {row.name: number for number, row in enumerate(routes.rows)}
        self._device = places[0].flat.params.device if places else torch.device("cpu")

    def names(self, flat: FlatBucket) -> frozenset[str]:
        """Returns the names of the parameters in the bucket ``flat`` that this object updates."""
        return frozenset(slot.name for slot in flat.bucket.slots if slot.name in self._numbers)

    def _reduce(self, sums: Tensor) -> None:
        for axis, _ in self._routes.axes:
            self._comm.all_reduce(sums, axis, LABEL).wait()
