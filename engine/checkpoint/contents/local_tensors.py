"""What this rank has of every tensor: views into its buckets and optimizer state, to be stored or to be filled."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from engine.checkpoint.contents.ownership import SaveOwnership
from engine.checkpoint.format.host_image import kind_of
from engine.checkpoint.format.pieces import Piece, runs
from engine.checkpoint.format.safetensors_file import TensorKind
from engine.parallel.grid import Coord
from engine.parallel.shard_table import ShardRow
from engine.zero.flat_buckets import FlatBucket
from engine.zero.layout import Slot
from engine.zero.optim.sharded_optimizer import OptimizerTensor


@dataclass(frozen=True, slots=True)
class Held:
    """Elements of a logical tensor in this rank's memory."""

    tensor: str
    """"param/...", "master/...", "exp_avg/..."."""
    row: ShardRow
    """The parameter that it belongs to."""
    kind: TensorKind
    """The whole tensor, in the dtype of ``values``."""
    own: Piece
    """Which elements they are."""
    values: Tensor
    """[own.elements], on the device; a view."""


@dataclass(frozen=True)
class LocalTensors:
    """Finds what a rank has."""

    shares: SaveOwnership
    coord: Coord
    model: nn.Module
    buckets: Sequence[FlatBucket]
    """The trained ones and the frozen ones."""
    places: Sequence[OptimizerTensor]
    """What the optimizer updates."""

    def weights(self) -> Iterator[Held]:
        """The parameters as the model computes with them."""
        for row, flat, slot in self._slots():
            values = flat.kept[slot_slice(flat.owned, slot, self.shares.own(row, self.coord))]
            yield self._held(f"param/{row.name}", row, values)

    def whole(self) -> Iterator[Held]:
        """The parameters that lie in no bucket; every data rank has them whole."""
        inside = {slot.name for flat in self.buckets for slot in flat.bucket.slots}
        parameters = dict(self.model.named_parameters())
        for row in self.shares.plan.table.held_by(self.coord.pp):
            if row.name not in inside:
                yield self._held(f"param/{row.name}", row, parameters[row.name].detach().view(-1))

    def masters(self) -> Iterator[Held]:
        """fp32 weights behind narrower parameters."""
        for row, flat, slot in self._slots():
            if flat.master is not None:
                values = flat.master[slot_slice(flat.owned, slot, self.shares.own(row, self.coord))]
                yield self._held(f"master/{row.name}", row, values)

    def state(self, tensors: Mapping[nn.Parameter, Mapping[str, Tensor]]) -> Iterator[Held]:
        """The moments: of ``tensors``, by what the optimizer updates and name, each of its parameter's shape."""
        rows = {row.name: row for row in self.shares.plan.table}
        for place in self.places:
            for slot in place.flat.bucket.slots:
                row = rows[slot.name]
                own = self.shares.own(row, self.coord)
                start = max(slot.start + own.start, place.part.start)
                stop = min(slot.start + own.stop, place.part.stop)
                if start >= stop:
                    continue
                piece = Piece(own.part, start - slot.start, stop - slot.start)
                for name, tensor in tensors.get(place.parameter, {}).items():
                    values = tensor.view(-1)[start - place.part.start : stop - place.part.start]
                    yield Held(f"{name}/{row.name}", row, kind_of(values, row.shape), piece, values)

    def _slots(self) -> Iterator[tuple[ShardRow, FlatBucket, Slot]]:
        rows = {row.name: row for row in self.shares.plan.table}
        for flat in self.buckets:
            for slot in flat.bucket.slots:
                yield rows[slot.name], flat, slot

    def _held(self, tensor: str, row: ShardRow, values: Tensor) -> Held:
        own = self.shares.own(row, self.coord)
        if own.elements != values.numel():  # whole on every data rank
            own = own.part.whole()
        return Held(tensor, row, kind_of(values, row.shape), own, values)


def slot_slice(owned: slice, slot: Slot, own: Piece) -> slice:
    """Where a piece of a slot lies in memory that begins with ``owned``."""
    return slice(slot.start + own.start - owned.start, slot.start + own.stop - owned.start)


@torch.no_grad()
def copy_shared(source: Tensor, held: Piece, target: Tensor, wanted: Piece) -> None:
    """Copy what two pieces of a tensor share; both flat."""
    if held == wanted:
        target.copy_(source)
        return
    shared = runs(held, wanted)
    if not len(shared.length):
        return
    starts, places, length = shared.source, shared.target, int(shared.length[0])
    steps = starts[1:] - starts[:-1], places[1:] - places[:-1]
    if len(starts) > 2 and (shared.length == length).all() and all((step == step[0]).all() for step in steps):
        size, begins = (len(starts), length), (int(starts[0]), int(places[0]))
        across = target.as_strided(size, (int(steps[1][0]), 1), target.storage_offset() + begins[1])
        across.copy_(source.as_strided(size, (int(steps[0][0]), 1), source.storage_offset() + begins[0]))
        return
    for start, place, count in zip(*(column.tolist() for column in shared), strict=True):
        target[place : place + count].copy_(source[start : start + count])
