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
    """Tensor that the inner optimizer updates, with its gradient. It contains the elements ``part`` of the bucket
    ``flat``, in the bucket's positions.
    """

    parameter: nn.Parameter
    grads: Tensor
    flat: FlatBucket
    part: slice

    def narrow(self) -> Tensor | None:
        """Returns the bf16 or fp16 weights that receive the updated values of this fp32 master. None if the tensor is
        no master, or if a quantized all-gather writes the weights.
        """
        if self.flat.master is None or self.flat.rounds_in_gathers:
            return None
        start = self.flat.owned.start
        return self.flat.kept[self.part.start - start : self.part.stop - start].view(self.parameter.shape)

    def slots(self) -> Iterator[tuple[Slot, slice]]:
        """Yields each parameter with elements in this tensor, as (slot in the bucket, slice of this tensor)."""
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
    """Interface of optimizers that need whole parameters, such as Muon and Adafactor. Their updates run across ranks,
    after the optimizer's step has visited all buckets.
    """

    @property
    def families(self) -> frozenset[str]:
        """Names of the state tensors that do not have the parameter's shape, such as row means of Adafactor."""

    @property
    def by_owner(self) -> bool:
        """True if one rank, the owner, stores the whole-parameter state of a parameter. False if every rank with a
        shard of the parameter stores it.
        """

    @property
    def on_all_data_ranks(self) -> bool:
        """True if all data ranks store equal copies of the state."""

    @property
    def shapes(self) -> WholeShapes:
        """Shapes of the state tensors of every parameter that is updated as a whole, by parameter and name. They
        include parameters with state on other ranks only.
        """

    @property
    def state(self) -> WholeState:
        """State tensors on this rank, by parameter and name; empty before the first update."""

    def names(self, flat: FlatBucket) -> frozenset[str]:
        """Returns the names of the parameters in a bucket that this object updates; the optimizer's own step leaves
        them.
        """

    def run(self, unused: frozenset[str], missed: Mapping[str, int]) -> Iterator[frozenset[str]]:
        """Updates all its parameters except ``unused`` ones, in one or more rounds. Yields the names of the parameters
        that are done after each round.

        ``missed``: number of updates that each parameter has missed, by name.
        """

    def forget(self) -> None:
        """Deletes the state tensors; the next update starts from new ones."""

    def prepare(self) -> WholeState:
        """Returns the state tensors on this rank, by parameter and name. Allocates zeros if there are none yet."""


def families_of(whole: Iterable[WholeUpdates]) -> frozenset[str]:
    """Returns the names of all state tensors of the optimizers ``whole``, which update whole parameters."""
    return frozenset(family for each in whole for family in each.families)


class LateBuckets:
    """Tracker of the buckets that can be gathered only after their whole-parameter updates."""

    def __init__(self, buckets: Sequence[FlatBucket], whole: Sequence[WholeUpdates]) -> None:
        names = {number: {n for each in whole for n in each.names(flat)} for number, flat in enumerate(buckets)}
        self._missing = {number: own for number, own in names.items() if own}

    def __contains__(self, number: object) -> bool:
        return number in self._missing

    def complete(self, made: frozenset[str]) -> list[int]:
        """Records that the parameters ``made`` are updated. Returns the indices of the buckets that are now complete;
        each index is returned once.
        """
        for own in self._missing.values():
            own -= made
        ready = [number for number, own in self._missing.items() if not own]
        for number in ready:
            del self._missing[number]
        return ready


def update_gradient(flat: FlatBucket, part: slice) -> Tensor:
    """Returns the gradient that the update reads for the elements ``part`` of a bucket. It is on the device, or on the
    host if the host updates the bucket.
    """
    if flat.host_sums is None:
        return flat.gradient(part)
    return flat.host_sums[part.start - flat.owned.start : part.stop - flat.owned.start]


def update_pieces(place: OptimizerTensor, unused: Collection[str], missed: Mapping[str, int]) -> Iterator[UpdatePiece]:
    """Divides the tensor ``place`` into slices of parameters that have missed the same number of updates, and yields
    them.

    Parameters in ``unused`` are left out, because they have no gradient now. ``missed``: number of missed updates by
    parameter name.
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
    """Yields (optimizer group, slice of the bucket, flat shape) for each run of owned elements with the same group.
    Long runs need few kernels.
    """
    for segment in flat.bucket.segments(flat.owned):
        yield segment.group, slice(segment.start, segment.stop), (segment.stop - segment.start,)


def whole_parameters(flat: FlatBucket) -> Iterator[tuple[int, slice, tuple[int, ...]]]:
    """Yields (optimizer group, slice of the bucket, shape) for each parameter in the bucket."""
    for slot in flat.bucket.slots:
        yield slot.group, slice(slot.start, slot.stop), slot.shape


def parameter_parts(flat: FlatBucket) -> Iterator[tuple[int, slice, tuple[int, ...]]]:
    """Yields (optimizer group, slice of the bucket, flat shape) for each parameter's elements that this rank owns.

    A rank that owns only padding yields that, so that every rank has state tensors and takes part in the gathers of the
    others.
    """
    owned = [(slot, max(slot.start, flat.owned.start), min(slot.stop, flat.owned.stop)) for slot in flat.bucket.slots]
    found = [(slot.group, slice(start, stop), (stop - start,)) for slot, start, stop in owned if start < stop]
    yield from found or group_segments(flat)
