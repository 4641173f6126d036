"""Transfer of the blocks of one owner to a receiver, whose source can fail at any byte."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Lock
from time import monotonic, sleep
from typing import TypeVar

import numpy as np
from torch import Tensor

from engine.checkpoint.format.checked_blocks import Hashes
from engine.errors import GridError
from engine.outer.http.connection import StoreConnection
from engine.outer.messages import StoreRefusedError
from engine.weights_out import version as wire
from engine.weights_out.plan import Elements, Flow, batches, digest_of, elements_of
from engine.weights_out.version import (
    EARLY,
    BlocksCall,
    HashesCall,
    HashesReply,
    OwnerRank,
    WantedPiece,
    WeightVersion,
)

_DAMAGED_AT_MOST = 4
_SHARE = 0.25
"""Part of the time left that a source gets before another one is asked."""
_LEAST_SECONDS = 0.2
"""Time left in which no other source is asked any more."""
_POLL_SECONDS, _PEER_SECONDS = 0.02, 2.0
"""Time between two questions for blocks that a receiver has not received yet, and time for its answer."""
Block = tuple[int, int]
"""Numbers of a flow and of its block."""
T = TypeVar("T")


@dataclass(slots=True)
class Shadows:
    """Destination of a transfer: a host copy of each tensor that has changed blocks. Live tensors do not change."""

    wanted: Sequence[WantedPiece]
    values: Callable[[str], Tensor | None]
    """Function that returns the own values of a tensor on the host; None: there are none."""
    make: Callable[[str], Tensor]
    """Function that returns memory for a tensor, which begins with the own values."""
    ready: Callable[[str], None] = lambda key: None
    """Function that is called once all blocks of a tensor have arrived."""
    made: dict[str, Tensor] = field(default_factory=dict)
    """Memory of the tensors of which a block was read."""
    _left: dict[str, int] = field(default_factory=dict)
    """Flows of each tensor that have not arrived."""
    _lock: Lock = field(default_factory=Lock)

    def expect(self, keys: Iterable[str]) -> None:
        """Adds one flow to wait for, for each of ``keys``; a flow is a tensor's elements from one serving rank.

        Call it before the first block is read.

        Args:
            keys: tensor key of each flow; a tensor with several flows has its key there several times.
        """
        for key in keys:
            self._left[key] = self._left.get(key, 0) + 1

    def arrived(self, key: str) -> None:
        """Notes that one flow (the elements from one serving rank) of tensor ``key`` has arrived.

        After the tensor's last flow, calls the callback ``ready`` with ``key``.
        """
        with self._lock:
            self._left[key] -= 1
            last = not self._left[key]
        if last:
            self.ready(key)

    def current(self, key: str) -> Elements | None:
        """Returns the receiver's present values of tensor ``key``, flat, with bits as integers; None if it has none."""
        with self._lock:
            found = self.values(key)
        return elements_of(found) if found is not None else None

    def shadow(self, key: str) -> Elements:
        """Returns the host memory that receives tensor ``key``, viewed as a flat array of integers of its element size.

        The first call for a tensor allocates it, with a copy of the receiver's present values.
        """
        with self._lock:
            if key not in self.made:
                self.made[key] = self.make(key)
            return elements_of(self.made[key])


@dataclass(slots=True)
class WeightTraffic:
    """Counts of the bytes of blocks that a receiver has requested and read, over all versions."""

    lacked: int = 0
    """Bytes of the blocks that it lacked; a complete version has received all of them."""
    received: int = 0
    """Bytes of blocks with the right hash."""
    from_peers: int = 0
    """Bytes among them that other receivers have sent."""
    repeated: int = 0
    """Bytes that arrived damaged, or before a connection broke within a block."""
    _lock: Lock = field(default_factory=Lock)

    def add(self, lacked: int = 0, received: int = 0, repeated: int = 0, from_peers: int = 0) -> None:
        """Adds each argument to the count of bytes of the same name; any thread may call it.

        ``lacked``: bytes of the blocks requested because they differ. ``received``: bytes that arrived undamaged.
        ``from_peers``: received bytes that other receivers sent. ``repeated``: bytes that arrived damaged or
        incomplete.
        """
        with self._lock:
            self.lacked += lacked
            self.received += received
            self.from_peers += from_peers
            self.repeated += repeated


@dataclass(slots=True)
class Transfer:
    """Transfer of all elements that one owner (rank of the training run) serves to a receiver."""

    version: WeightVersion
    number: int
    """Number of the owner in the geometry."""
    owner: OwnerRank
    divided: Sequence[tuple[WantedPiece, OwnerRank | None]]
    """Wanted pieces, each with the receiver that has them; None: the owner alone."""
    flows: Sequence[Flow]
    into: Shadows
    traffic: WeightTraffic
    until: float
    limit: int
    """Bytes of a request; the requests to all owners together are a bucket."""
    urls: list[str]
    """Addresses of ranks that serve the elements; the first one is asked."""
    connect: Callable[[str, float, int], StoreConnection]
    """Function that returns the connection to an address until a time, for the thread of an owner."""
    _layouts: dict[str, str] = field(default_factory=dict)
    """Name of the wanted pieces, by address that knows them."""
    _hashes: list[Hashes] = field(default_factory=list)
    _left: list[int] = field(default_factory=list)
    """Blocks of each flow that have not arrived."""
    _damaged: Counter[Block] = field(default_factory=Counter)
    _failed: set[str] = field(default_factory=set)
    """Receivers from which nothing more is read."""

    def run(self, known: Sequence[Hashes] | None) -> list[Hashes]:
        """Reads into host memory all blocks (256 KiB of a tensor) that differ from the receiver's values.

        Returns the hashes of all blocks for each flow. A flow is the part of one wanted piece that the owner serves.

        Args:
            known: hashes of the receiver's values for each flow; None: they are computed.
        """
        self._ask(self._read_hashes)
        lacked = []
        for index, (flow, theirs) in enumerate(zip(self.flows, self._hashes, strict=True)):
            own = known[index] if known is not None else self._own(flow)
            lacked.append(np.flatnonzero(own != theirs) if own is not None else np.arange(flow.blocks))
        self._left = [len(blocks) for blocks in lacked]
        for flow, blocks in zip(self.flows, lacked, strict=True):
            self.traffic.add(lacked=sum(map(flow.block_bytes, blocks.tolist())))
            if not len(blocks):
                self.into.arrived(flow.key)
        sources = [self.divided[flow.wanted][1] for flow in self.flows]
        peers = {peer.url: peer for peer in sources if peer is not None}
        for peer in (None, *peers.values()):  # later receivers wait for what only the owner has
            chosen = [each if own == peer else each[:0] for each, own in zip(lacked, sources, strict=True)]
            for batch in batches(self.flows, chosen, self.limit):
                left = list(batch)
                if peer is not None:
                    self._read_from_peer(peer, sources, left)
                while left:
                    self._ask(partial(self._read_from_owner, left))
        return self._hashes

    def _own(self, flow: Flow) -> Hashes | None:
        values = self.into.current(flow.key)
        return flow.hashes(values, "target") if values is not None else None

    def _ask(self, request: Callable[[StoreConnection], None]) -> None:
        """Asks the first address, and the next one if it does not answer in its share of the time."""
        while True:
            left = self.until - monotonic()
            alone = len(self.urls) == 1 or left < _LEAST_SECONDS
            connection = self.connect(self.urls[0], self.until - (0.0 if alone else left * (1 - _SHARE)), self.number)
            try:
                return request(connection)
            except GridError:
                if alone:
                    raise
                self.urls.append(self.urls.pop(0))

    def _read_hashes(self, connection: StoreConnection) -> None:
        wanted = tuple(piece for piece, _ in self.divided)
        call = HashesCall(self.version.run, self.version.number, self.number, wanted, not self._hashes)
        reply = connection.ask(wire.HASHES, call, HashesReply)
        self._layouts[connection.url] = reply.layout
        if not self._hashes:
            self._hashes = [np.frombuffer(bytes.fromhex(text), dtype="<u8") for text in reply.hashes]
            if [len(each) for each in self._hashes] != [flow.blocks for flow in self.flows]:
                raise StoreRefusedError(f"{connection.url} has other pieces than its geometry; read it again.")

    def _read_from_owner(self, left: list[Block], connection: StoreConnection) -> None:
        """Reads blocks and removes each with the right hash from ``left``."""
        if connection.url not in self._layouts:
            self._read_hashes(connection)
        for each in self._read(connection, self.number, left, {}):
            self._damaged[each] += 1
            if self._damaged[each] >= _DAMAGED_AT_MOST:
                raise StoreRefusedError(
                    f"blocks of {self.flows[each[0]].key!r} from {connection.url} have had another hash than their "
                    f"version's {_DAMAGED_AT_MOST} times; check the network."
                )

    def _read_from_peer(self, peer: OwnerRank, sources: Sequence[OwnerRank | None], left: list[Block]) -> None:
        """Reads blocks from an earlier receiver as it receives them; leaves those to the owner that do not come."""
        numbers = {flow: number for number, flow in enumerate(i for i, own in enumerate(sources) if own == peer)}
        until = monotonic() + (self.until - monotonic()) * _SHARE
        while left and peer.url not in self._failed:
            try:
                connection = self.connect(peer.url, min(until, monotonic() + _PEER_SECONDS), self.number)
                if peer.url not in self._layouts:
                    wanted = tuple(
                        replace(piece, inside=(self.owner.pieces[piece.name],))
                        for piece, source in self.divided
                        if source == peer and piece.name in self.owner.pieces
                    )
                    call = HashesCall(self.version.run, self.version.number, 0, wanted, False)
                    self._layouts[peer.url] = connection.ask(wire.HASHES, call, HashesReply).layout
                if self._read(connection, 0, left, numbers):
                    self._failed.add(peer.url)
            except StoreRefusedError as refusal:
                if refusal.status != EARLY or monotonic() >= until:
                    self._failed.add(peer.url)
                sleep(_POLL_SECONDS)
            except GridError:
                self._failed.add(peer.url)

    def _read(
        self, connection: StoreConnection, owner: int, left: list[Block], numbers: Mapping[int, int]
    ) -> list[Block]:
        """Reads blocks, of which a broken connection gives the first ones. Removes those with the right hash from
        ``left``; returns those with another.

        ``numbers``: numbers of flows at this address, where they differ.
        """
        asked = tuple((numbers.get(flow, flow), block, block + 1) for flow, block in left)
        call = BlocksCall(self.version.number, owner, self._layouts[connection.url], asked)
        data, at, damaged = memoryview(connection.read(wire.BLOCKS, call)), 0, list[Block]()
        for number, block in tuple(left):
            flow = self.flows[number]
            part = data[at : at + flow.block_bytes(block)]
            at += len(part)
            if len(part) < flow.block_bytes(block):
                self.traffic.add(repeated=len(part))
                break
            if digest_of(part) != self._hashes[number][block]:
                self.traffic.add(repeated=len(part))
                damaged.append((number, block))
                continue
            shadow = self.into.shadow(flow.key)
            shadow[flow.places(block, "target")] = np.frombuffer(part, dtype=shadow.dtype)
            self.traffic.add(received=len(part), from_peers=len(part) if numbers else 0)
            left.remove((number, block))
            self._left[number] -= 1
            if not self._left[number]:
                self.into.arrived(flow.key)
        return damaged
