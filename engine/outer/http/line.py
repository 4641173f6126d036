"""Interface of stores for one rank of a site, over HTTP."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from secrets import token_hex
from threading import Lock
from typing import TYPE_CHECKING

from torch import Tensor

from engine.errors import GridError
from engine.outer.fragments import Fragment
from engine.outer.http import requests as wire
from engine.outer.http.bodies import BodyRange
from engine.outer.http.connection import BodyTraffic, StoreConnection
from engine.outer.messages import (
    JoinReply,
    JoinRequest,
    Offer,
    PushMeta,
    PushShare,
    PushState,
    RankLayout,
    StoreRefusedError,
    StoreStatus,
)

if TYPE_CHECKING:
    import httpx

JOIN_SECONDS = 60.0
"""Seconds for which a site waits for its stores at its start."""
LIFE_BITS = 20
"""Bits for the life on each of several stores."""
_STATUS_SECONDS, _LEAVE_SECONDS = 10.0, 2.0
_BRIEF_SECONDS = 0.3
"""Patience of requests that a site repeats by itself: enough for a connection that the store has closed while idle."""
_GONE, _OTHER_SEEDS = (404, 410), 409


class HttpLink:
    """HTTP connection of one rank of a site to all stores; implements ``StoreLink``.

    ``push``, ``pull`` and ``seed`` wait until the store answers. Without an answer, ``offer`` returns None and
    ``renew`` raises an error.

    Each store numbers the runs of a site (lives) itself. With several stores, ``life`` packs their numbers into one
    integer.

    Args:
        urls: addresses of the stores, in the order of their numbers.
        fragments: all fragments, as ``divide`` returns them; ``fragment`` arguments are positions in this sequence.
        token: secret that sites and stores share; empty: requests carry none.
        transport: function from the number of a store to an httpx transport that replaces the network, for tests.
        join_seconds: seconds that ``join`` and ``register`` wait for each store.
    """

    def __init__(
        self,
        urls: Sequence[str],
        fragments: Sequence[Fragment] = (),
        token: str = "",
        transport: "Callable[[int], httpx.BaseTransport] | None" = None,
        join_seconds: float = JOIN_SECONDS,
    ) -> None:
        self._store_of = [one.store for one in fragments]
        self._stores = [StoreConnection(url, token, transport(i) if transport else None) for i, url in enumerate(urls)]
        self._join_seconds = join_seconds
        self._asked = 0
        self._lock = Lock()

    @property
    def outage(self) -> str:
        """Sentence about the first store that does not answer; empty if all answer."""
        return next((store.outage for store in self._stores if store.outage), "")

    @property
    def traffic(self) -> BodyTraffic:
        """Bytes of weights and pushes that this rank has sent and received, summed over the stores."""
        each = [store.traffic for store in self._stores]
        return BodyTraffic(sum(t.sent for t in each), sum(t.received for t in each), sum(t.repeated for t in each))

    def close(self) -> None:
        """Closes all connections; calls that wait in other threads end with a GridError."""
        for store in self._stores:
            store.close()

    def limit(self, seconds: float) -> None:
        """Sets a deadline ``seconds`` from now, after which calls that wait for a store raise a GridError."""
        for store in self._stores:
            store.limit(seconds)

    def join(self, request: JoinRequest) -> JoinReply:
        """Starts a new run (life) of the site on every store, and returns one combined reply.

        In the reply, ``life`` packs the run's numbers on all stores into one integer, and ``rows`` and ``clock`` are
        minima over the stores. ``seeds`` is True if any store needs this site's initial weights.

        Raises:
            GridError: a store does not answer within ``join_seconds``.
            StoreRefusedError: a store refuses the site.
        """
        call = wire.JoinCall(request, token_hex(8))
        found = [store.ask(wire.JOIN, call, JoinReply, self._join_seconds) for store in self._stores]
        return JoinReply(
            life=joined_lives([one.life for one in found]),
            rows=min(one.rows for one in found),
            clock=min(one.clock for one in found),
            seeds=any(one.seeds for one in found),
        )

    def register(self, life: int, rank: int, layout: RankLayout) -> None:
        """Registers on every store ``layout``, the elements that this rank pushes and pulls in the run ``life``."""
        for number, store in enumerate(self._stores):
            call = wire.RegisterCall(self._life(life, number), rank, layout)
            store.ask(wire.REGISTER, call, wire.Done, self._join_seconds)

    def seed(self, life: int, rank: int, fragment: int, body: Tensor) -> None:
        """Sends this rank's initial weights of ``fragment`` to the fragment's store.

        If the store waits for the initial weights of another run, raises StoreRefusedError if it is the only store, and
        returns normally if there are several.

        ``life``: number of the site's run. ``body``: bytes of fp32 values, uint8 [bytes].
        """
        number = self._number(fragment)
        own = self._life(life, number)

        def head(part: BodyRange) -> wire.SeedHead:
            return wire.SeedHead(own, rank, fragment, part)

        try:
            self._stores[number].send(wire.SEED, head, partial(wire.ArrivedCall, own, rank, fragment, None), body)
        except StoreRefusedError as error:
            if len(self._stores) == 1 or error.status != _OTHER_SEEDS:
                raise

    def push(self, meta: PushMeta, rank: int, share: PushShare, body: Tensor) -> PushState:
        """Sends ``body``, this rank's encoded values of a push, to the store of the fragment in ``meta.key``.

        Returns the state of the push once the store has stored ``body``, on disk if the store has a folder.

        Args:
            meta: description of the push, equal on all ranks of the site.
            share: loss and loss weight of this rank.
        """
        number = self._number(meta.key.fragment)
        key = replace(meta.key, life=self._life(meta.key.life, number))
        own = replace(meta, key=key)

        def head(part: BodyRange) -> wire.PushHead:
            return wire.PushHead(own, rank, share, part)

        where = partial(wire.ArrivedCall, key.life, rank, key.fragment, key.seq)
        return self._stores[number].send(wire.PUSH, head, where, body)

    def offer(self, life: int, fragment: int) -> Offer | None:
        """Returns the newest version of ``fragment`` that its store offers to the site's run ``life``.

        Returns None if there is no offer, or if the store does not answer.
        """
        with self._lock:
            self._asked += 1
            asked = self._asked
        number = self._number(fragment)
        call = wire.OfferCall(self._life(life, number), fragment, asked)
        try:
            return self._stores[number].ask(wire.OFFER, call, wire.OfferReply, _BRIEF_SECONDS).offer
        except GridError:
            return None  # ``outage`` has the sentence; the site asks again

    def pull(self, life: int, rank: int, fragment: int, version: int) -> Tensor:
        """Downloads this rank's elements of ``fragment``, fp32 [elements].

        Args:
            life: number of the site's run.
            version: version of the fragment, from the last offer.
        """
        number = self._number(fragment)
        where = {"life": self._life(life, number), "rank": rank, "fragment": fragment, "version": version}
        return self._stores[number].receive(where)

    def renew(self, life: int) -> None:
        """Renews the site's lease on every store. When a lease ends, the store counts the site as lost.

        Raises:
            GridError: after all stores were asked, if one does not answer, or has left a request of another thread
                unanswered so far.
        """
        silent: GridError | None = None
        for number, store in enumerate(self._stores):
            try:
                store.ask(wire.RENEW, wire.LifeCall(self._life(life, number)), wire.Done, _BRIEF_SECONDS)
            except GridError as outage:
                silent = outage
            else:  # other requests may repeat without success
                silent = GridError(store.outage) if store.outage else silent
        if silent is not None:
            raise silent

    def leave(self, life: int) -> None:
        """Ends the site's run ``life`` on every store that answers within 2 seconds; merges no longer wait for the
        site.
        """
        for number, store in enumerate(self._stores):
            try:
                store.ask(wire.LEAVE, wire.LifeCall(self._life(life, number)), wire.Done, _LEAVE_SECONDS)
            except GridError:
                continue
            except StoreRefusedError as error:
                if error.status not in _GONE:
                    raise

    def status(self) -> StoreStatus:
        """Returns versions, live sites and traffic of the first store."""
        return self._stores[0].get(wire.STATUS, StoreStatus, _STATUS_SECONDS)

    def _number(self, fragment: int) -> int:
        """Returns the number of the store that has a fragment."""
        return self._store_of[fragment] if len(self._stores) > 1 else 0

    def _life(self, life: int, number: int) -> int:
        return life_on(number, life, len(self._stores))


def joined_lives(lives: Sequence[int]) -> int:
    """Packs ``lives``, the numbers of one site's run on all stores, into one integer: 20 bits per store, store 0
    lowest.

    Raises:
        StoreRefusedError: a number is 2^20 or more, and there are several stores.
    """
    if len(lives) > 1 and max(lives) >= 1 << LIFE_BITS:
        raise StoreRefusedError(
            f"a store has started {max(lives):,} lives, and several stores may start {1 << LIFE_BITS:,}; start the "
            "stores with new folders."
        )
    return sum(life << LIFE_BITS * number for number, life in enumerate(lives))


def life_on(number: int, life: int, stores: int) -> int:
    """Returns the number by which store ``number`` knows a site's run.

    ``life``: the run's numbers on all stores, packed into one integer. ``stores``: number of stores.
    """
    return life if stores == 1 else (life >> LIFE_BITS * number) & ((1 << LIFE_BITS) - 1)
