"""Snapshot: copy of this rank's state into host memory, the part of a save during which training waits.

weights                 messages to the ranks that write full tensors; own tensors go to the image of the model file
buffers                 image of the model file, on the rank that owns them
masters, moments        image of the optimizer file
random generators       image of the state file
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from engine.checkpoint.contents.local_tensors import Held, ModelTensor, SaveOwnership, copy_shared, stored_part
from engine.checkpoint.format.host_image import HostImage, ImageMemory, as_tensor, kind_of, make_image
from engine.checkpoint.format.pieces import Part, Piece
from engine.checkpoint.format.safetensors_file import FilePart, TensorKind
from engine.parallel.grid import Coord

METADATA = {"format": "pt"}
"""Metadata that transformers requires in a safetensors file."""


@dataclass(frozen=True, slots=True)
class Contents:
    """Metadata of a checkpoint for its manifest: step, counters, configuration and optimizer groups."""

    step: int
    aliases: Mapping[str, str]
    info: Mapping[str, Any]
    progress: Mapping[str, Any]
    optimizer: Mapping[str, Any]
    user: Any
    model_files: Mapping[str, bytes]
    """Content of "config.json" and other files of ``model/`` without tensors, by name."""


@dataclass(frozen=True, slots=True)
class Ours:
    """Live state of one rank to save: views of its tensors, and its optimizer scalars."""

    weights: Sequence[Held]
    """Parameters of this rank; their owners write them in full."""
    buffers: Mapping[str, Tensor]
    """Buffer tensors by name, "buffer/..."."""
    pieces: Sequence[Held]
    """fp32 masters and optimizer moments of this rank."""
    state: Mapping[str, Tensor]
    """Tensors that only this rank has, such as states of random generators."""
    numbers: Mapping[str, Any]
    """Scalars of optimizer state, by parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Copy of one rank's state in host memory, from which a save writes its files."""

    contents: Contents
    outgoing: Mapping[int, memoryview]
    """Message with pieces of this rank's weights for each rank that writes full tensors."""
    model: HostImage
    """Image of this rank's file in ``model/``; pieces of other ranks are received later."""
    optim: HostImage
    state: HostImage
    pieces: Mapping[str, tuple[TensorKind, Piece]]
    """Dtype, full shape and piece of every tensor in this rank's optimizer file."""
    numbers: Mapping[str, Any]

    @property
    def images(self) -> tuple[HostImage, ...]:
        """Safetensors files that this rank writes, byte for byte in host memory; files without tensors are left out."""
        return tuple(image for image in (self.model, self.optim, self.state) if image.layout.places)


_MessagePart = tuple[ModelTensor, Piece, int, int]
"""Tensor, range of its elements that a message carries, and their start byte and end byte in the message."""


class Snapshots:
    """Maker of one rank's snapshots (copies of its state in host memory)."""

    def __init__(self, ownership: SaveOwnership, tensors: Sequence[ModelTensor], rank: int) -> None:
        self.owned = [tensor for tensor in tensors if tensor.owner == rank]
        self.writers = sorted({tensor.owner for tensor in tensors})
        """Ranks that own tensors, ascending."""
        self.memory = ImageMemory()
        self._ownership, self._tensors = ownership, tensors
        self._layouts: dict[tuple[Coord, int], list[_MessagePart]] = {}
        """Cache of ``_parts``: the plan is constant, and training waits while a message is filled."""
        self._grid = ownership.plan.grid(rank)
        self._coord = self._grid.coord()

    @torch.no_grad()
    def take(self, ours: Ours, contents: Contents) -> Snapshot:
        """Copies into host memory all state of this rank that training will change. Communicates nothing.

        The next call reuses the memory, which makes the earlier snapshot invalid.
        """
        weights = {held.tensor: held for held in ours.weights}
        others = [owner for owner in self.writers if owner != self._grid.rank]
        outgoing = {owner: memory for owner in others if (memory := self._message(weights, owner)) is not None}
        # a buffer may have been replaced since the model was built, with another dtype or shape
        live = {tensor.name: kind_of(ours.buffers[tensor.name]) for tensor in self.owned if tensor.row is None}
        owned = [replace(tensor, kind=live.get(tensor.name, tensor.kind)) for tensor in self.owned]
        model = self._image(
            "model", {tensor.key: tensor.kind for tensor in owned}, {tensor.key: tensor.entries for tensor in owned}
        )
        for tensor, *_ in self._parts(self._coord, self._grid.rank):
            held, whole = weights[tensor.name], model.tensor(tensor.key).view(-1)
            # includes rows that other ranks have too; the message of their first holder overwrites them
            copy_shared(held.values, held.own, whole, Part(tensor.kind.shape).whole())
        for tensor in self.owned:
            if tensor.row is None:
                model.tensor(tensor.key).copy_(ours.buffers[tensor.name])
        stored = [(held, piece) for held in ours.pieces if (piece := self._stored(held)) is not None]
        optim = self._image("optim", {held.tensor: TensorKind(held.kind.dtype, (p.elements,)) for held, p in stored})
        for held, piece in stored:
            copy_shared(held.values, held.own, optim.tensor(held.tensor), piece)
        state = self._image("state", {key: kind_of(value) for key, value in ours.state.items()})
        for key, value in ours.state.items():
            state.tensor(key).copy_(value)
        pieces = {held.tensor: (held.kind, piece) for held, piece in stored}
        return Snapshot(
            contents=contents,
            outgoing=outgoing,
            model=model,
            optim=optim,
            state=state,
            pieces=pieces,
            numbers=ours.numbers,
        )

    def incoming(self) -> Iterator[tuple[int, int]]:
        """Yields (sending rank, bytes) of each message with weights that this rank receives in a save."""
        for coord in map(self._grid.coord, self._grid.peers("stage") if self.owned else ()):
            parts = self._parts(coord, self._grid.rank)
            if parts and coord != self._coord:
                yield self._grid.rank_at(**coord), parts[-1][3]

    @torch.no_grad()
    def put(self, snapshot: Snapshot, source: int, message: memoryview) -> None:
        """Copies the weights in ``message``, which the rank ``source`` has sent, into ``snapshot``."""
        for tensor, piece, start, stop in self._parts(self._grid.coord(source), self._grid.rank):
            values = as_tensor(message[start:stop], TensorKind(tensor.kind.dtype, (piece.elements,)))
            whole = snapshot.model.tensor(tensor.key).view(-1)
            copy_shared(values, piece, whole, Part(tensor.kind.shape).whole())

    def _parts(self, source: Coord, owner: int) -> list[_MessagePart]:
        """Returns the layout of the message with weights from the rank at ``source`` to the rank ``owner``. Start bytes
        are multiples of 8. Sender and receiver compute it from the plan, so messages have no header.
        """
        if (source, owner) not in self._layouts:
            found, end = [], 0
            for tensor in self._tensors:
                if tensor.owner == owner and tensor.stage == source.pp and tensor.row is not None:
                    piece = self._ownership.stored(tensor.row, source)
                    if piece is not None:
                        start = -(-end // 8) * 8
                        end = start + piece.elements * tensor.kind.width
                        found.append((tensor, piece, start, end))
            self._layouts[source, owner] = found
        return self._layouts[source, owner]

    def _message(self, weights: Mapping[str, Held], owner: int) -> memoryview | None:
        parts = self._parts(self._coord, owner)
        if not parts:
            return None
        memory = self.memory.take(f"to {owner}", parts[-1][3])[: parts[-1][3]]
        for tensor, piece, start, stop in parts:
            held = weights[tensor.name]
            target = as_tensor(memory[start:stop], TensorKind(held.kind.dtype, (piece.elements,)))
            copy_shared(held.values, held.own, target, piece)
        return memory

    def _stored(self, held: Held) -> Piece | None:
        """Returns the piece of ``held`` that this rank stores; None if another rank stores these elements."""
        if held.row.owners[0] != self._coord.pp:
            return None
        if held.apart:
            return held.own if held.stores else None
        part = stored_part(held.row, self._ownership.grid.holder(self._coord))
        if part is None or not self._ownership.stores(held.row, self._coord):
            return None
        piece = held.own.within(part)
        return piece if piece.elements else None

    def _image(
        self, name: str, kinds: Mapping[str, TensorKind], parts: Mapping[str, Sequence[FilePart]] | None = None
    ) -> HostImage:
        return make_image(kinds, METADATA, self.memory, name, parts)
