"""Views of every tensor on this rank, to save or to load, and ownership: which elements each rank saves.

Ownership follows from the plan, without communication. At every ZeRO stage, a data rank of the first shard group saves
its 1/N of every bucket. Of ranks with replicated elements (tied stages, rows on several tensor ranks) the first one
saves them. Data rank 0 saves parameters outside buckets (frozen and not sharded).

For the folder ``model/``, weights are then sent to the rank that writes the full tensor. The tensors of a stage are
divided among its ranks by bytes.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import torch
from torch import Tensor, nn

from engine.checkpoint.format.host_image import kind_of
from engine.checkpoint.format.pieces import Part, Piece, runs
from engine.checkpoint.format.safetensors_file import FilePart, TensorKind, code_of, file_parts
from engine.parallel.grid import Coord, Grid, ShardHolder
from engine.parallel.model.quantized_layers import quantize_part
from engine.parallel.shard_table import Range, ShardRow
from engine.planning.plan import Plan
from engine.zero.flat_buckets import FlatBucket
from engine.zero.layout import Bucket, Slot
from engine.zero.optim.optimizer_tensors import OptimizerTensor, WholeUpdates
from engine.zero.state.state_inventory import StateInventory, StateTensor


@dataclass(frozen=True, slots=True)
class ModelTensor:
    """Parameter or buffer that a checkpoint stores in Hugging Face format, in the folder ``model/``."""

    name: str
    """Name in the checkpoint: "param/..." or "buffer/..."."""
    key: str
    """Key of the tensor in the Hugging Face folder."""
    kind: TensorKind
    stage: int
    owner: int
    """Rank that writes the full tensor."""
    row: ShardRow | None
    """Shard-table row of the parameter; None for a buffer, which is full on its owner."""
    parts: tuple[FilePart, ...] = ()
    """Tensors of the folder that have its elements; empty: one, under ``key``."""

    @property
    def entries(self) -> Sequence[FilePart]:
        """Entries of a file in the checkpoint's ``model/`` that together store this tensor, in the order of its
        elements. Each has a key and a range of this tensor's elements.
        """
        if self.row is None and self.parts:  # a buffer may have been replaced by one of another shape
            return file_parts(self.parts[0].key, self.kind.shape)
        return file_parts(self.key, self.kind.shape, self.parts)


def local_region(row: ShardRow, holder: ShardHolder) -> Part:
    """Returns the index ranges of a parameter that tensor and expert parallelism assign to the ranks with the
    coordinates ``holder`` (pp, tp, ep).

    ``row``: the parameter's entry in the shard table.
    """
    return _region(row, row.tensor_ranges(holder), holder)


def _region(row: ShardRow, ranges: Sequence[Range], holder: ShardHolder) -> Part:
    """Returns ``ranges`` of the rows of a parameter, of the experts of the rank ``holder``."""
    experts = tuple((r.start, r.stop) for r in row.expert_ranges(holder)) if len(row.experts) > 1 else ()
    if row.dim is None:
        return Part(row.shape, row.expert_dim, experts) if experts else Part(row.shape)
    return Part(row.shape, row.dim, tuple((r.start, r.stop) for r in ranges), experts[0] if experts else None)


def stored_part(row: ShardRow, holder: ShardHolder) -> Part | None:
    """Returns the index ranges of a parameter that the ranks at ``holder`` (pp, tp, ep) save; None if they save none.

    If several tensor ranks have the same ranges, the first of these ranks saves them. ``row``: the parameter's entry in
    the shard table.
    """
    first = [each for each in row.ranges if each.holders[0] == holder.tp]
    return _region(row, first, holder) if first and row.held(holder._replace(pp=row.owners[0])) else None


@dataclass(frozen=True)
class SaveOwnership:
    """Assignment of every element of the parameters to the one rank that saves it."""

    plan: Plan

    @cached_property
    def slots(self) -> Mapping[ShardHolder, Mapping[str, tuple[Bucket, Slot]]]:
        """Position of each parameter in flat buckets, by grid coordinates (pp, tp, ep) and parameter name.

        A position is a bucket and a range of elements in it.
        """
        return {
            where: {slot.name: (bucket, slot) for bucket in (*layout.buckets, *layout.frozen) for slot in bucket.slots}
            for where, layout in self.plan.layouts.items()
        }

    @cached_property
    def grid(self) -> Grid:
        """Grid of all ranks, with the coordinates of rank 0 as its own."""
        return self.plan.grid(0)

    def stores(self, row: ShardRow, coord: Coord) -> bool:
        """Returns True if the rank at ``coord`` saves its ZeRO shard of a parameter. Only the lowest of the ranks with
        the same shard saves it.
        """
        spread = self.grid.expert_spread if row.experts else self.grid.spread
        return self.grid.is_first(spread.shard_copies, coord)

    def own(self, row: ShardRow, coord: Coord) -> Piece:
        """Returns the elements of a parameter that the rank at ``coord`` updates; the piece may be empty."""
        part = local_region(row, self.grid.holder(coord))
        found = self.slots[self.grid.holder(coord)].get(row.name)
        if found is None:
            copies = self.grid.expert_spread.copies if row.experts else self.grid.copies
            return Piece(part, 0, part.elements if self.grid.is_first(copies, coord) else 0)
        bucket, slot = found
        shard = bucket.shard(self.grid.index(bucket.spread.sharding, self.grid.rank_at(**coord)))
        start = min(max(slot.start, shard.start), slot.stop)
        return Piece(part, start - slot.start, max(start, min(slot.stop, shard.stop)) - slot.start)

    def stored(self, row: ShardRow, coord: Coord) -> Piece | None:
        """Returns the range of a parameter's elements that the rank at ``coord`` writes into a checkpoint; None if it
        writes none. ``row``: the parameter's entry in the shard table.
        """
        part = stored_part(row, self.grid.holder(coord))
        if part is None or coord.pp != row.owners[0] or not self.stores(row, coord):
            return None
        piece = self.own(row, coord).within(part)
        return piece if piece.elements else None

    def frozen_dtype(self, row: ShardRow) -> torch.dtype:
        """Returns the dtype that the forward pass uses for the frozen parameter ``row``."""
        return self.plan.precision.frozen(row.name, row.dtype)

    def kind(self, row: ShardRow) -> TensorKind:
        """Returns the full shape of a parameter and the safetensors name of its dtype in the forward pass."""
        precision = self.plan.precision
        dtype = precision.parameter(row.name, row.dtype) if row.trainable else self.frozen_dtype(row)
        return TensorKind(code_of(str(dtype).removeprefix("torch.")), row.shape)


def model_tensors(
    ownership: SaveOwnership, keys: Mapping[str, str], buffers: Mapping[str, tuple[str, TensorKind]]
) -> tuple[ModelTensor, ...]:
    """Returns all parameters and buffers of a checkpoint's folder ``model/``, each with the rank that writes it.

    Ranks of one pipeline stage write similar numbers of bytes.

    Args:
        keys: parameter name -> key in the folder.
        buffers: buffer name -> (key, dtype and shape).
    """
    plan = ownership.plan
    rows = [(row, ownership.kind(row)) for row in plan.table if row.name in keys]
    owners = _spread([(row.owners[0], kind.bytes) for row, kind in rows], plan)
    tensors = [
        ModelTensor(f"param/{row.name}", keys[row.name], kind, row.owners[0], owner, row)
        for (row, kind), owner in zip(rows, owners, strict=True)
    ]
    grid = plan.grid(0)
    for name, (key, kind) in buffers.items():
        stage = plan.owner_of_buffer(name)
        tensors.append(ModelTensor(f"buffer/{name}", key, kind, stage, grid.rank_at(pp=stage), None))
    return tuple(tensors)


def _spread(sizes: Sequence[tuple[int, int]], plan: Plan) -> list[int]:
    """Returns a rank for each (stage, bytes): adjacent tensors stay together, and ranks of a stage write similar
    amounts."""
    grid, totals, before = plan.grid(0), dict[int, int](), dict[int, int]()
    for stage, size in sizes:
        totals[stage] = totals.get(stage, 0) + size
    ranks = [grid.peers("stage", grid.rank_at(pp=stage)) for stage in range(grid.pp)]
    owners = []
    # a tensor goes to the rank with the middle of the tensor in its equal share of the stage's bytes
    for stage, size in sizes:
        middle = before.get(stage, 0) + size // 2
        before[stage] = before.get(stage, 0) + size
        share = min(len(ranks[stage]) - 1, middle * len(ranks[stage]) // max(1, totals[stage]))
        owners.append(ranks[stage][share])
    return owners


@dataclass(frozen=True, slots=True)
class Held:
    """Elements of one checkpoint tensor in this rank's memory, as a view of the live training state."""

    tensor: str
    """Name in the checkpoint: "param/...", "master/...", "exp_avg/..."."""
    row: ShardRow
    """Shard-table row of the parameter to which the tensor belongs."""
    kind: TensorKind
    """Shape of the full tensor, and dtype of ``values``."""
    own: Piece
    """Elements of the full tensor that ``values`` contains."""
    values: Tensor
    """Device tensor [own.elements], a view of the live state."""
    apart: bool = False
    """True for optimizer state that is not sharded by elements; a rank with any of it has all."""
    stores: bool = False
    """True if this rank saves it; only for ``apart``."""


@dataclass(frozen=True)
class LocalTensors:
    """Live weights, fp32 master weights and optimizer state of one rank. A save reads them, and a load writes them.

    Its iterators leave out quantized frozen weights.
    """

    ownership: SaveOwnership
    coord: Coord
    inventory: StateInventory

    @property
    def buckets(self) -> Sequence[FlatBucket]:
        """Flat buckets (tensors that concatenate parameters) of this rank's trainable and frozen parameters."""
        return self.inventory.buckets

    @property
    def places(self) -> Sequence[OptimizerTensor]:
        """Flat tensors that this rank's optimizer updates, each with its position in a flat bucket."""
        return self.inventory.optimizer.places

    def weights(self, copies: bool = False) -> Iterator[Held]:
        """Yields this rank's parameters, in the dtype of the forward pass.

        ``copies``: False for only the elements that this rank updates (its ZeRO shard); True for all in its memory.
        For parameters outside of flat buckets, both yield all.
        """
        for state in self.inventory.weights():
            yield from self._of(state, "param", copies)

    def place_quantized(self, row: ShardRow, full: Tensor) -> None:
        """Quantizes ``full``, all elements of a frozen parameter, and stores this rank's shard of the result in the
        model.
        """
        device = self.buckets[0].params.device if self.buckets else full.device
        holder = self.ownership.grid.holder(self.coord)
        codes = quantize_part(full.to(device, self.ownership.frozen_dtype(row)), row, holder)
        for flat in self.buckets:
            for slot in flat.bucket.slots:
                if slot.name == row.name:
                    flat.place(slot, codes)
                    return
        dict(self.inventory.model.named_parameters())[row.name].data.copy_(codes)

    def masters(self) -> Iterator[Held]:
        """Yields this rank's fp32 master weights of bf16 and fp16 parameters, as views."""
        for state in self.inventory.masters():
            if state.flat is not None and state.flat.wide is not None:
                yield from self._of(state, "master")

    def state(self, tensors: Mapping[nn.Parameter, Mapping[str, Tensor]]) -> Iterator[Held]:
        """Yields this rank's elements of optimizer moments, such as "exp_avg". The full moments have the parameter's
        shape.

        ``tensors``: the optimizer's state, as flat parameter -> moment name -> tensor.
        """
        return self._elements(self.inventory.element_state(tensors))

    def companions(self) -> Iterator[Held]:
        """Yields this rank's elements of the tensors that features other than the optimizer store for each parameter,
        such as moving averages of weights. The full tensors have the parameter's shape.
        """
        return self._elements(self.inventory.companion_state())

    def _elements(self, found: Iterable[StateTensor]) -> Iterator[Held]:
        rows = {row.name: row for row in self.ownership.plan.table}
        for flat, part, states in _by_part(found):
            for slot in flat.bucket.slots:
                row = rows[slot.name]
                own = self.ownership.own(row, self.coord)
                start, stop = max(slot.start + own.start, part.start), min(slot.start + own.stop, part.stop)
                if start >= stop:
                    continue
                piece = Piece(own.part, start - slot.start, stop - slot.start)
                for state in states:
                    values = state.tensor.view(-1)[start - part.start : stop - part.start]
                    yield Held(f"{state.kind}/{row.name}", row, kind_of(values, row.shape), piece, values)

    def apart(self, updates: WholeUpdates) -> Iterator[Held]:
        """Yields optimizer state in other shapes than its parameter's, such as the preconditioners of Shampoo.

        ``updates``: the optimizer part that stores this state. A rank has all elements of a state tensor, or none.
        """
        grid = self.ownership.grid
        kept: dict[str, list[StateTensor]] = {}
        for state in self.inventory.whole_state(updates):
            kept.setdefault(state.name, []).append(state)
        holder = grid.holder(self.coord)
        for row in self.ownership.plan.table.held_by(holder):
            spread = grid.expert_spread if row.experts else grid.spread
            first = grid.is_first(spread.copies if updates.on_all_data_ranks else spread.shard_copies, self.coord)
            first = first and (not row.experts or holder.ep in row.experts[0].holders)
            # one tensor rank owns a sharded matrix; all tensor ranks have the state of other parameters
            stores = first and (self.coord.tp == 0 or (updates.by_owner and row.dim is not None))
            for state in kept.get(row.name, ()):
                values, whole = state.tensor, Part(tuple(state.tensor.shape)).whole()
                yield Held(
                    f"{state.kind}/{row.name}", row, kind_of(values), whole, values.view(-1), apart=True, stores=stores
                )

    def _of(self, state: StateTensor, folder: str, copies: bool = False) -> Iterator[Held]:
        """Yields the parameters with elements in a tensor, except for weights stored as codes."""
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
            own = self.ownership.own(row, self.coord)
            if copies and state.part.start <= slot.start and slot.stop <= state.part.stop:
                own = own.part.whole()
            yield self._held(f"{folder}/{row.name}", row, state.tensor[slot_slice(state.part, slot, own)])

    def _held(self, tensor: str, row: ShardRow, values: Tensor) -> Held:
        own = self.ownership.own(row, self.coord)
        if own.elements != values.numel():  # every data rank holds the full part
            own = own.part.whole()
        return Held(tensor, row, kind_of(values, row.shape), own, values)


def _by_part(states: Iterable[StateTensor]) -> Iterator[tuple[FlatBucket, slice, list[StateTensor]]]:
    """Yields the state of each tensor that the optimizer updates, with its bucket and its elements of the bucket."""
    for _, group in groupby(states, key=lambda state: (id(state.flat), state.part.start)):
        held = list(group)
        if (flat := held[0].flat) is not None:
            yield flat, held[0].part, held


def slot_slice(owned: slice, slot: Slot, own: Piece) -> slice:
    """Returns the slice that the elements ``own`` of one parameter fill in a buffer. The buffer stores a part of a flat
    bucket.

    ``owned``: range of the bucket that the buffer stores. ``slot``: range of the bucket that the parameter fills.
    """
    return slice(slot.start + own.start - owned.start, slot.start + own.stop - owned.start)


@torch.no_grad()
def copy_shared(source: Tensor, held: Piece, target: Tensor, wanted: Piece) -> None:
    """Copies from the flat tensor ``source`` to the flat tensor ``target`` the elements of a parameter that both
    contain.

    ``held``: piece of the parameter in ``source``. ``wanted``: piece in ``target``.
    """
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
