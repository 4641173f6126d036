"""Pieces of logical tensors in the memory of one rank: elements that it updates, and those that it pushes.

Each element of a tensor is pushed by the one rank that saves it in checkpoints, and pulled by every rank that updates
it: at ZeRO 0 by all data ranks, at ZeRO 1 to 3 by its owner, under tensor parallelism by all ranks with a copy.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.checkpoint.contents.local_tensors import LocalTensors, SaveOwnership, copy_shared, local_region
from engine.checkpoint.format.pieces import Part, Piece
from engine.outer.fragments import Fragment, divide
from engine.outer.messages import NamedPiece, RankLayout
from engine.parallel.comm.comm import Comm
from engine.parallel.grid import Coord
from engine.planning.plan import Plan
from engine.zero.flat_buckets import FlatBucket
from engine.zero.optim.optimizer_tensors import update_gradient
from engine.zero.state.state_inventory import StateInventory

_AT_ONCE = 1 << 24
"""Elements of a tensor whose digest is computed at once."""
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
"""Integers by the bytes of an element."""


@dataclass(frozen=True, slots=True)
class LocalPiece:
    """Range of elements of one unsharded tensor that this rank updates and exchanges with the stores."""

    name: str
    fragment: int
    flat: FlatBucket
    part: slice
    """Elements in the bucket."""
    pulled: Piece
    """The same elements in the logical tensor."""
    pushed: Piece | None
    """Elements among them that this rank pushes; None: other ranks push all of them."""

    @property
    def weights(self) -> Tensor:
        """View of this piece's weights, [elements], which the optimizer updates."""
        return self.within(self.flat.weights)

    @property
    def gradient(self) -> Tensor:
        """View of this piece's gradient, [elements], which the optimizer reads."""
        return update_gradient(self.flat, self.part)

    def within(self, owned: Tensor) -> Tensor:
        """Returns the view of this piece's elements in ``owned``.

        Args:
            owned: 1-D tensor, laid out as this rank's shard of the piece's bucket (flat tensor of many parameters).
        """
        return owned[self.part.start - self.flat.owned.start : self.part.stop - self.flat.owned.start]

    def chosen(self, values: Tensor) -> Tensor:
        """Returns the elements of ``values`` that this rank pushes: ``values`` itself if it pushes all, else a copy.

        Args:
            values: one value for each element of the piece, [elements].
        """
        assert self.pushed is not None, "this rank pushes none of them"
        if self.pushed == self.pulled:
            return values
        found = values.new_empty(self.pushed.elements)
        copy_shared(values, self.pulled, found, self.pushed)
        return found

    def put(self, values: Tensor, chosen: Tensor) -> None:
        """Puts ``chosen`` in place of the elements of ``values`` that this rank pushes; the others do not change.

        Args:
            values: one value for each element of the piece, [elements].
            chosen: new values of the pushed elements.
        """
        assert self.pushed is not None, "this rank pushes none of them"
        copy_shared(chosen, self.pushed, values, self.pulled)


@dataclass(frozen=True, slots=True)
class LocalPieces:
    """All pieces of tensors that one rank updates and exchanges with the stores."""

    fragments: tuple[Fragment, ...]
    """Fragments, one for each store among which their tensors are divided; messages number them in this order."""
    pieces: tuple[LocalPiece, ...]
    flats: tuple[FlatBucket, ...]
    """Buckets of trained parameters."""

    @property
    def layout(self) -> RankLayout:
        """Layout of this rank's messages: the elements that it pushes to the stores and pulls from them."""
        pushed = tuple(NamedPiece(each.name, each.pushed) for each in self.pieces if each.pushed is not None)
        return RankLayout(pushed, tuple(NamedPiece(each.name, each.pulled) for each in self.pieces))

    def of(self, fragment: int) -> tuple[LocalPiece, ...]:
        """Returns the pieces of tensors in fragment number ``fragment``."""
        return tuple(each for each in self.pieces if each.fragment == fragment)

    def pulled(self, fragment: int, body: Tensor) -> Iterator[tuple[LocalPiece, Tensor]]:
        """Yields each of this rank's pieces of fragment number ``fragment``, with a view of its values in ``body``.

        ``body``: merged values of these pieces, concatenated, fp32 [elements].
        """
        own = self.of(fragment)
        sizes = [each.pulled.elements for each in own]
        yield from zip(own, torch.split(body, sizes) if sizes else (), strict=True)

    def buckets(self, fragment: int) -> list[FlatBucket]:
        """Returns the buckets (flat tensors for many parameters) that contain a tensor of ``fragment``.

        All data-parallel ranks get the same buckets.
        """
        names = set(self.fragments[fragment].names)
        return [flat for flat in self.flats if any(slot.name in names for slot in flat.bucket.slots)]


def find_pieces(
    plan: Plan, coord: Coord, buckets: Sequence[FlatBucket], fragments: int = 1, stores: int = 1
) -> LocalPieces:
    """Returns the pieces of tensors that the rank at ``coord`` updates, and the model's fragments (groups of tensors).

    All ranks and all parallel layouts get the same fragments.

    Args:
        plan: plan with the tensors and the parallel layout of this engine.
        coord: coordinate of the rank.
        buckets: flat buckets of the rank's trainable parameters.
        fragments: number of fragments into which the model is divided.
        stores: number of stores over which each fragment is divided.
    """
    ownership, rows = SaveOwnership(plan), [row for row in plan.table if row.trainable]
    made = divide([(row.name, row.shape) for row in rows], fragments, stores)
    fragment_of = {name: number for number, each in enumerate(made) for name in each.names}
    holder, found = ownership.grid.holder(coord), dict[str, LocalPiece]()
    by_name = {row.name: row for row in rows}
    for flat in buckets:
        for slot in flat.bucket.slots:
            row, start, stop = by_name[slot.name], max(slot.start, flat.owned.start), min(slot.stop, flat.owned.stop)
            if start < stop:
                pulled = Piece(local_region(row, holder), start - slot.start, stop - slot.start)
                pushed = ownership.stored(row, coord)
                found[row.name] = LocalPiece(row.name, fragment_of[row.name], flat, slice(start, stop), pulled, pushed)
    return LocalPieces(made, tuple(found[row.name] for row in rows if row.name in found), tuple(buckets))


@dataclass(frozen=True, slots=True)
class UntrainedState:
    """Frozen parameters and persistent buffers of one rank, for a check that all sites start with equal values.

    The check compares digests, which do not depend on the parallel layout. Quantized weights have no digest.
    """

    plan: Plan
    inventory: StateInventory

    @torch.no_grad()
    def digests(self, comm: Comm, device: torch.device, with_buffers: bool) -> dict[str, str]:
        """Returns dtype and digest of each frozen parameter by name, such as "bfloat16 0123456789abcdef".

        With ``with_buffers``, rank 0 also returns dtypes and digests of persistent buffers. Makes at most one
        all-reduce over all ranks, label "outer".
        """
        ownership, coord = SaveOwnership(self.plan), comm.grid.coord()
        rows = [row for row in self.plan.table if not row.trainable and row.quantized is None]
        found = dict.fromkeys((row.name for row in rows), torch.zeros((), dtype=torch.int64))
        for held in LocalTensors(ownership, coord, self.inventory).weights() if rows else ():
            own = ownership.stored(held.row, coord)
            if held.row.name in found and own is not None:
                values = held.values.new_empty(own.elements)
                copy_shared(held.values, held.own, values, own)
                found[held.row.name] = _digest(values, own).cpu()
        if rows:
            summed = torch.stack([*found.values()]).to(device)
            comm.all_reduce(summed, "world", "outer").wait()
            found = dict(zip(found, summed.cpu(), strict=True))
        named = {row.name: (ownership.frozen_dtype(row), found[row.name]) for row in rows}
        if with_buffers and comm.grid.rank == 0:
            for name, values in self._buffers():
                named[name] = values.dtype, _digest(values.detach().flatten(), Part(tuple(values.shape)).whole())
        dtypes = {name: str(dtype).removeprefix("torch.") for name, (dtype, _) in named.items()}
        return {name: f"{dtypes[name]} {int(digest) % 2**64:016x}" for name, (_, digest) in named.items()}

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        model = self.inventory.model
        stored = {id(values) for values in model.state_dict(keep_vars=True).values()}
        return ((name, values) for name, values in model.named_buffers() if id(values) in stored and not values.is_meta)


def _digest(values: Tensor, piece: Piece) -> Tensor:
    """Returns the digest of a piece's ``values`` [elements], int64 []."""
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for start in range(piece.start, piece.stop, _AT_ONCE):
        part = Piece(piece.part, start, min(start + _AT_ONCE, piece.stop))
        spans = part.spans()
        shifts = torch.from_numpy(spans.full - spans.local).repeat_interleave(torch.from_numpy(spans.length))
        places = (shifts + torch.arange(part.elements)).to(values.device)
        chunk = values[start - piece.start :][: part.elements].contiguous()
        words = chunk.view(_WORDS[chunk.element_size()]).view(part.elements, -1).sum(1, dtype=torch.int64)
        total += (words * (2 * places + 1)).sum()
    return total
