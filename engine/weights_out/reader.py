"""Connections of a receiver: it reads each block that it lacks once, from its owner or from an earlier receiver.

hashes    of all blocks, from the owner rank, or from a rank with a copy of its elements
blocks    from the receivers that began to read the version earlier, as far as they have the elements
          from the owner rank: the others, and those that a receiver does not give in time
"""

import secrets
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from time import monotonic

from engine.checkpoint.format.checked_blocks import BLOCK, Hashes
from engine.errors import EngineError, GridError, first_line
from engine.outer.http.bodies import RANGE
from engine.outer.http.connection import BoundedConnection, StoreConnection
from engine.outer.http.requests import Done
from engine.outer.messages import StoreRefusedError
from engine.weights_out import version as wire
from engine.weights_out.plan import by_source, find_flows
from engine.weights_out.transfer import Shadows, Transfer, WeightTraffic
from engine.weights_out.version import GONE, Geometry, LeaseCall, LeaseReply, OwnerRank, WeightVersion

_OWNERS_AT_ONCE = 8
Known = dict[int, list[Hashes]]
"""Hashes of a receiver's own values: of each owner, those of its flows."""


class SenderConnection(BoundedConnection):
    """HTTP connection to a rank of a training run, or to a receiver, that serves published weights."""

    noun = "trainer"
    remedy = "read the newest version once it trains again, or check address and network."


class WeightReader:
    """Connections of one receiver to a training run that publishes its weights.

    Args:
        url: address of rank 0 of the training run.
        token: secret that the training and its receivers share; empty: none.
        deadline: seconds for reading one version; the training may drop the version earlier.
        connect: callback from (address, token) to a connection, for tests.
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
        self._connections: dict[tuple[str, int], StoreConnection] = {}
        self._geometry: Geometry | None = None
        self.peers: tuple[OwnerRank, ...] = ()
        """Receivers that began to read the leased version earlier."""

    def close(self) -> None:
        """Closes all connections; a later request opens new ones."""
        connections, self._connections = self._connections, {}
        for connection in connections.values():
            connection.close()

    def _open(self, url: str, until: float | None = None, owner: int = -1) -> StoreConnection:
        """Returns the connection to an address for the thread that reads from ``owner``."""
        if (url, owner) not in self._connections:
            self._connections[url, owner] = self._connect(url, self._token)
        self._connections[url, owner].limit(self.deadline if until is None else until - monotonic())
        return self._connections[url, owner]

    def geometry(self, run: str | None = None, until: float | None = None) -> Geometry:
        """Returns the geometry: descriptions of all published tensors, and the ranks that serve them.

        Args:
            run: name of the training run; None: any run.
            until: time (``monotonic``) at which waiting ends; None: ``deadline`` seconds from now.

        Raises:
            EngineError: the training does not answer in time, refuses, or is another run.
        """
        if self._geometry is None or (run is not None and self._geometry.run != run):
            with as_engine_errors():
                self._geometry = self._open(self.url, until).get(wire.GEOMETRY, Geometry)
        if run is not None and self._geometry.run != run:
            raise EngineError(
                f"the trainer {self.url} was restarted and publishes run {self._geometry.run}, but the version to read "
                f"is of run {run}; call update() of the WeightReceiver again for the newest version."
            )
        return self._geometry

    def newest(self, until: float | None = None) -> WeightVersion | None:
        """Returns the newest published version; None if there is none yet.

        Args:
            until: time (``monotonic``) at which waiting ends; None: ``deadline`` seconds from now.

        Raises:
            EngineError: the training does not answer in time, or refuses.
        """
        with as_engine_errors():
            return self._open(self.url, until).get(wire.NEWEST, wire.NewestReply).version

    @contextmanager
    def leased(
        self, known: WeightVersion | None, until: float, peer: OwnerRank | None = None
    ) -> Iterator[WeightVersion | None]:
        """Opens a context with the newest version; the training does not replace it before the context or lease ends.

        The context's value is None if no version is newer than ``known``.

        Args:
            known: version that the receiver has; None: none.
            until: time (``monotonic``) at which the lease ends.
            peer: address of this receiver, and the elements that it serves to later receivers; None: it serves none.

        Raises:
            EngineError: the training does not answer in time, or refuses.
        """
        while (version := self.newest(until)) is not None and version != known:
            left, whole = max(0.0, until - monotonic()), False
            call = LeaseCall(version.run, version.number, self._name, left, peer)
            with as_engine_errors():
                try:
                    self.peers = self._open(self.url, until).ask(wire.OPEN, call, LeaseReply).peers
                except StoreRefusedError as refusal:
                    if refusal.status != GONE:
                        raise
                    continue  # a newer one has come
            try:
                yield version
                whole = True
            finally:
                self.peers = ()
                end = LeaseCall(version.run, version.number, self._name, 0.0, None, whole)
                with suppress(GridError, StoreRefusedError):  # the lease ends by itself
                    self._open(self.url, until).ask(wire.CLOSE, end, Done, 0.0)
            return
        yield None

    def fetch(self, version: WeightVersion, into: Shadows, known: Known | None, until: float) -> Known:
        """Reads into ``into`` all blocks (256 KiB of a tensor) of ``version`` that differ from the receiver's values.

        Returns the hashes of all blocks by owner (serving rank), one array for each piece.

        Args:
            into: destination, with the wanted pieces and the receiver's present values.
            known: result of the call that read the receiver's present values, if this reader had the same ``peers``
                (receivers that also serve elements) then; None: hashes are computed.
            until: time (``monotonic``) after which reading fails.

        Raises:
            EngineError: an owner has ended or does not answer in time, or blocks arrive damaged again and again.
        """
        geometry, found = self.geometry(version.run, until), Known()
        divided = by_source(into.wanted, self.peers)
        wanted = tuple(piece for piece, _ in divided)
        flows = [find_flows(owner.pieces, wanted, geometry.tensors) for owner in geometry.owners]
        into.expect(flow.key for each in flows for flow in each)
        at_once = min(_OWNERS_AT_ONCE, max(1, sum(map(bool, flows))))
        pool, jobs, late = ThreadPoolExecutor(at_once, "weights-in"), dict[int, Future[list[Hashes]]](), False
        loads, limit = Counter[str](), max(BLOCK, RANGE // at_once)
        try:
            for number, owner in enumerate(geometry.owners):
                if flows[number]:
                    urls = self._by_load(owner, loads, sum(flow.size for flow in flows[number]))
                    job = Transfer(
                        version, number, owner, divided, flows[number], into, self.traffic, until, limit, urls,
                        self._open,
                    )  # fmt: skip
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

    def _by_load(self, owner: OwnerRank, loads: Counter[str], size: int) -> list[str]:
        """Returns the addresses of an owner's elements, the least loaded first, which gets ``size`` bytes more."""
        urls = [owner.url, *owner.copies]
        start = int(self._name, 16) % len(urls)  # receivers begin with different copies
        urls = sorted(urls[start:] + urls[:start], key=lambda url: loads[url])
        loads[urls[0]] += size
        return urls


@contextmanager
def as_engine_errors() -> Iterator[None]:
    """Opens a context that turns StoreRefusedError, a refusal by the training, into EngineError."""
    try:
        yield
    except StoreRefusedError as refusal:
        raise EngineError(f"the trainer refuses: {first_line(refusal)}") from refusal
