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
    """Tensor that the inner (torch) optimizer updates, with the tensor's gradient. The tensor contains the elements
    ``part`` of the flat bucket ``flat``.
    """

    parameter: nn.Parameter
    grads: Tensor
    flat: FlatBucket
    part: slice

    def narrow(self) -> Tensor | None:
        """Returns the bf16 or fp16 weights that receive the updated values of this tensor, an fp32 master. Returns None
        if the tensor is no master, or if a quantized all-gather writes the weights.
        """
        if self.flat.master is None or self.flat.rounds_in_gathers:
            return None
        start = self.flat.owned.start
        return self.flat.kept[self.part.start - start : self.part.stop - start].view(self.parameter.shape)

    def slots(self) -> Iterator[tuple[Slot, slice]]:
        """Yields (slot, slice) for each parameter with elements in this tensor: the parameter's range in the bucket,
        and the slice of this tensor that contains its elements.
        """
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
    """Interface of objects that update sharded parameters as a whole, for optimizers such as Muon and Adafactor. The
    updates run across ranks, after the optimizer's step has visited all buckets.
    """

    @property
    def families(self) -> frozenset[str]:
        """Names of the state tensors that do not have the parameter's shape, such as row means of Adafactor."""

    @property
    def by_owner(self) -> bool:
        """True if each state tensor that does not have its parameter's shape is stored by one rank, the owner. False if
        every rank with a shard of the parameter stores the tensor.
        """

    @property
    def on_all_data_ranks(self) -> bool:
        """True if each data rank stores all of the state, so that data ranks have the same values."""

    @property
    def shapes(self) -> WholeShapes:
        """Shapes of the state tensors of every parameter that is updated as a whole: parameter name -> state name ->
        shape. They include parameters with state on other ranks only.
        """

    @property
    def state(self) -> WholeState:
        """State tensors on this rank: parameter name -> state name -> tensor. Empty before the first update."""

    def names(self, flat: FlatBucket) -> frozenset[str]:
        """Returns the names of the parameters in the bucket ``flat`` that this object updates; the optimizer's own step
        does not change them.
        """

    def run(self, unused: frozenset[str], missed: Mapping[str, int]) -> Iterator[frozenset[str]]:
        """Updates all parameters of this object except ``unused`` ones (without a gradient), in one or more rounds.
        Yields the names of the parameters that are done after each round.

        ``missed``: parameter name -> number of earlier updates without a gradient.
        """

    def forget(self) -> None:
        """Deletes the state tensors on this rank; the next update starts from new state."""

    def prepare(self) -> WholeState:
        """Returns the state tensors on this rank: parameter name -> state name -> tensor. Allocates zeros if there are
        none yet.
        """


def families_of(whole: Iterable[WholeUpdates]) -> frozenset[str]:
    """Returns the names of all state tensors of the optimizers ``whole``, which update whole parameters."""
    return frozenset(family for each in whole for family in each.families)


class LateBuckets:
    """Tracker of the buckets with parameters that are updated as a whole, after the optimizer's step. Such a bucket can
    be gathered only once all of these parameters are updated.
    """

    def __init__(self, buckets: Sequence[FlatBucket], whole: Sequence[WholeUpdates]) -> None:
        names = {number: {n for each in whole for n in each.names(flat)} for number, flat in enumerate(buckets)}
        self._missing = {number: own for number, own in names.items() if own}

    def __contains__(self, number: object) -> bool:
        return number in self._missing

    def complete(self, made: frozenset[str]) -> list[int]:
        """Records that the parameters ``made`` are updated. Returns the indices of the buckets of which all parameters
        are now updated; each index is returned by one call only.
        """
        for own in self._missing.values():
            own -= made
        ready = [number for number, own in self._missing.items() if not own]
        for number in ready:
            del self._missing[number]
        return ready


def update_gradient(flat: FlatBucket, part: slice) -> Tensor:
    """Returns the gradient that the optimizer reads for the elements ``part`` of the bucket ``flat``: in host memory if
    the host updates the bucket, otherwise on the device.
    """
    if flat.host_sums is None:
        return flat.gradient(part)
    return flat.host_sums[part.start - flat.owned.start : part.stop - flat.owned.start]


def update_pieces(place: OptimizerTensor, unused: Collection[str], missed: Mapping[str, int]) -> Iterator[UpdatePiece]:
    """Divides the optimizer tensor ``place`` into slices of adjacent parameters with the same number of missed updates,
    and yields them.

    Parameters in ``unused`` are left out, because they have no gradient now. ``missed``: parameter name -> number of
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
    """Yields (index of the parameter group, slice of the bucket, (elements,)) for each run of adjacent elements that
    this rank updates and that are of one group. A run spans parameters, so that an update needs few kernels.
    """
    for segment in flat.bucket.segments(flat.owned):
        yield segment.group, slice(segment.start, segment.stop), (segment.stop - segment.start,)


def whole_parameters(flat: FlatBucket) -> Iterator[tuple[int, slice, tuple[int, ...]]]:
    """Yields (index of the parameter group, slice of the bucket, shape) for each parameter in the bucket ``flat``."""
    for slot in flat.bucket.slots:
        yield slot.group, slice(slot.start, slot.stop), slot.shape


def parameter_parts(flat: FlatBucket) -> Iterator[tuple[int, slice, tuple[int, ...]]]:
    """Yields (index of the parameter group, slice of the bucket, (elements,)) for the elements of each parameter that
    this rank updates.

    If this rank updates only padding, yields the padding, so that every rank has optimizer state and takes part in the
    collectives of other ranks.
    """
    owned = [(slot, max(slot.start, flat.owned.start), min(slot.stop, flat.owned.stop)) for slot in flat.bucket.slots]
    found = [(slot.group, slice(start, stop), (stop - start,)) for slot, start, stop in owned if start < stop]
    yield from found or group_segments(flat)
