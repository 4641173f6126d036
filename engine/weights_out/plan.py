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
from engine.checkpoint.format.safetensors_file import in_batches
from engine.weights_out.version import OwnerRank, PublishedTensor, WantedPiece

Elements = NDArray[Any]
"""Elements of a flat tensor as integers of the same width."""
Side = Literal["source", "target"]
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def elements_of(tensor: Tensor) -> Elements:
    """Returns a flat NumPy view of a contiguous host tensor, with integers of its element size.

    A bf16 tensor becomes int16.
    """
    found: Elements = tensor.detach().reshape(-1).view(_INTEGERS[tensor.element_size()]).numpy()
    return found


@dataclass(frozen=True)
class Flow:
    """Elements that one serving rank has of one wanted piece (part of a tensor), in the order of the full tensor.

    They are divided into blocks of 256 KiB. A block is transferred if its hashes at sender and receiver differ.
    """

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
        """Total bytes of the elements of this flow."""
        return int(self._ends[-1]) * self.width

    @property
    def blocks(self) -> int:
        """Number of blocks of 256 KiB in this flow; the last may be shorter."""
        return block_count(self.size)

    def block_bytes(self, block: int) -> int:
        """Returns the size of block ``block`` in bytes: 256 KiB, or less for the last one."""
        return min(BLOCK, self.size - block * BLOCK)

    def places(self, block: int, side: Side) -> slice | Numbers:
        """Returns the positions of the elements of block ``block``, as a slice or an array of indices.

        A position counts from the start of the serving rank's piece if ``side`` is "source", and from the start of the
        wanted piece if it is "target".
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
        """Returns the xxh3-64 hash of block ``block``.

        Args:
            values: elements of the serving rank's piece if ``side`` is "source", of the wanted piece if it is "target".
        """
        return digest_of(values[self.places(block, side)].data)

    def hashes(self, values: Elements, side: Side) -> Hashes:
        """Returns the hashes of all blocks, uint64 [blocks].

        Args:
            values: elements of the serving rank's piece if ``side`` is "source", of the wanted piece if it is "target".
        """
        return np.fromiter((self.hash(values, i, side) for i in range(self.blocks)), np.uint64, self.blocks)


def digest_of(data: memoryview) -> int:
    """Returns the xxh3-64 hash of contiguous bytes as an integer."""
    return int(xxhash.xxh3_64_intdigest(data))


def find_flows(
    owned: Mapping[str, Piece], wanted: Sequence[WantedPiece], tensors: Mapping[str, PublishedTensor]
) -> list[Flow]:
    """Returns the flows from one serving rank to a receiver: for each wanted piece, the elements that the rank has.

    They are in the order of ``wanted``; a piece of which the rank has no element has no flow.

    Args:
        owned: pieces (elements of a tensor) that the rank serves, by tensor key.
        wanted: pieces that the receiver wants.
        tensors: descriptions of all tensors, by key.
    """
    found = []
    for index, each in enumerate(wanted):
        if each.name in owned and len((shared := each.overlap(owned[each.name])).length):
            found.append(Flow(index, each.name, tensors[each.name].kind.width, shared))
    return found


def by_source(wanted: Sequence[WantedPiece], peers: Sequence[OwnerRank]) -> list[tuple[WantedPiece, OwnerRank | None]]:
    """Divides wanted pieces into parts, each from one source; returns (part, source) pairs.

    If several of ``peers`` have the part, the source is the last of them. If none has it, the source is None, and the
    ranks of the training run send the part.

    Args:
        peers: earlier receivers of the version, which serve the parts that they have received.
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
    """Returns the positions of part ``index`` of a tensor that is cut into ``parts`` nearly equal ranges along ``dim``.

    Scalars are not cut: every part is the whole scalar.
    """
    if parts == 1 or not shape:
        return Part(shape).whole()
    bounds = shape[dim] * index // parts, shape[dim] * (index + 1) // parts
    return Part(shape, dim, (bounds,) if bounds[0] < bounds[1] else ()).whole()


def batches(flows: Sequence[Flow], lacked: Sequence[Numbers], limit: int) -> Iterator[list[tuple[int, int]]]:
    """Returns lists of (flow number, block) of at most ``limit`` bytes each, for all blocks to request.

    Args:
        flows: elements that one rank serves, one flow for each wanted piece.
        lacked: for each flow, the numbers of the blocks to request.
    """
    chosen = ((number, block) for number, blocks in enumerate(lacked) for block in blocks.tolist())
    return in_batches(chosen, lambda each: flows[each[0]].block_bytes(each[1]), limit)
