"""Requests of one rank to the stores: in threads while it trains, or awaited by all ranks of the site together.

The ranks of a site take a version over after the same step. Rank 0 asks the store for offers; one all-reduce over the
world, label "outer", tells the others which version has come and counts the ranks that have pulled it:

    rank 0     push ... offer: version 7       pull 7 ... ready        take over 7
    rank 1     push ...                        pull 7 ... ready        take over 7
    all-reduce            |  version 7  |             |  2 ready  |
"""

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from threading import Event, Thread
from typing import Any, TypeVar

import torch
from torch import Tensor

from engine.errors import EngineError, GridError
from engine.outer.messages import Offer, PushMeta, PushShare, StoreLink, StoreRefusedError
from engine.parallel.comm.comm import Comm

logger = logging.getLogger("trine")
Result = TypeVar("Result")
_PATIENCE = 5.0
"""Seconds that the end of an engine waits for its last pushes."""
_ROUND = 5.0
"""Seconds that rank 0 waits for an offer while the others wait in an all-reduce, well below a collective's timeout."""
_PAUSE = 0.002
"""Seconds between the first two requests for an offer; the pause doubles up to ``_LONGEST``."""
_LONGEST = 0.1
_SOON = 2.0
"""Seconds after which a renewal that no store has answered is repeated."""
_WARNED = 2
"""Failed renewals after which an outage is logged: one may be a restart."""
_FIELDS = 6
"""Numbers of an offer in the all-reduce: version + 1, and the others in the order of :class:`Offer`."""


@dataclass(slots=True)
class PushFlight:
    """Progress of one push (gradients or weight differences of some tensors): upload, the store's offer of a version
    with merged weights, and download of these weights.
    """

    meta: PushMeta
    least: int = 0
    """Lowest version that contains the push, if the push is of an earlier life."""
    pushed: Future[Any] | None = None
    asked: Future[Offer | None] | None = None
    """Request of rank 0 for an offer."""
    offer: Offer | None = None
    """Offer that all ranks know."""
    body: Future[Tensor] | None = None
    """Pulled weights of the offer."""

    @property
    def ready(self) -> bool:
        """True if this rank's download of the merged weights has succeeded or failed."""
        return self.body is not None and self.body.done()

    def ends_with(self, offer: Offer) -> bool:
        """Returns True if the merged weights in ``offer``, from the store, include this push."""
        return offer.merged >= self.meta.key.seq and offer.version >= self.least


class StoreExchange:
    """Requests of one rank of a training site to the stores, which merge the weights of several sites.

    Args:
        link: connection to the stores.
        life: number of this run of the site's processes, from the reply of ``StoreLink.join``.
        lease: seconds without a request after which a store counts the site as lost; rank 0 renews the lease in a
            thread.
    """

    def __init__(self, link: StoreLink, life: int, comm: Comm, device: torch.device, lease: float) -> None:
        self._link, self.life, self._comm, self._device = link, life, comm, device
        self._rank = comm.grid.rank
        self._pushes = set[Future[Any]]()
        self._ended = Event()
        self.waited = 0.0
        """Seconds in which this rank has waited for the store, in total."""
        if self._rank == 0:
            Thread(target=self._renew, args=(lease / 3,), name="trine-outer-lease", daemon=True).start()

    def push(self, flight: PushFlight, share: PushShare, body: Tensor) -> None:
        """Starts a thread that sends this rank's part of the push ``flight``, and returns at once.

        Args:
            flight: the push; its field ``pushed`` becomes the future of the request.
            share: loss and loss weight of this rank.
            body: encoded values of this rank, uint8 [bytes].
        """
        flight.pushed = _begin(self._link.push, flight.meta, self._rank, share, body)
        self._pushes = {push for push in self._pushes if not push.done()} | {flight.pushed}

    def poll(self, flights: Sequence[PushFlight]) -> list[PushFlight]:
        """Returns the pushes in ``flights`` for which all ranks of the site have downloaded the merged weights.

        Starts downloads of newly offered weights. Makes one all-reduce over all ranks of the site, label "outer".

        Raises:
            EngineError: a store has refused a request of any rank; all ranks raise.
            Exception: a request of this rank has failed for another reason; this rank raises the request's own error.
        """
        problem: BaseException | None = None
        rows = torch.zeros(len(flights) + 1, _FIELDS + 1, dtype=torch.float64)
        try:
            for row, flight in zip(rows, flights, strict=False):
                self._advance(flight)
                row[0] = float(flight.ready)
                if self._rank == 0 and flight.offer is None and (offer := self._asked(flight)) is not None:
                    row[1:] = torch.tensor(_numbers(offer), dtype=torch.float64)
        except Exception as error:
            problem = error
        found = self._agreed(rows, problem)
        for row, flight in zip(found, flights, strict=False):
            if flight.offer is None and row[1] > 0:
                flight.offer = _offer(row[1:])
                number, version = flight.meta.key.fragment, flight.offer.version
                flight.body = _begin(self._link.pull, self.life, self._rank, number, version)
        return [flight for row, flight in zip(found, flights, strict=False) if row[0] == self._comm.grid.world_size]

    def wait(self, flight: PushFlight) -> PushFlight:
        """Waits until all ranks of the site have downloaded the weights merged from ``flight``, and returns ``flight``.

        All ranks of the site call it.

        Raises:
            EngineError: a store has refused a request of any rank; all ranks raise.
        """
        began = time.perf_counter()
        while flight not in self.poll([flight]):
            self._work_on(flight)
        self.waited += time.perf_counter() - began
        return flight

    def ask(self, call: Callable[[], Result]) -> Result:
        """Makes this rank's request ``call`` to the store, waits for all ranks' requests, and returns the result of
        ``call``.

        All ranks of the site call it.

        Raises:
            EngineError: the store has refused the request of a rank, or the request of another rank has failed.
            Exception: this rank's request has failed for another reason; this rank raises the request's own error.
        """
        problem: BaseException | None = None
        try:
            result = call()
        except Exception as error:
            problem = error
        self._agreed(torch.zeros(1, _FIELDS + 1, dtype=torch.float64), problem)
        return result

    def close(self, leave: bool) -> None:
        """Stops renewing the lease of this training site. With ``leave``, and if the stores answer, also waits up to 5
        seconds for unsent pushes, and removes the site from the stores.
        """
        self._ended.set()
        leave = leave and not self._link.outage
        if leave:
            wait_for(self._pushes, _PATIENCE)
        if leave and self._rank == 0:
            try:
                self._link.leave(self.life)
            except Exception:  # the store may have ended before its sites
                return

    def _agreed(self, rows: Tensor, problem: BaseException | None) -> list[list[float]]:
        """Returns ``rows`` summed over the world; the last row counts problems of ranks."""
        rows[-1, 0] = float(problem is not None)
        summed = rows.to(self._device)
        self._comm.all_reduce(summed, "world", "outer").wait()
        found: list[list[float]] = summed.tolist()
        if found[-1][0]:
            if isinstance(problem, StoreRefusedError):
                raise EngineError(f"the store has refused a request of this site: {problem}") from problem
            if problem is not None:
                raise problem
            raise EngineError(
                "this rank stops, because a request of another rank to the store has failed; read the error that the "
                "other rank has raised."
            )
        return found

    def _advance(self, flight: PushFlight) -> None:
        """Raises the error of a push or pull that has ended."""
        for future in (flight.pushed, flight.body):
            if future is not None and future.done():
                future.result()

    def _asked(self, flight: PushFlight) -> Offer | None:
        """Returns an offer that contains the push; asks again if there is none yet."""
        if flight.pushed is None or not flight.pushed.done():
            return None
        if flight.asked is None:
            flight.asked = _begin(self._link.offer, self.life, flight.meta.key.fragment)
        if not flight.asked.done():
            return None
        offer, flight.asked = flight.asked.result(), None
        return offer if offer is not None and flight.ends_with(offer) else None

    def _work_on(self, flight: PushFlight) -> None:
        """Waits up to ``_ROUND`` seconds for each of this rank's requests: push, offer and body."""
        try:
            if flight.body is not None:
                flight.body.result(_ROUND)
            elif self._rank == 0 and flight.pushed is not None:
                flight.pushed.result(_ROUND)
                self._await_offer(flight)
        except Exception:  # the next poll raises it on all ranks
            return

    def _await_offer(self, flight: PushFlight) -> None:
        pause, end = _PAUSE, time.monotonic() + _ROUND
        while time.monotonic() < end:
            if flight.asked is None:
                flight.asked = _begin(self._link.offer, self.life, flight.meta.key.fragment)
            offer = flight.asked.result()
            if offer is not None and flight.ends_with(offer):
                return
            flight.asked = None
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)

    def _renew(self, every: float) -> None:
        """Renews the lease; warns once about each outage, at its second renewal, and notes its end."""
        failed = 0
        while not self._ended.wait(min(every, _SOON) if failed else every):
            try:
                self._link.renew(self.life)
            except GridError as outage:
                failed += 1
                if failed == _WARNED and not self._ended.is_set():
                    logger.warning("%s The site takes no merge over until the store answers.", outage)
            except Exception:  # a request of the training raises what lasts
                continue
            else:
                if failed >= _WARNED:
                    logger.info("the store answers again")
                failed = 0


def _begin(call: Callable[..., Result], *given: Any) -> "Future[Result]":
    """Calls a function in a thread that does not outlive the process: a push waits for its store, however long."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(call(*given))
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, name="trine-outer", daemon=True).start()
    return future


def _numbers(offer: Offer) -> list[float]:
    return [offer.version + 1, offer.merged, offer.weight, offer.loss, offer.members, offer.staleness]


def _offer(row: Sequence[float]) -> Offer:
    version, merged, weight, loss, members, staleness = row
    return Offer(int(version) - 1, int(merged), weight, loss, int(members), int(staleness))
