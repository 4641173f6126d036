"""bf16 weights that are their own master: updates in fp32, piece by piece, rounded stochastically.

    weights bf16, gradients bf16, moments fp32 or bf16
        piece -> fp32 copies -> the optimizer's own update -> rounded back

Random bits are keyed by (seed, update, what is rounded, parameter) and by the element's index in the whole
parameter. So all ranks that hold an element (data ranks at ZeRO 0, tensor ranks that hold copies, stages that share
a tied parameter) round it alike, and the result does not depend on how parameters are sharded or cut.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from engine.kernels.optim.stochastic_rounding import Lines, StochasticRounding, round_to_bf16
from engine.parallel.model.rng_streams import derive_seed
from engine.parallel.shard_table import ShardRow
from engine.zero.flat_buckets import FlatBucket
from engine.zero.layout import Slot

PIECE = 1 << 20
"""Elements that are in fp32 at a time."""


class UpdateRun(NamedTuple):
    """Elements that are updated together."""

    part: slice
    """Of the tensor that the optimizer was given."""
    number: int
    """Of the parameter."""
    places: Tensor
    """int64: where the elements lie in the whole parameter."""


@dataclass(frozen=True, slots=True)
class FullShapes:
    """The whole parameters of a model, as one tensor rank sees them."""

    numbers: Mapping[str, int]
    """Parameter -> a number that all ranks know it by."""
    rows: Mapping[str, ShardRow]
    tp: int
    """Tensor coordinate."""

    def index(self, name: str, start: int, stop: int, device: torch.device) -> Tensor:
        """int64 [stop - start]: indices in the whole parameter of elements ``start:stop`` of what is held here."""
        own, lines = torch.arange(start, stop, device=device), self.lines(name, device)
        return own if lines is None else lines.index(own)

    def lines(self, name: str, device: torch.device) -> Lines | None:
        """How what is held here lies in the whole parameter; None where it is all."""
        row = self.rows[name]
        if row.dim is None:
            return None
        kept = [r for r in row.ranges if self.tp in r.holders]
        parts = [torch.arange(r.start, r.stop, dtype=torch.int32, device=device) for r in kept]
        return Lines(torch.cat(parts), row.shape[row.dim], prod(row.shape[row.dim + 1 :]))


@dataclass(slots=True)
class RoundedUpdates:
    """How an optimizer updates weights that have no master."""

    seed: int
    whole: FullShapes
    moments: torch.dtype
    scale: float = 1.0
    """What gradients are multiplied with, in fp32."""
    _slots: dict[Tensor, list[tuple[Slot, int, int, int]]] = field(default_factory=dict)
    """Tensor of the optimizer -> slots in it, with the elements of them and where they begin in the tensor."""
    _lines: dict[str, Lines | None] = field(default_factory=dict)

    def add(self, weights: Tensor, flat: FlatBucket, part: slice) -> None:
        """``weights`` are these elements of the bucket. Padding is left out."""
        found = self._slots[weights] = []
        for slot in flat.bucket.slots:
            start, stop = max(slot.start, part.start), min(slot.stop, part.stop)
            if start < stop:
                found.append((slot, start - slot.start, stop - slot.start, start - part.start))

    def pieces(self, weights: Tensor) -> Iterator[UpdateRun]:
        """All elements of a tensor of the optimizer; one empty piece where it is nothing but padding."""
        if not self._slots[weights]:
            yield UpdateRun(slice(0, 0), 0, torch.empty(0, dtype=torch.int64, device=weights.device))
        for slot, begin, end, place in self._slots[weights]:
            for start in range(begin, end, PIECE):
                stop = min(end, start + PIECE)
                part = slice(place + start - begin, place + stop - begin)
                index = self.whole.index(slot.name, start, stop, weights.device)
                yield UpdateRun(part, self.whole.numbers[slot.name], index)

    def runs(self, weights: Tensor, step: int) -> Iterator[tuple[slice, StochasticRounding]]:
        """The same elements a parameter at a time, and how update ``step`` of Adam rounds them."""
        for slot, begin, end, place in self._slots[weights]:
            if slot.name not in self._lines:
                self._lines[slot.name] = self.whole.lines(slot.name, weights.device)
            number = self.whole.numbers[slot.name]
            weight, first, second = (derive_seed(self.seed, step, kind, number) for kind in range(3))
            how = StochasticRounding((weight, first, second), begin, self._lines[slot.name])
            yield slice(place, place + end - begin), how

    def store(self, target: Tensor, piece: UpdateRun, values: Tensor, step: int, kind: int) -> None:
        """Write fp32 ``values`` of update ``step``; ``kind``: 0 for weights, a number of its own for each moment."""
        if target.dtype == torch.bfloat16:
            values = round_to_bf16(values, piece.places, derive_seed(self.seed, step, kind, piece.number))
        target[piece.part].copy_(values)
