"""Plan of a transfer: each flow contains the elements that one owner serves of one piece that a receiver wants.

Owner and receiver derive the same flows from the geometry, in the order of the wanted pieces. The elements of a flow
are in the order of the full tensor, and its bytes are divided into blocks of 256 KiB, each with a hash.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from engine.checkpoint.format.checked_blocks import BLOCK, Hashes, block_count
from engine.checkpoint.format.pieces import Numbers, Part, Piece, Runs
from engine.weights_out.version import OwnerRank, PublishedTensor, WantedPiece

Elements = NDArray[Any]
"""Elements of a flat tensor as integers of the same width."""
Side = Literal["source", "target"]
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def elements_of(tensor: Tensor) -> Elements:
    """Returns the elements of a contiguous host tensor as NumPy integers of their width, [elements], without a copy."""
    found: Elements = tensor.detach().reshape(-1).view(_INTEGERS[tensor.element_size()]).numpy()
    return found


@dataclass(frozen=True)
class Flow:
    """Elements of one wanted piece that one owner serves, in the order of the full tensor, in blocks of 256 KiB."""

    wanted: int
    """Index of the wanted piece."""
    key: str
    width: int
    """Bytes of an element."""
    runs: Runs
    """Ranges of elements: position in the owner's piece, position in the wanted piece, length."""

    @cached_property
    def _ends(self) -> Numbers:
        return np.cumsum(self.runs.length)

    @property
    def size(self) -> int:
        """Size of all elements in bytes."""
        return int(self._ends[-1]) * self.width

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return block_count(self.size)

    def block_bytes(self, block: int) -> int:
        """Returns the size of block ``block`` in bytes: 256 KiB, or less for the last one."""
        return min(BLOCK, self.size - block * BLOCK)

    def places(self, block: int, side: Side) -> slice | Numbers:
        """Returns the positions of a block's elements in the owner's piece (``side`` "source") or in the wanted one
        ("target").
        """
        ends, starts = self._ends, self.runs.source if side == "source" else self.runs.target
        first = block * (BLOCK // self.width)
        stop = first + self.block_bytes(block) // self.width
        a, b = (int(found) for found in np.searchsorted(ends, (first, stop - 1), "right"))
        counts = self.runs.length[a : b + 1].copy()
        skipped = first - int(ends[a] - counts[0])
        offsets = starts[a : b + 1].copy()
        offsets[0] += skipped
        counts[0] -= skipped
        counts[-1] -= ends[b] - stop
        if a == b:
            return slice(int(offsets[0]), int(offsets[0]) + stop - first)
        return np.repeat(offsets - (np.cumsum(counts) - counts), counts) + np.arange(stop - first)

    def hash(self, values: Elements, block: int, side: Side) -> int:
        """Returns the xxh3-64 hash of block ``block`` of ``values``, the elements of the owner's or of the wanted
        piece.
        """
        return digest_of(values[self.places(block, side)].data)

    def hashes(self, values: Elements, side: Side) -> Hashes:
        """Returns the hashes of all blocks of ``values``, uint64 [blocks]; ``side`` as in ``places``."""
        return np.fromiter((self.hash(values, i, side) for i in range(self.blocks)), np.uint64, self.blocks)


def digest_of(data: memoryview) -> int:
    """Returns the xxh3-64 hash of contiguous bytes as an integer."""
    return int(xxhash.xxh3_64_intdigest(data))


def find_flows(
    owned: Mapping[str, Piece], wanted: Sequence[WantedPiece], tensors: Mapping[str, PublishedTensor]
) -> list[Flow]:
    """Returns the flows from one owner to a receiver, in the order of the wanted pieces, without empty ones.

    Args:
        owned: pieces that the owner serves, by tensor key.
        wanted: pieces that the receiver wants.
        tensors: descriptions of all tensors, by key.
    """
    found = []
    for index, each in enumerate(wanted):
        if each.name in owned and len((shared := each.overlap(owned[each.name])).length):
            found.append(Flow(index, each.name, tensors[each.name].kind.width, shared))
    return found


def by_source(wanted: Sequence[WantedPiece], peers: Sequence[OwnerRank]) -> list[tuple[WantedPiece, OwnerRank | None]]:
    """Divides wanted pieces by their source: for each element, the last of ``peers`` that has it, else its owner rank
    (None).

    ``peers`` are receivers that began to read the version earlier. Thus an owner sends each element once.
    """
    found = list[tuple[WantedPiece, OwnerRank | None]]()
    for each in wanted:
        taken, left = list[Piece](), each.piece.elements
        for peer in reversed(peers):
            piece = peer.pieces.get(each.name)
            if piece is None or not left:
                continue
            part = WantedPiece(each.name, each.piece, (piece,), tuple(taken))
            if elements := int(part.overlap(each.piece).length.sum()):
                found.append((part, peer))
                taken.append(piece)
                left -= elements
        if left or not each.piece.elements:
            found.append((WantedPiece(each.name, each.piece, (), tuple(taken)), None))
    return found


def share_of(shape: tuple[int, ...], index: int, parts: int, dim: int = 0) -> Piece:
    """Returns part ``index`` of ``parts`` of a tensor, cut into nearly equal ranges of rows along ``dim``.

    Scalars are not cut.
    """
    if parts == 1 or not shape:
        return Part(shape).whole()
    bounds = shape[dim] * index // parts, shape[dim] * (index + 1) // parts
    return Part(shape, dim, (bounds,) if bounds[0] < bounds[1] else ()).whole()


def batches(flows: Sequence[Flow], lacked: Sequence[Numbers], limit: int) -> Iterator[list[tuple[int, int]]]:
    """Yields lists of (flow number, block) with at most ``limit`` bytes each, for all lacking blocks.

    Args:
        flows: all flows.
        lacked: numbers of the lacking blocks of each flow.
    """
    batch: list[tuple[int, int]] = []
    size = 0
    for number, blocks in enumerate(lacked):
        for block in blocks.tolist():
            length = flows[number].block_bytes(block)
            if batch and size + length > limit:
                yield batch
                batch, size = [], 0
            batch.append((number, block))
            size += length
    if batch:
        yield batch
