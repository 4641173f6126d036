"""Image of one rank's elements of a version: host memory that does not change until the next version fills it."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock

import numpy as np
import torch
from torch import Tensor

from engine.checkpoint.contents.local_tensors import copy_shared
from engine.checkpoint.format.checked_blocks import Hashes
from engine.checkpoint.format.host_image import torch_dtype
from engine.checkpoint.format.pieces import Piece
from engine.outer.http.bodies import digest
from engine.outer.messages import NamedPiece, StoreRefusedError
from engine.web.json_text import dump_json
from engine.weights_out.plan import Flow, elements_of, find_flows
from engine.weights_out.version import GONE, NOT_YET, PublishedTensor

_LAYOUTS = 64


@dataclass(slots=True)
class _Layout:
    flows: list[Flow]
    hashes: dict[int, tuple[int, Hashes]] = field(default_factory=dict)
    """Hashes of each flow, with the version that has written its tensor last."""


@dataclass(frozen=True, slots=True)
class BlockReply:
    """Blocks, each copied from the image when it is sent."""

    size: int
    """Bytes of all of them."""
    parts: Iterable[bytes]


class WeightImage:
    """Elements of one rank, for all threads that serve them.

    Args:
        owned: piece of each tensor that this rank serves.
        tensors: descriptions of all tensors.
    """

    def __init__(self, owned: Mapping[str, Piece], tensors: Mapping[str, PublishedTensor]) -> None:
        self._owned, self._tensors = owned, tensors
        self._values = {
            key: torch.empty(piece.elements, dtype=torch_dtype(tensors[key].kind)) for key, piece in owned.items()
        }
        self._written: dict[str, int] = {}
        """Version that has written each tensor last."""
        self._number, self._ready = -1, False
        self._layouts: OrderedDict[str, _Layout] = OrderedDict()
        self._lock = Lock()

    @property
    def size(self) -> int:
        """Bytes of the image."""
        return sum(values.nbytes for values in self._values.values())

    @contextmanager
    def filling(self, number: int) -> Iterator[None]:
        """Ends the version that is served; serves ``number`` once the block has put its tensors."""
        with self._lock:
            self._number, self._ready = number, False
        yield
        with self._lock:
            self._ready = True

    def put(self, key: str, values: Tensor, held: Piece) -> None:
        """Copies this rank's elements of a tensor from ``values`` [elements of ``held`` ], of any device."""
        with self._lock:
            copy_shared(values, held, self._values[key], self._owned[key])
            self._written[key] = self._number

    def lacks(self, key: str) -> bool:
        """Returns True if no version has written a tensor yet."""
        return key not in self._written

    def hashes(self, number: int, wanted: Sequence[NamedPiece]) -> tuple[str, list[Hashes]]:
        """Returns a name for the wanted pieces, and the hashes of each flow; computes those of rewritten tensors only.

        Raises:
            StoreRefusedError: another version is served, or a piece is not of this model.
        """
        name = digest(dump_json(wanted))
        with self._lock:
            layout = self._layouts.get(name)
        if layout is None:
            self._check_wanted(wanted)
            layout = _Layout(find_flows(self._owned, wanted, self._tensors))
        with self._lock:
            self._layouts[name] = layout
            self._layouts.move_to_end(name)
            while len(self._layouts) > _LAYOUTS:
                self._layouts.popitem(last=False)
        return name, [self._hashes_of(number, layout, index) for index in range(len(layout.flows))]

    def _check_wanted(self, wanted: Sequence[NamedPiece]) -> None:
        for each in wanted:
            known = self._tensors.get(each.name)
            if known is None or not known.served or known.shape != each.piece.part.shape:
                raise StoreRefusedError(
                    f"a receiver asks for {each.name[:80]!r} of shape {list(each.piece.part.shape)[:8]}, which the "
                    "trainer does not publish; read the geometry again."
                )

    def _hashes_of(self, number: int, layout: _Layout, index: int) -> Hashes:
        flow = layout.flows[index]
        values = elements_of(self._values[flow.key])
        written, found = layout.hashes.get(index, (-1, None))
        with self._lock:
            self._check(number)
            stamp = self._written[flow.key]
        if found is not None and written == stamp:
            return found
        made = []
        for block in range(flow.blocks):
            with self._lock:
                self._check(number)
                made.append(flow.hash(values, block, "source"))
        hashes = np.array(made, dtype=np.uint64)
        layout.hashes[index] = stamp, hashes
        return hashes

    def read(self, number: int, layout: str, blocks: Sequence[tuple[int, int, int]], limit: int) -> "BlockReply":
        """Returns blocks, at most ``limit`` bytes of them.

        Raises:
            StoreRefusedError: another version is served, or the blocks do not exist; also while they are read.
        """
        with self._lock:
            known = self._layouts.get(layout)
            self._check(number)
        if known is None:
            raise StoreRefusedError("a receiver asks for blocks before their hashes; ask for the hashes again.", GONE)
        chosen = self._chosen(known, blocks, limit)
        size = sum(flow.block_bytes(block) for flow, block in chosen)
        return BlockReply(size, (self._copy(number, flow, block) for flow, block in chosen))

    def _copy(self, number: int, flow: Flow, block: int) -> bytes:
        values = elements_of(self._values[flow.key])
        with self._lock:
            self._check(number)
            return values[flow.places(block, "source")].tobytes()

    def _chosen(self, layout: _Layout, blocks: Sequence[tuple[int, int, int]], limit: int) -> list[tuple[Flow, int]]:
        found, size = list[tuple[Flow, int]](), 0
        for number, first, stop in blocks:
            flow = layout.flows[number] if number < len(layout.flows) else None
            if flow is None or not first < stop <= flow.blocks:
                raise StoreRefusedError("a receiver asks for blocks that do not exist; use the same version of trine.")
            size += sum(flow.block_bytes(block) for block in range(first, stop))
            if size > limit:
                raise StoreRefusedError(f"a receiver asks for more than {limit:,} bytes at once; ask for fewer.", 413)
            found += [(flow, block) for block in range(first, stop)]
        return found

    def _check(self, number: int) -> None:
        """Refuses another version than the one that is served; call it with the lock."""
        if number < self._number:
            raise StoreRefusedError(
                f"version {number} is over, and version {self._number} has replaced it; read the newest version.", GONE
            )
        if number > self._number or not self._ready:
            raise StoreRefusedError(f"version {number} is not complete on this rank; ask again.", NOT_YET)
