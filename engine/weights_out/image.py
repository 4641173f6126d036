"""Image of elements of a version: host memory that does not change until the next version fills it."""

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
from engine.outer.messages import StoreRefusedError
from engine.web.json_text import dump_json
from engine.weights_out.plan import Flow, elements_of, find_flows
from engine.weights_out.version import EARLY, GONE, NOT_YET, PublishedTensor, WantedPiece

_LAYOUTS = 64


@dataclass(slots=True)
class _Layout:
    flows: list[Flow]
    hashes: dict[int, tuple[int, Hashes]] = field(default_factory=dict)
    """Hashes of each flow, with the version that has written its tensor last."""


@dataclass(frozen=True, slots=True)
class BlockReply:
    """Reply with the bytes of blocks (256 KiB of a tensor), which are copied one by one while the reply is sent."""

    size: int
    """Bytes of all of them."""
    parts: Iterable[bytes]


class WeightImage:
    """Host memory from which a rank or receiver serves its elements of one version; threads may share it.

    Args:
        owned: piece (served elements) of each tensor, by key.
        tensors: descriptions of all tensors, by key.
        filled: True to allocate memory, which ``put`` fills; False to serve the tensors given to ``share``, without a
            copy.
    """

    def __init__(self, owned: Mapping[str, Piece], tensors: Mapping[str, PublishedTensor], filled: bool = True) -> None:
        self.owned, self._tensors, self._later = owned, tensors, NOT_YET if filled else EARLY
        self._values = {
            key: torch.empty(piece.elements if filled else 0, dtype=torch_dtype(tensors[key].kind))
            for key, piece in owned.items()
        }
        self._written: dict[str, int] = {}
        """Version that has written each tensor last."""
        self._number, self._ready = -1, set[str]()
        self._layouts: OrderedDict[str, _Layout] = OrderedDict()
        self._lock = Lock()

    @property
    def size(self) -> int:
        """Bytes of the tensors that the image serves."""
        return sum(values.nbytes for values in self._values.values())

    def begin(self, number: int) -> None:
        """Ends serving of the current version, and begins version ``number`` without any tensor."""
        with self._lock:
            self._number, self._ready = number, set()

    @contextmanager
    def filling(self, number: int) -> Iterator[None]:
        """Opens a context that begins version ``number``. No tensor is served inside; after the context, all are.

        Inside, call ``put`` for each tensor that differs from the last version.
        """
        self.begin(number)
        yield
        with self._lock:
            self._ready = set(self.owned)

    def put(self, key: str, values: Tensor, held: Piece) -> None:
        """Overwrites the image's elements of tensor ``key`` with their new values.

        Args:
            values: new elements of the tensor, on any device.
            held: positions of ``values`` in the full tensor; they must include all elements that the image serves.
        """
        copy_shared(values, held, self._values[key], self.owned[key])
        with self._lock:
            self._written[key] = self._number

    def share(self, key: str, values: Tensor) -> None:
        """Serves ``values`` as the elements of tensor ``key``, without a copy.

        The caller does not change ``values`` until the next version begins.
        """
        with self._lock:
            self._values[key] = values.reshape(-1)
            self._written[key] = self._number
            self._ready.add(key)

    def hashes(self, number: int, wanted: Sequence[WantedPiece], hashed: bool = True) -> tuple[str, list[Hashes]]:
        """Returns (digest of ``wanted``, hashes of blocks of 256 KiB); :meth:`read` needs the digest.

        There is one array of hashes for each wanted piece that has elements in this image.

        Args:
            number: number of the version.
            wanted: pieces (elements of a tensor) that a receiver wants.
            hashed: False to return the digest only.

        Raises:
            StoreRefusedError: another version is served, or the model has no such piece.
        """
        name = digest(dump_json(wanted))
        with self._lock:
            layout = self._layouts.get(name)
        if layout is None:
            self._check_wanted(wanted)
            layout = _Layout(find_flows(self.owned, wanted, self._tensors))
        with self._lock:
            self._layouts[name] = layout
            self._layouts.move_to_end(name)
            while len(self._layouts) > _LAYOUTS:
                self._layouts.popitem(last=False)
        return name, [self._hashes_of(number, layout, index) for index in range(len(layout.flows) if hashed else 0)]

    def _check_wanted(self, wanted: Sequence[WantedPiece]) -> None:
        for each in wanted:
            known = self._tensors.get(each.name)
            shapes = {piece.part.shape for piece in (each.piece, *each.inside, *each.outside)}
            if known is None or not known.served or shapes != {known.shape}:
                raise StoreRefusedError(
                    f"a receiver asks for {each.name[:80]!r} of shape {list(each.piece.part.shape)[:8]}, which the "
                    "trainer does not publish; read the geometry again."
                )

    def _hashes_of(self, number: int, layout: _Layout, index: int) -> Hashes:
        flow = layout.flows[index]
        written, found = layout.hashes.get(index, (-1, None))
        with self._lock:
            self._check(number, flow.key)
            values, stamp = elements_of(self._values[flow.key]), self._written[flow.key]
        if found is not None and written == stamp:
            return found
        made = []
        for block in range(flow.blocks):
            with self._lock:
                self._check(number, flow.key)
                made.append(flow.hash(values, block, "source"))
        hashes = np.array(made, dtype=np.uint64)
        layout.hashes[index] = stamp, hashes
        return hashes

    def read(self, number: int, layout: str, blocks: Sequence[tuple[int, int, int]], limit: int) -> "BlockReply":
        """Returns the bytes of the requested blocks (256 KiB of a tensor), in the order of ``blocks``.

        Args:
            layout: digest of the wanted pieces, which ``hashes`` has returned.
            blocks: ranges of blocks, each (flow, first block, block after the last). A flow is an index into the arrays
                that ``hashes`` returns.
            number: number of the version.
            limit: maximum bytes of all blocks.

        Raises:
            StoreRefusedError: the blocks do not exist or exceed ``limit``, or another version is served. The reply
                raises it, too, if another version begins before all blocks are copied.
        """
        with self._lock:
            known = self._layouts.get(layout)
            self._check(number)
        if known is None:
            raise StoreRefusedError("a receiver asks for blocks before their hashes; ask for the hashes again.", GONE)
        chosen = self._chosen(known, blocks, limit)
        with self._lock:
            for key in {flow.key for flow, _ in chosen}:
                self._check(number, key)
        size = sum(flow.block_bytes(block) for flow, block in chosen)
        return BlockReply(size, (self._copy(number, flow, block) for flow, block in chosen))

    def _copy(self, number: int, flow: Flow, block: int) -> bytes:
        with self._lock:
            self._check(number, flow.key)
            return elements_of(self._values[flow.key])[flow.places(block, "source")].tobytes()

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

    def _check(self, number: int, key: str | None = None) -> None:
        """Refuses another version than the one that is served, or a tensor that is not there yet; call it with the
        lock.
        """
        if number < self._number:
            raise StoreRefusedError(
                f"version {number} is over, and version {self._number} has replaced it; read the newest version.", GONE
            )
        if number > self._number or (key is not None and key not in self._ready):
            raise StoreRefusedError(f"version {number} is not complete on this rank; ask again.", self._later)
