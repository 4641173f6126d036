"""Updates of bf16 weights without masters: computed in fp32, piece by piece, and rounded stochastically.

    weights bf16, gradients bf16, moments fp32 or bf16
        piece -> fp32 copies -> update by the optimizer -> rounded back

The random bits are keyed by (seed, update, rounded quantity, parameter) and by the element's index in the full
parameter. So all ranks that hold an element (data ranks at ZeRO 0, tensor ranks with copies, stages that share a tied
parameter) round it equally, and the result is independent of the sharding of parameters.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from engine.kernels.optim.stochastic_rounding import Lines, StochasticRounding, round_to_bf16
from engine.parallel.grid import ShardHolder
from engine.parallel.model.rng_streams import derive_seed
from engine.parallel.shard_table import ShardRow
from engine.zero.flat_buckets import FlatBucket
from engine.zero.layout import Slot

PIECE = 1 << 20
"""Number of elements with fp32 copies at a time."""


class UpdateRun(NamedTuple):
    """Consecutive elements of one parameter in a flat optimizer tensor, which are updated and rounded together."""

    part: slice
    """Slice of the optimizer's tensor."""
    number: int
    """Number of the parameter, equal on all ranks."""
    places: Tensor
    """Index of each element in the full parameter, int64."""


@dataclass(frozen=True, slots=True)
class FullShapes:
    """Map from the elements of this rank's shards to their positions in the full parameters. These positions select the
    random bits of rounding, so that results do not depend on the sharding.
    """

    numbers: Mapping[str, int]
    """Number of each parameter by name, equal on all ranks."""
    rows: Mapping[str, ShardRow]
    holder: ShardHolder
    """Grid coordinates of this rank."""

    def index(self, name: str, start: int, stop: int, device: torch.device) -> Tensor:
        """Returns the positions of the elements ``start:stop`` of this rank's tensor- or expert-parallel shard as flat
        indices in the full parameter ``name``, int64 [stop - start]. ZeRO does not divide this shard.
        """
        own, lines = torch.arange(start, stop, device=device), self.lines(name, device)
        return own if lines is None else lines.index(own)

    def lines(self, name: str, device: torch.device) -> Lines | None:
        """Returns the position of this rank's shard in the full parameter ``name``: its indices along the sharded dim,
        as :class:`Lines`. Returns None if tensor and expert parallelism do not shard the parameter.
        """
        row = self.rows[name]
        if not row.sharded:
            return None
        experts = row.expert_ranges(self.holder) if len(row.experts) > 1 else ()
        kept, dim = (experts, row.expert_dim) if row.dim is None else (row.tensor_ranges(self.holder), row.dim)
        # rows of later experts have indices beyond the sharded dim, which continue in the next line of the parameter
        first = experts[0].start * prod(row.shape[1 : dim + 1]) if row.dim and experts else 0
        wide = torch.int32 if first + row.shape[dim] < 1 << 31 else torch.int64
        parts = [torch.arange(first + r.start, first + r.stop, dtype=wide, device=device) for r in kept]
        return Lines(torch.cat(parts), row.shape[dim], prod(row.shape[dim + 1 :]))


@dataclass(slots=True)
class RoundedUpdates:
    """Stochastic rounding of the updates of bf16 weights that have no fp32 masters."""

    seed: int
    whole: FullShapes
    moments: torch.dtype
    scale: float = 1.0
    """Factor applied to gradients in fp32."""
    _slots: dict[Tensor, list[tuple[Slot, int, int, int]]] = field(default_factory=dict)
    """Optimizer tensor -> (slot, first and last element of the slot, their place in the tensor)."""
    _lines: dict[str, Lines | None] = field(default_factory=dict)

    def add(self, weights: Tensor, flat: FlatBucket, part: slice) -> None:
        """Registers ``weights``, a flat tensor that the optimizer updates, as the elements ``part`` of the bucket
        ``flat``.
        """
        found = self._slots[weights] = []
        for slot in flat.bucket.slots:
            start, stop = max(slot.start, part.start), min(slot.stop, part.stop)
            if start < stop:
                found.append((slot, start - slot.start, stop - slot.start, start - part.start))

    def pieces(self, weights: Tensor) -> Iterator[UpdateRun]:
        """Yields slices of the registered optimizer tensor ``weights``, each with at most 2^20 elements of one
        parameter. A tensor that consists of padding yields one empty slice.
        """
        if not self._slots[weights]:
            yield UpdateRun(slice(0, 0), 0, torch.empty(0, dtype=torch.int64, device=weights.device))
        for slot, begin, end, place in self._slots[weights]:
            for start in range(begin, end, PIECE):
                stop = min(end, start + PIECE)
                part = slice(place + start - begin, place + stop - begin)
                index = self.whole.index(slot.name, start, stop, weights.device)
                yield UpdateRun(part, self.whole.numbers[slot.name], index)

    def runs(self, weights: Tensor, step: int) -> Iterator[tuple[slice, StochasticRounding]]:
        """Yields (slice, rounding) for each parameter in the registered optimizer tensor ``weights``. ``step``, the
        number of the Adam update, determines the random bits of the rounding.
        """
        for slot, begin, end, place in self._slots[weights]:
            if slot.name not in self._lines:
                self._lines[slot.name] = self.whole.lines(slot.name, weights.device)
            number = self.whole.numbers[slot.name]
            weight, first, second = (derive_seed(self.seed, step, kind, number) for kind in range(3))
            how = StochasticRounding((weight, first, second), begin, self._lines[slot.name])
            yield slice(place, place + end - begin), how

    def store(self, target: Tensor, piece: UpdateRun, values: Tensor, step: int, kind: int) -> None:
        """Writes ``values``, the fp32 results of update number ``step``, into the elements ``piece`` of ``target``
        (weights or a moment).

        A bf16 ``target`` is rounded stochastically. ``kind`` selects the random bits: 0 for weights, 1 and up for
        moments, in order of their names.
        """
        # Every (update, quantity, parameter) has a key of its own, so no two roundings share random bits.
        if target.dtype == torch.bfloat16:
            values = round_to_bf16(values, piece.places, derive_seed(self.seed, step, kind, piece.number))
        target[piece.part].copy_(values)
