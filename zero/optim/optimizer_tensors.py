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
    """Tensor that the inner optimizer updates, with the elements ``part`` of the bucket ``flat``."""

    parameter: nn.Parameter
    grads: Tensor
    flat: FlatBucket
    part: slice

    def narrow(self) -> Tensor | None:
        """Returns the low-precision weights that receive the updated values; None if there are none, or if a gather
        writes them.
        """
        if self.flat.master is None or self.flat.rounds_in_gathers:
            return None
        start = self.flat.owned.start
        return self.flat.kept[self.part.start - start : self.part.stop - start].view(self.parameter.shape)

    def slots(self) -> Iterator[tuple[Slot, slice]]:
        """Yields (slot, slice of this tensor) for each parameter with elements in this tensor."""
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
    """Interface of updates that need whole parameters, run after the optimizer's step has visited all buckets."""

    @property
    def families(self) -> frozenset[str]:
        """Names of the state tensors that the updates store."""

    @property
    def by_owner(self) -> bool:
        """True if only the owner of a parameter stores its state; False if every rank with a part of it does."""

    @property
    def on_all_data_ranks(self) -> bool:
        """True if all data ranks store equal state."""

    @property
    def shapes(self) -> WholeShapes:
        """Shapes of the state of every parameter with such updates, on any rank."""

    @property
    def state(self) -> WholeState:
        """State tensors on this rank; empty before the first update."""

    def names(self, flat: FlatBucket) -> frozenset[str]:
        """Returns the names of the bucket's parameters that this object updates, in place of the optimizer's step."""

    def run(self, unused: frozenset[str], missed: Mapping[str, int]) -> Iterator[frozenset[str]]:
        """Updates all parameters except ``unused`` ones; yields the names of updated parameters.

        ``missed``: number of missed updates, by parameter.
        """

    def forget(self) -> None:
        """Deletes the state of whole parameters; the next update creates new state."""

    def prepare(self) -> WholeState:
        """Returns the state tensors; zeros before the first update."""


def families_of(whole: Iterable[WholeUpdates]) -> frozenset[str]:
    """Returns the names of all state tensors of whole-parameter updates."""
    return frozenset(family for each in whole for family in each.families)


class LateBuckets:
    """Tracker of buckets that are gathered once all of their whole-parameter updates are made."""

    def __init__(self, buckets: Sequence[FlatBucket], whole: Sequence[WholeUpdates]) -> None:
        names = {number: {n for each in whole for n in each.names(flat)} for number, flat in enumerate(buckets)}
        self._missing = {number: own for number, own in names.items() if own}

    def __contains__(self, number: object) -> bool:
        return number in self._missing

    def complete(self, made: frozenset[str]) -> list[int]:
        """Returns the numbers of the buckets that the updated parameters ``made`` complete, each once."""
        for own in self._missing.values():
            own -= made
        ready = [number for number, own in self._missing.items() if not own]
        for number in ready:
            del self._missing[number]
        return ready


def update_gradient(flat: FlatBucket, part: slice) -> Tensor:
    """Returns the gradient of a bucket's elements ``part``: on the device, or its copy on the host."""
    if flat.host_sums is None:
        return flat.gradient(part)
    return flat.host_sums[part.start - flat.owned.start : part.stop - flat.owned.start]


def update_pieces(place: OptimizerTensor, unused: Collection[str], missed: Mapping[str, int]) -> Iterator[UpdatePiece]:
    """Yields slices of the tensor ``place``, each with the number of updates that its parameters have missed.

    ``unused`` parameters are left out.
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
    """Yields (group, slice, flat shape) for each run of owned elements of one optimizer group; long runs need few
    kernels.
    """
    for segment in flat.bucket.segments(flat.owned):
        yield segment.group, slice(segment.start, segment.stop), (segment.stop - segment.start,)


def whole_parameters(flat: FlatBucket) -> Iterator[tuple[int, slice, tuple[int, ...]]]:
    """Yields (group, slice, shape) of each parameter in the bucket."""
    for slot in flat.bucket.slots:
        yield slot.group, slice(slot.start, slot.stop), slot.shape


def parameter_parts(flat: FlatBucket) -> Iterator[tuple[int, slice, tuple[int, ...]]]:
    """Yields (group, slice, flat shape) of the owned elements of each parameter, or of padding if there are none.

    Thus every rank has state tensors for the gathers of other ranks.
    """
    owned = [(slot, max(slot.start, flat.owned.start), min(slot.stop, flat.owned.stop)) for slot in flat.bucket.slots]
    found = [(slot.group, slice(start, stop), (stop - start,)) for slot, start, stop in owned if start < stop]
    yield from found or group_segments(flat)
