"""Views of every tensor that this rank holds, in its buckets and optimizer state, to be stored or filled."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from engine.checkpoint.contents.ownership import SaveOwnership
from engine.checkpoint.format.host_image import kind_of
from engine.checkpoint.format.pieces import Part, Piece, runs
from engine.checkpoint.format.safetensors_file import TensorKind
from engine.parallel.grid import Coord
from engine.parallel.model.quantized_layers import quantize_part
from engine.parallel.shard_table import ShardRow
from engine.zero.flat_buckets import FlatBucket
from engine.zero.layout import Slot
from engine.zero.optim.optimizer_tensors import OptimizerTensor, WholeUpdates
from engine.zero.phases.state_inventory import StateInventory, StateTensor


@dataclass(frozen=True, slots=True)
class Held:
    """Elements of a full tensor in this rank's memory."""

    tensor: str
    """"param/...", "master/...", "exp_avg/..."."""
    row: ShardRow
    """The row of the parameter that the tensor belongs to."""
    kind: TensorKind
    """Shape of the full tensor, and the dtype of ``values``."""
    own: Piece
    """The elements of the full tensor that ``values`` holds."""
    values: Tensor
    """[own.elements], on the device; a view."""
    apart: bool = False
    """It has a shape of its own, and a rank that has any of it has all."""
    stores: bool = False
    """Of state apart: this rank stores it, of all that have it."""


@dataclass(frozen=True)
class LocalTensors:
    """Lists the tensors that one rank holds, but for weights of which it holds codes (``quantized``)."""

    ownership: SaveOwnership
    coord: Coord
    inventory: StateInventory

    @property
    def buckets(self) -> Sequence[FlatBucket]:
        """Trained and frozen buckets."""
        return self.inventory.buckets

    @property
    def places(self) -> Sequence[OptimizerTensor]:
        """Flat tensors that the optimizer updates."""
        return self.inventory.optimizer.places

    def weights(self) -> Iterator[Held]:
        """Parameters in the dtype that the model computes with; those outside buckets are full on every data rank."""
        for state in self.inventory.weights():
            yield from self._of(state, "param")

    def place_quantized(self, row: ShardRow, full: Tensor) -> None:
        """Quantize the values of a whole weight, and keep the part that this rank holds."""
        device = self.buckets[0].params.device if self.buckets else full.device
        codes = quantize_part(full.to(device, self.ownership.frozen_dtype(row)), row, self.coord.tp)
        for _, flat, slot in (found for found in self._slots() if found[0] is row):
            flat.place(slot, codes)
            return
        dict(self.inventory.model.named_parameters())[row.name].data.copy_(codes)

    def masters(self) -> Iterator[Held]:
        """fp32 master weights of parameters in a narrower dtype."""
        for state in self.inventory.masters():
            if state.flat is not None and state.flat.wide is not None:
                yield from self._of(state, "master")

    def state(self, tensors: Mapping[nn.Parameter, Mapping[str, Tensor]]) -> Iterator[Held]:
        """Moments as views of ``tensors``, which has them by updated parameter and name, in that parameter's shape."""
        rows = {row.name: row for row in self.ownership.plan.table}
        for place in self.places:
            for slot in place.flat.bucket.slots:
                row = rows[slot.name]
                own = self.ownership.own(row, self.coord)
                start = max(slot.start + own.start, place.part.start)
                stop = min(slot.start + own.stop, place.part.stop)
                if start >= stop:
                    continue
                piece = Piece(own.part, start - slot.start, stop - slot.start)
                for name, tensor in tensors.get(place.parameter, {}).items():
                    values = tensor.view(-1)[start - place.part.start : stop - place.part.start]
                    yield Held(f"{name}/{row.name}", row, kind_of(values, row.shape), piece, values)

    def apart(self, updates: WholeUpdates) -> Iterator[Held]:
        """State that this rank has whole, in shapes of its own."""
        grid = self.ownership.grid
        kept: dict[str, list[StateTensor]] = {}
        for state in self.inventory.whole_state(updates):
            kept.setdefault(state.name, []).append(state)
        first = grid.is_first(grid.copies if updates.on_all_data_ranks else grid.shard_copies, self.coord)
        for row in self.ownership.plan.table.held_by(self.coord.pp):
            # of a matrix that tensor ranks cut, one of them is the owner; of others all of them have the state
            stores = first and (self.coord.tp == 0 or (updates.by_owner and row.dim is not None))
            for state in kept.get(row.name, ()):
                values, whole = state.tensor, Part(tuple(state.tensor.shape)).whole()
                yield Held(
                    f"{state.kind}/{row.name}", row, kind_of(values), whole, values.view(-1), apart=True, stores=stores
                )

    def _slots(self) -> Iterator[tuple[ShardRow, FlatBucket, Slot]]:
        rows = {row.name: row for row in self.ownership.plan.table}
        for flat in self.buckets:
            for slot in flat.bucket.slots:
                yield rows[slot.name], flat, slot

    def _of(self, state: StateTensor, folder: str) -> Iterator[Held]:
        """The parameters of which a tensor holds elements, but for those that are held as codes."""
        if state.flat is None:
            row = next(row for row in self.inventory.rows if row.name == state.name)
            if row.quantized is None:
                yield self._held(f"{folder}/{row.name}", row, state.tensor.detach().view(-1))
            return
        rows = {row.name: row for row in self.ownership.plan.table}
        for slot in state.flat.bucket.slots:
            row = rows[slot.name]
            if row.quantized is not None:
                continue
            values = state.tensor[slot_slice(state.part, slot, self.ownership.own(row, self.coord))]
            yield self._held(f"{folder}/{row.name}", row, values)

    def _held(self, tensor: str, row: ShardRow, values: Tensor) -> Held:
        own = self.ownership.own(row, self.coord)
        if own.elements != values.numel():  # every data rank holds the full part
            own = own.part.whole()
        return Held(tensor, row, kind_of(values, row.shape), own, values)


def slot_slice(owned: slice, slot: Slot, own: Piece) -> slice:
    """Position of a piece of a slot in memory that starts at ``owned``."""
    return slice(slot.start + own.start - owned.start, slot.start + own.stop - owned.start)


@torch.no_grad()
def copy_shared(source: Tensor, held: Piece, target: Tensor, wanted: Piece) -> None:
    """Copy the elements that two pieces of a tensor share; ``source`` and ``target`` are flat."""
    if held == wanted:
        target.copy_(source)
        return
    shared = runs(held, wanted)
    if not len(shared.length):
        return
    starts, places, length = shared.source, shared.target, int(shared.length[0])
    steps = starts[1:] - starts[:-1], places[1:] - places[:-1]
    # runs of one length at equal distances, as in a column-parallel weight, are one strided copy
    if len(starts) > 2 and (shared.length == length).all() and all((step == step[0]).all() for step in steps):
        size, begins = (len(starts), length), (int(starts[0]), int(places[0]))
        across = target.as_strided(size, (int(steps[1][0]), 1), target.storage_offset() + begins[1])
        across.copy_(source.as_strided(size, (int(steps[0][0]), 1), source.storage_offset() + begins[0]))
        return
    for start, place, count in zip(*(column.tolist() for column in shared), strict=True):
        target[place : place + count].copy_(source[start : start + count])
