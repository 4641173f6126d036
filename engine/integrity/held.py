"""What a rank holds between two updates: weights, masters, moments; and when the program itself has written it.

ZeRO    weights                  masters, moments      equal on the data ranks
0       whole buckets            whole                 all of it
1, 2    whole buckets            shards                weights
3       shards                   shards                nothing

What an optimizer keeps of whole parameters is equal where all data ranks have it, and not where its owner has.

Frozen parameters are weights too: whole ones of their own below ZeRO 3. Gradients and activations are not held.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from engine.parallel.shard_table import ShardRow
from engine.zero.flat_buckets import FlatBucket
from engine.zero.optim.sharded_optimizer import ShardedOptimizer

Names = Sequence[tuple[str, int, int]]
"""(parameter, first, last element) of the parts of a tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldTensor:
    """A tensor that only an update, or the program, may change."""

    kind: str
    """"weight", "master", or the optimizer's name of a state, such as "exp_avg"."""
    tensor: Tensor
    names: Names
    equal: bool
    """All data ranks hold it, in equal bits."""
    writers: tuple[Tensor, ...] = ()
    """Other tensors in its memory, through which the program may write."""

    def name(self, element: int) -> str:
        """The parameter that an element belongs to."""
        return next((name for name, start, stop in self.names if start <= element < stop), "padding of a bucket")

    def place(self, element: int) -> int:
        """Index of an element in the part of its parameter that this tensor holds."""
        return next((element - start for _, start, stop in self.names if start <= element < stop), element)


class Writes:
    """The writes of the program that torch counts; a bit that flips by itself is none.

    A tensor that has been replaced counts as written. Writes through ``parameter.data`` are not counted by torch.
    """

    def __init__(self, held: Sequence[HeldTensor]) -> None:
        self._seen = [(each.tensor, _versions(each)) for each in held]

    def since(self, held: Sequence[HeldTensor]) -> list[bool] | None:
        """For each tensor, whether the program has written it; None if there are others now."""
        if len(held) != len(self._seen):
            return None
        return [
            before is not each.tensor or versions != _versions(each)
            for each, (before, versions) in zip(held, self._seen, strict=True)
        ]


def _versions(held: HeldTensor) -> tuple[int, ...]:
    with torch._C.DisableTorchFunctionSubclass():
        return tuple(tensor._version for tensor in (held.tensor, *held.writers))


class Holdings:
    """Finds all tensors that this rank holds. The state of the optimizer comes and goes, so they are listed anew.

    Args:
        rows: the parameters that this rank's stages hold; others are placeholders, which may not be read.
        buckets: those of trained parameters, and those of frozen ones.
    """

    def __init__(
        self,
        model: nn.Module,
        rows: Sequence[ShardRow],
        buckets: tuple[Sequence[FlatBucket], Sequence[FlatBucket]],
        optimizer: ShardedOptimizer,
    ) -> None:
        trained, frozen = buckets
        self.trained = trained
        """Buckets of the trained parameters."""
        self._optimizer = optimizer
        self._places = [(place, [(s.name, p.start, p.stop) for s, p in place.slots()]) for place in optimizer.places]
        placed = {slot.name for flat in (*trained, *frozen) for slot in flat.bucket.slots}
        others = [row.name for row in rows if row.name not in placed]
        self._lasting = [
            *(held for flat in (*trained, *frozen) for held in self._of_bucket(flat)),
            *_apart(model, others),
        ]

    def all(self) -> list[HeldTensor]:
        """Everything, in the same order on all data ranks."""
        return [*self._lasting, *self._states()]

    def _of_bucket(self, flat: FlatBucket) -> Iterator[HeldTensor]:
        owned = _names(flat, flat.owned)
        optimized = tuple(place.parameter for place, _ in self._places if place.flat is flat and flat.master is None)
        if flat.sharded:
            yield HeldTensor(kind="weight", tensor=flat.kept, names=owned, equal=False, writers=optimized)
        else:
            writers = (flat.kept, *flat.parameters, *optimized)
            names = _names(flat, slice(0, flat.bucket.elements))
            yield HeldTensor(kind="weight", tensor=flat.params, names=names, equal=True, writers=writers)
        if flat.master is not None:
            parameters = tuple(place.parameter for place, _ in self._places if place.flat is flat)
            yield HeldTensor(kind="master", tensor=flat.master, names=owned, equal=_whole(flat), writers=parameters)

    def _states(self) -> Iterator[HeldTensor]:
        for updates in self._optimizer.whole:
            for name, own in updates.state.items():
                for kind, value in own.items():
                    names, equal = [(name, 0, value.numel())], updates.on_all_data_ranks
                    yield HeldTensor(kind=kind, tensor=value, names=names, equal=equal)
        for place, names in self._places:
            for kind, value in sorted(self._optimizer.inner.state.get(place.parameter, {}).items()):
                if isinstance(value, Tensor) and value.numel():
                    alike = value.shape == place.parameter.shape
                    whole = [(name, 0, value.numel()) for name, _, _ in names[:1]]
                    yield HeldTensor(
                        kind=str(kind), tensor=value, names=names if alike else whole, equal=_whole(place.flat)
                    )


def _whole(flat: FlatBucket) -> bool:
    """All data ranks update all of it: ZeRO 0, or a single data rank."""
    return len(flat.weights) == flat.bucket.elements


def _names(flat: FlatBucket, part: slice) -> Names:
    """The parameters in a part of a bucket, by elements of the part."""
    found = [(slot.name, max(slot.start, part.start), min(slot.stop, part.stop)) for slot in flat.bucket.slots]
    return [(name, start - part.start, stop - part.start) for name, start, stop in found if start < stop]


def _apart(model: nn.Module, names: Sequence[str]) -> Iterator[HeldTensor]:
    """Parameters outside the buckets: frozen ones below ZeRO 3, as far as this rank's stages hold them."""
    named = dict(model.named_parameters())
    for name in names:
        parameter = named.get(name)
        if parameter is not None and parameter.numel() and not parameter.is_meta:
            yield HeldTensor(kind="weight", tensor=parameter, names=[(name, 0, parameter.numel())], equal=True)
