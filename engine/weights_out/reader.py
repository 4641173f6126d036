"""Connections of a receiver to all owner ranks: it reads the blocks that it lacks, each once, from its one owner."""

import secrets
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from threading import Lock
from time import monotonic

import httpx
import numpy as np
from torch import Tensor

from engine.checkpoint.format.checked_blocks import BLOCK, Hashes
from engine.errors import EngineError, GridError, first_line
from engine.outer.http.bodies import RANGE
from engine.outer.http.connection import StoreConnection
from engine.outer.http.requests import Done
from engine.outer.messages import NamedPiece, StoreRefusedError
from engine.weights_out import version as wire
from engine.weights_out.plan import Elements, Flow, batches, digest_of, elements_of, find_flows
from engine.weights_out.version import GONE, BlocksCall, Geometry, HashesCall, HashesReply, LeaseCall, WeightVersion

_DAMAGED_AT_MOST = 4
_OWNERS_AT_ONCE = 8
Known = dict[int, list[Hashes]]
"""Hashes of a receiver's own values: of each owner, those of its flows."""


@dataclass(slots=True)
class Shadows:
    """Destination of a transfer: memory for the tensors of which blocks are read."""

    wanted: Sequence[NamedPiece]
    values: Callable[[int], Tensor | None]
    """Function that returns the own values of a wanted piece on the host; None: there are none."""
    make: Callable[[int], Tensor]
    """Function that returns memory for a wanted piece, which begins with the own values."""
    made: dict[int, Tensor] = field(default_factory=dict)
    """Memory of the pieces of which a block was read."""
    _lock: Lock = field(default_factory=Lock)

    def current(self, index: int) -> Elements | None:
        """Returns the own values of a wanted piece as integers [elements]."""
        with self._lock:
            found = self.values(index)
        return elements_of(found) if found is not None else None

    def shadow(self, index: int) -> Elements:
        """Returns the memory of a wanted piece as integers [elements]."""
        with self._lock:
            if index not in self.made:
                self.made[index] = self.make(index)
            return elements_of(self.made[index])


class SenderConnection(StoreConnection):
    """Connection to one owner rank."""

    noun = "trainer"
    remedy = "read the newest version once it trains again, or check address and network."

    def limit(self, seconds: float) -> None:
        """Lets no request wait for longer than ``seconds`` from now, also not for a peer that hangs."""
        super().limit(seconds)
        self._client.timeout = httpx.Timeout(min(60.0, max(0.1, seconds)))


@dataclass(slots=True)
class WeightTraffic:
    """Bytes of blocks that a receiver has read."""

    lacked: int = 0
    """Bytes of the blocks that it lacked; a complete version has received all of them."""
    received: int = 0
    """Bytes of blocks with the right hash."""
    repeated: int = 0
    """Bytes that arrived damaged, or before a connection broke within a block."""
    _lock: Lock = field(default_factory=Lock)

    def add(self, lacked: int = 0, received: int = 0, repeated: int = 0) -> None:
        """Adds bytes, from any thread."""
        with self._lock:
            self.lacked += lacked
            self.received += received
            self.repeated += repeated


class WeightReader:
    """Connections of one receiver.

    Args:
        url: address of rank 0 of the training.
        token: secret of trainer and receivers; empty: none.
        deadline: seconds for one version; the trainer retains it no longer than its own deadline.
        connect: replaces the network: (address, token) -> connection.
    """

    def __init__(
        self,
        url: str,
        token: str = "",
        deadline: float = 30.0,
        connect: Callable[[str, str], StoreConnection] = SenderConnection,
    ) -> None:
        self.url, self.deadline, self.traffic = url, deadline, WeightTraffic()
        self._token, self._connect, self._name = token, connect, secrets.token_hex(8)
        self._connections: dict[str, StoreConnection] = {}
        self._geometry: Geometry | None = None

    def close(self) -> None:
        """Closes all connections; a later request opens new ones."""
        connections, self._connections = self._connections, {}
        for connection in connections.values():
            connection.close()

    def _open(self, url: str, until: float | None = None) -> StoreConnection:
        if url not in self._connections:
            self._connections[url] = self._connect(url, self._token)
        self._connections[url].limit(self.deadline if until is None else until - monotonic())
        return self._connections[url]

    def geometry(self, run: str | None = None, until: float | None = None) -> Geometry:
        """Returns the geometry; ``run``: of this run, read again if the known one is of another.

        Raises:
            EngineError: the trainer does not answer until then (``monotonic``), or within the deadline, or refuses.
        """
        if self._geometry is None or (run is not None and self._geometry.run != run):
            with as_engine_errors():
                self._geometry = self._open(self.url, until).get(wire.GEOMETRY, Geometry)
        if run is not None and self._geometry.run != run:
            raise EngineError(f"the trainer {self.url} has started again; read its newest version.")
        return self._geometry

    def newest(self, until: float | None = None) -> WeightVersion | None:
        """Returns the newest version; None while there is none. Errors as in ``geometry``."""
        with as_engine_errors():
            return self._open(self.url, until).get(wire.NEWEST, wire.NewestReply).version

    @contextmanager
    def leased(self, known: WeightVersion | None, until: float) -> Iterator[WeightVersion | None]:
        """Yields the newest version, which the trainer retains until the block ends; None: there is none after
        ``known``.

        Raises:
            EngineError: the trainer does not answer until then (``monotonic``), or refuses.
        """
        while (version := self.newest(until)) is not None and version != known:
            call = LeaseCall(version.run, version.number, self._name, max(0.0, until - monotonic()))
            with as_engine_errors():
                try:
                    self._open(self.url, until).ask(wire.OPEN, call, Done)
                except StoreRefusedError as refusal:
                    if refusal.status != GONE:
                        raise
                    continue  # a newer one has come
            try:
                yield version
            finally:
                with suppress(GridError, StoreRefusedError):  # the lease ends by itself
                    self._open(self.url, until).ask(wire.CLOSE, call, Done, 0.0)
            return
        yield None

    def fetch(self, version: WeightVersion, into: Shadows, known: Known | None, until: float) -> Known:
        """Reads the blocks that ``into`` lacks into its shadow; returns the hashes of all blocks.

        Args:
            known: hashes of the own values; None: they are computed from the values.
            until: time (``monotonic``) after which the version counts as lost.

        Raises:
            EngineError: an owner has ended, does not answer until then, or sends other bytes than their hashes.
        """
        geometry, found = self.geometry(version.run, until), Known()
        flows = [find_flows(owner.pieces, into.wanted, geometry.tensors) for owner in geometry.owners]
        at_once = min(_OWNERS_AT_ONCE, max(1, sum(map(bool, flows))))
        pool, jobs, late = ThreadPoolExecutor(at_once, "weights-in"), dict[int, Future[list[Hashes]]](), False
        try:
            for number, owner in enumerate(geometry.owners):
                if flows[number]:
                    connection, limit = self._open(owner.url, until), max(BLOCK, RANGE // at_once)
                    job = _Transfer(version, connection, flows[number], into, self.traffic, until, limit)
                    jobs[number] = pool.submit(job.run, known[number] if known is not None else None)
            late = bool(wait(jobs.values(), max(0.0, until - monotonic()), FIRST_EXCEPTION).not_done)
            with as_engine_errors():
                for number, each in jobs.items():
                    if each.done():
                        found[number] = each.result()
            if late:
                raise EngineError(
                    f"version {version.number} has not arrived within {self.deadline:g} s, and is dropped; give a "
                    "longer deadline, or check the trainer."
                )
        finally:
            if late:
                self.close()  # ends requests that hang; their threads write to a shadow that is dropped
            pool.shutdown(wait=not late, cancel_futures=True)
        return found


@dataclass(slots=True)
class _Transfer:
    """Transfer of the blocks of one owner."""

    version: WeightVersion
    connection: StoreConnection
    flows: list[Flow]
    into: Shadows
    traffic: WeightTraffic
    until: float
    limit: int
    """Bytes of a request; those of all owners together are a bucket."""

    def run(self, known: Sequence[Hashes] | None) -> list[Hashes]:
        """Reads all lacking blocks; returns the hashes of all blocks of each flow."""
        call = HashesCall(self.version.run, self.version.number, tuple(self.into.wanted))
        reply = self.connection.ask(wire.HASHES, call, HashesReply)
        hashes = [np.frombuffer(bytes.fromhex(text), dtype="<u8") for text in reply.hashes]
        if [len(each) for each in hashes] != [flow.blocks for flow in self.flows]:
            raise StoreRefusedError(f"{self.connection.url} has other pieces than its geometry; read it again.")
        lacked = []
        for index, (flow, theirs) in enumerate(zip(self.flows, hashes, strict=True)):
            own = known[index] if known is not None else self._own(flow)
            lacked.append(np.flatnonzero(own != theirs) if own is not None else np.arange(flow.blocks))
        for batch in batches(self.flows, lacked, self.limit):
            self.traffic.add(lacked=sum(self.flows[flow].block_bytes(block) for flow, block in batch))
            self._read(reply.layout, hashes, batch)
        return hashes

    def _own(self, flow: Flow) -> Hashes | None:
        values = self.into.current(flow.wanted)
        return flow.hashes(values, "target") if values is not None else None

    def _read(self, layout: str, hashes: Sequence[Hashes], batch: list[tuple[int, int]]) -> None:
        """Reads one batch; continues where a connection has broken, and repeats blocks with a wrong hash."""
        left, damaged = batch, list[tuple[int, int]]()
        while left:
            call = BlocksCall(self.version.number, layout, tuple((flow, block, block + 1) for flow, block in left))
            self.connection.limit(self.until - monotonic())
            data, at, wrong = memoryview(self.connection.read(wire.BLOCKS, call)), 0, list[tuple[int, int]]()
            for position, (number, block) in enumerate(left):
                flow = self.flows[number]
                part = data[at : at + flow.block_bytes(block)]
                if len(part) < flow.block_bytes(block):
                    self.traffic.add(repeated=len(part))
                    wrong += left[position:]
                    break
                at += len(part)
                if digest_of(part) != hashes[number][block]:
                    damaged.append((number, block))
                    self.traffic.add(repeated=len(part))
                    wrong.append((number, block))
                    continue
                shadow = self.into.shadow(flow.wanted)
                shadow[flow.places(block, "target")] = np.frombuffer(part, dtype=shadow.dtype)
                self.traffic.add(received=len(part))
            if any(damaged.count(each) >= _DAMAGED_AT_MOST for each in wrong):
                raise StoreRefusedError(
                    f"blocks of {self.flows[wrong[0][0]].key!r} from {self.connection.url} have had another hash than "
                    f"their version's {_DAMAGED_AT_MOST} times; check the network."
                )
            left = wrong


@contextmanager
def as_engine_errors() -> Iterator[None]:
    """Raises refusals of the trainer as errors of the engine."""
    try:
        yield
    except StoreRefusedError as refusal:
        raise EngineError(f"the trainer refuses: {first_line(refusal)}") from refusal
