"""Tensors that the inner optimizer updates (runs of a bucket, or whole parameters), with their gradients."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from engine.zero.flat_buckets import FlatBucket
from engine.zero.layout import Slot
from engine.zero.optim.flat_optimizers import UpdatePiece


@dataclass(frozen=True, slots=True)
class OptimizerTensor:
    """Tensor that the inner (torch) optimizer updates: the elements ``part`` of the flat bucket ``flat``, with their
    gradient.
    """

    parameter: nn.Parameter
    grads: Tensor
    flat: FlatBucket
    part: slice

    def narrow(self) -> Tensor | None:
        """Returns the bf16 or fp16 weights that receive the values of this fp32 master. Returns None if the tensor is
        no master, or if a quantized all-gather writes the weights.
        """
        if self.flat.master is None or self.flat.rounds_in_gathers:
            return None
        start = self.flat.owned.start
        return self.flat.kept[self.part.start - start : self.part.stop - start].view(self.parameter.shape)

    def slots(self) -> Iterator[tuple[Slot, slice]]:
        """Yields (range in the bucket, slice of this tensor) for each parameter with elements in this tensor."""
        for slot in self.flat.bucket.slots:
            start, stop = max(slot.start, self.part.start), min(slot.stop, self.part.stop)
            if start < stop:
                yield slot, slice(start - self.part.start, stop - self.part.start)

    def names(self) -> list[str]:
        """Returns the names of the parameters with elements in this tensor."""
        return [slot.name for slot, _ in self.slots()]


WholeState = Mapping[str, Mapping[str, Tensor]]
"""State tensors by parameter and state name, in shapes other than the parameter's, complete on every rank that stores
them.
"""
WholeShapes = Mapping[str, Mapping[str, tuple[int, ...]]]
"""Shapes of state tensors by parameter and name."""


class WholeUpdates(Protocol):
    """Interface of updates that need whole parameters although ranks store shards, as in Muon and Adafactor. These
    updates run after the optimizer's own step has visited all buckets.
    """

    @property
    def families(self) -> frozenset[str]:
        """Names of the state tensors that do not have their parameter's shape, such as row means of Adafactor."""

    @property
    def by_owner(self) -> bool:
        """True if state tensors that do not have their parameter's shape are stored by one rank only, the owner of the
        parameter. False if every rank with a shard of the parameter stores them.
        """

    @property
    def on_all_data_ranks(self) -> bool:
        """True if every data rank stores all state tensors of this object, so that data ranks have the same values."""

    @property
    def shapes(self) -> WholeShapes:
        """Shapes of the state tensors of all parameters that this object updates, on any rank: parameter name -> state
        name -> shape.
        """

    @property
    def state(self) -> WholeState:
        """State tensors on this rank: parameter name -> state name -> tensor. Empty before the first update."""

    def names(self, flat: FlatBucket) -> frozenset[str]:
        """Returns the names of the parameters in the bucket ``flat`` that this object updates, in place of the
        optimizer's own step.
        """

    def run(self, unused: frozenset[str], missed: Mapping[str, int]) -> Iterator[frozenset[str]]:
        """Updates all parameters of this object except ``unused`` ones (without a gradient), in one or more rounds.
        Repeatedly yields the names of parameters that are done, with ``unused`` ones; possibly none.

        ``missed``: parameter name -> number of earlier updates without a gradient.
        """

    def forget(self) -> None:
        """Deletes the state tensors on this rank; the next update starts from new state."""

    def prepare(self) -> WholeState:
        """Returns the state tensors on this rank: parameter name -> state name -> tensor. Allocates zeros if there are
        none yet.
        """


def families_of(whole: Iterable[WholeUpdates]) -> frozenset[str]:
    """Returns the :attr:`WholeUpdates.families` of all objects in ``whole``."""
    return frozenset(family for each in whole for family in each.families)


class LateBuckets:
    """Tracker of the buckets with parameters that are updated after the optimizer's step. A bucket can be gathered once
    all these parameters are updated.
    """

    def __init__(self, buckets: Sequence[FlatBucket], whole: Sequence[WholeUpdates]) -> None:
        names = {number: {n for each in whole for n in each.names(flat)} for number, flat in enumerate(buckets)}
        self._missing = {number: own for number, own in names.items() if own}

    def __contains__(self, number: object) -> bool:
        return number in self._missing

    def complete(self, made: frozenset[str]) -> list[int]:
        """Records that the parameters ``made`` are updated. Returns the indices of the buckets that this call
        completes.
        """
        for own in self._missing.values():
            own -= made
        ready = [number for number, own in self._missing.items() if not own]
        for number in ready:
            del self._missing[number]
        return ready


def update_gradient(flat: FlatBucket, part: slice) -> Tensor:
    """Returns the gradient that the optimizer reads for the elements ``part`` of the bucket ``flat``. It is in host
    memory if the host updates the bucket.
    """
    if flat.host_sums is None:
        return flat.gradient(part)
    return flat.host_sums[part.start - flat.owned.start : part.stop - flat.owned.start]


def update_pieces(place: OptimizerTensor, unused: Collection[str], missed: Mapping[str, int]) -> Iterator[UpdatePiece]:
    """Yields slices of the optimizer tensor ``place``. A slice contains adjacent parameters with the same number of
    missed updates.

    Skips ``unused``, the names of parameters without a gradient in this update. ``missed``: parameter name -> number of
    earlier updates without a gradient.
    """
    run: UpdatePiece | None = None
    for slot, part in place.slots():
        behind = None if slot.name in unused else missed.get(slot.name, 0)
        if run is not None and behind == run.missed:
            run = UpdatePiece(slice(run.part.start, part.stop), run.missed)
            continue
        if run is not None:
            yield run
        run = None if behind is None else UpdatePiece(part, behind)
    if run is not None:
        yield run


def group_segments(flat: FlatBucket) -> Iterator[tuple[int, slice, tuple[int, ...]]]:
    """Yields (index of the parameter group, slice of the bucket, shape) for each run of adjacent elements of one group,
    among the elements that this rank updates. The shape is flat: (number of elements,).
    """
    for segment in flat.bucket.segments(flat.owned):
        yield segment.group, slice(segment.start, segment.stop), (segment.stop - segment.start,)


def whole_parameters(flat: FlatBucket) -> Iterator[tuple[int, slice, tuple[int, ...]]]:
    """Yields (index of the parameter group, slice of the bucket, shape) for each parameter in the bucket ``flat``."""
    for slot in flat.bucket.slots:
        yield slot.group, slice(slot.start, slot.stop), slot.shape


def parameter_parts(flat: FlatBucket) -> Iterator[tuple[int, slice, tuple[int, ...]]]:
    """Yields (index of the parameter group, slice of the bucket, shape) for each parameter with elements that
    this rank updates. The slice has these elements; the shape is flat: (number of elements,).

    If this rank updates only padding, yields the padding, as :func:`group_segments` does, so that every rank has
    optimizer state.
    """
    owned = [(slot, max(slot.start, flat.owned.start), min(slot.stop, flat.owned.stop)) for slot in flat.bucket.slots]
    found = [(slot.group, slice(start, stop), (stop - start,)) for slot, start, stop in owned if start < stop]
    yield from found or group_segments(flat)
