"""Connection of one rank to one store: requests that repeat until it answers, and bodies in ranges.

Requests repeat as ``engine.web.retries`` has it. Repeating is harmless: joins have a number of their attempt, pushes
their key, offers a number.
"""

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from threading import Event
from time import monotonic
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from engine.checkpoint.format.host_image import as_bytes
from engine.errors import GridError, first_line
from engine.outer.http.bodies import (
    HASH_HEADER,
    RANGE,
    TOTAL_HEADER,
    Arrived,
    BodyRange,
    DamagedBodyError,
    digest,
    frame,
    tensor_from,
)
from engine.outer.http.requests import ARRIVED, PULL, ArrivedCall, authorization
from engine.outer.http.values import from_json
from engine.outer.messages import PushState, StoreRefusedError
from engine.web.json_text import dump_json, parse_json
from engine.web.retries import FOREVER, TroubleError, field_of, httpx, refuse_trouble, repeat_request, sentence_of

_CONNECT_SECONDS, _READ_SECONDS = 5.0, 60.0
_OK, _REDIRECTED, _REFUSED = 200, 300, 400
_DAMAGED_AT_MOST = 4
"""Times that a body is sent or read while it arrives damaged."""
T = TypeVar("T")


@dataclass(slots=True)
class BodyTraffic:
    """Bytes of weights and pushes that a connection has sent and received, and separately the bytes repeated after
    interruptions.
    """

    sent: int = 0
    received: int = 0
    repeated: int = 0
    """Bytes of ranges that were sent or received again after an interruption."""


class StoreConnection:
    """HTTP connection to one store. It repeats each request until the store answers.

    Args:
        url: address of the store.
        token: secret that sites and stores share; empty: requests carry none.
        transport: httpx transport that replaces the network, for tests.
    """

    noun = "store"
    remedy = "start it with `trine outer`, or check address and network."

    def __init__(self, url: str, token: str = "", transport: httpx.BaseTransport | None = None) -> None:
        self.url = url
        self.traffic = BodyTraffic()
        self.outage = ""
        """Sentence about an interruption that lasts; empty if the last request was answered."""
        headers = {"authorization": authorization(token)} if token else {}
        timeout = httpx.Timeout(_READ_SECONDS, connect=_CONNECT_SECONDS)
        self._client = httpx.Client(base_url=url, headers=headers, timeout=timeout, transport=transport)
        self._closed, self._until = Event(), FOREVER
        self._silent_since: float | None = None
        self._in_trouble: dict[object, str] = {}
        """Outage of each request that is repeated now."""
        weakref.finalize(self, self._client.close)

    def close(self) -> None:
        """Closes the connection; requests that wait in other threads raise an error."""
        self._closed.set()
        self._client.close()

    def limit(self, seconds: float) -> None:
        """Sets a deadline ``seconds`` from now, after which requests are not repeated."""
        self._until = monotonic() + seconds

    def ask(self, path: str, call: object, kind: type[T], patience: float = FOREVER) -> T:
        """Posts ``call`` as JSON to ``path`` and returns the reply as an instance of ``kind``.

        Repeats the request for at most ``patience`` seconds while the store does not answer.

        Raises:
            StoreRefusedError: the store refuses the message.
            GridError: the store does not answer in time, or the connection is closed.
        """
        content = dump_json(call)
        return self.repeat(lambda: _message(kind, self._reply("POST", path, content=content)), patience)

    def get(self, path: str, kind: type[T], patience: float = FOREVER) -> T:
        """Sends a GET request to ``path`` and returns the reply as an instance of ``kind``.

        Repeats it for at most ``patience`` seconds.

        Raises:
            StoreRefusedError: the store refuses the request.
            GridError: the store does not answer in time, or the connection is closed.
        """
        return self.repeat(lambda: _message(kind, self._reply("GET", path)), patience)

    def repeat(self, request: Callable[[], T], patience: float = FOREVER) -> T:
        """Calls ``request`` until it succeeds, and returns its result.

        Repeats it after connection errors and after server errors such as HTTP status 503.

        Raises:
            StoreRefusedError: the store refuses the request.
            GridError: the store has not answered within ``patience`` seconds, or the connection is closed.
        """
        began, own = monotonic(), object()

        def attempt() -> T:
            if self._closed.is_set():
                raise GridError(
                    f"this process closed its connection to the {self.noun} {self.url} before a request was answered; "
                    "run the script again, and call close() only after the last request."
                )
            try:
                result = request()
            except RuntimeError as error:  # httpx raises it for a client that is closed in another thread
                if self._closed.is_set():
                    raise TroubleError(str(error)) from error
                raise
            except StoreRefusedError:
                self._answered(own)
                raise
            self._answered(own)
            return result

        def describe(error: Exception) -> GridError:
            self._silent_since = self._silent_since or began
            self.outage = self._in_trouble[own] = self._sentence(error, monotonic() - self._silent_since)
            return GridError(self.outage)

        try:
            return repeat_request(attempt, lambda: min(began + patience, self._until), describe, self._closed.wait)
        finally:
            self._in_trouble.pop(own, None)

    def _answered(self, request: object) -> None:
        """Ends the outage, unless another request is still repeated."""
        self._in_trouble.pop(request, None)
        self.outage = next(iter(list(self._in_trouble.values())), "")
        self._silent_since = self._silent_since if self.outage else None

    def _sentence(self, error: Exception, seconds: float) -> str:
        if isinstance(error, TroubleError) and error.described:
            return f"the {self.noun} {self.url} cannot serve for {seconds:,.0f} s: {error}"
        why = str(error) if isinstance(error, TroubleError) else f"{type(error).__name__}: {first_line(error)}"
        return f"the {self.noun} {self.url} does not answer for {seconds:,.0f} s ({why}); {self.remedy}"

    def _reply(self, method: str, path: str, **request: Any) -> dict[str, Any]:
        response = self._client.request(method, path, **request)
        self._check_status(response)
        return _json(response)

    def _check_status(self, response: httpx.Response) -> None:
        status = response.status_code
        if status < _REDIRECTED:
            return
        refuse_trouble(response)
        if status < _REFUSED:
            target = response.headers.get("location", "another address")
            raise StoreRefusedError(f"the {self.noun} {self.url} redirects to {target}; give that address.", status)
        if field_of(response, "again") is True:
            raise DamagedBodyError(sentence_of(response))
        raise StoreRefusedError(
            sentence_of(response) or f"the {self.noun} {self.url} replies with status {status}.", status
        )

    # ---------------------------------------------------------------- bodies

    def send(
        self, path: str, head: Callable[[BodyRange], object], where: Callable[[str], ArrivedCall], body: Tensor
    ) -> PushState:
        """Sends ``body`` to ``path`` range by range, and returns the state of the push.

        A request contains JSON and then the bytes of one range. After a failed request, asks the store for the number
        of arrived bytes, and continues there.

        Args:
            head: function that takes the position of a range, and returns the JSON of its request.
            where: function that takes the hash of ``body``, and returns a request for the number of arrived bytes.

        Raises:
            StoreRefusedError: the store refuses the body, or the body has arrived damaged 4 times.
        """
        data = as_bytes(body)
        whole, arrived, is_known, sent = digest(data), Arrived(0, None), True, 0

        def request() -> Arrived:
            nonlocal is_known, arrived, sent
            if not is_known:
                arrived = _message(Arrived, self._reply("POST", ARRIVED, content=dump_json(where(whole))))
            is_known = arrived.state is not None
            if is_known:
                return arrived
            part = data[arrived.arrived : arrived.arrived + RANGE]
            position = BodyRange(arrived.arrived, len(data), digest(part), whole)
            sent += len(part)
            reply = _message(Arrived, self._reply("POST", path, content=frame(head(position), part)))
            is_known = True
            return reply

        damaged = 0
        while arrived.state is None:
            try:
                arrived = self.repeat(request)
            except DamagedBodyError:
                damaged += 1
                if damaged == _DAMAGED_AT_MOST:
                    raise
        self.traffic.sent += len(data)
        self.traffic.repeated += max(0, sent - len(data))
        return arrived.state

    def receive(self, where: Mapping[str, int]) -> Tensor:
        """Downloads merged weights range by range, and returns them, fp32 [elements]. Resumes interrupted downloads.

        Args:
            where: query parameters of the request: "life" (number of the site's run), "rank", "fragment" and
                "version".

        Raises:
            StoreRefusedError: the store refuses the request, or the weights have arrived damaged 4 times.
        """
        for _ in range(_DAMAGED_AT_MOST):
            data, first = bytearray(), cast(_Source | None, None)
            while first is None or len(data) < first.total:
                source, part = self.repeat(partial(self._range, where, len(data)))
                first = first or source
                data += part
                if source != first:  # the store has made the body anew
                    break
            if len(data) == first.total and digest(data) == first.whole:
                self.traffic.received += len(data)
                return tensor_from(data).view(torch.float32)
            self.traffic.repeated += len(data)
        raise StoreRefusedError(
            f"a body from {self.url} was damaged on its way {_DAMAGED_AT_MOST} times; check the network.", 422
        )

    def _range(self, where: Mapping[str, int], start: int) -> tuple["_Source", bytearray]:
        """Reads a range, or its beginning if the connection breaks within it."""
        ranged = {"range": f"bytes={start}-"}
        response, part = self._streamed("GET", PULL, params=dict(where), headers=ranged)
        return _source(response), part

    def read(self, path: str, call: object) -> bytearray:
        """Posts ``call`` as JSON to ``path`` and returns the bytes of the reply; only the first bytes if the network
        fails within the reply.

        Raises:
            StoreRefusedError: the store refuses the request.
            GridError: no reply begins in time, or ``close`` was called.
        """
        content = dump_json(call)
        return self.repeat(lambda: self._streamed("POST", path, content=content)[1])

    def _streamed(self, method: str, path: str, **request: Any) -> tuple[httpx.Response, bytearray]:
        part = bytearray()
        with self._client.stream(method, path, **request) as response:
            if response.status_code != _OK:
                response.read()
                self._check_status(response)
            try:
                for data in response.iter_raw():
                    part += data
            except httpx.TransportError:
                if not part:
                    raise
        return response, part


class _Source(NamedTuple):
    """Bytes and hash of a body that is read."""

    total: int
    whole: str


def _source(response: httpx.Response) -> _Source:
    headers = response.headers
    try:
        return _Source(int(headers[TOTAL_HEADER]), headers[HASH_HEADER])
    except (KeyError, ValueError) as error:
        raise TroubleError("the reply is not one of a store") from error


def _json(response: httpx.Response) -> dict[str, Any]:
    try:
        return parse_json(response.content)
    except ValueError as error:
        raise TroubleError("the reply is not one of a store") from error


def _message(kind: type[T], reply: Mapping[str, Any]) -> T:
    try:
        return from_json(kind, reply, "reply", least=-1)
    except ValueError as error:
        raise TroubleError(f"the reply is no {kind.__name__}: {error}") from error


LONGEST_SECONDS = 60.0
"""Seconds of one attempt at a peer that may hang."""


class BoundedConnection(StoreConnection):
    """Store connection with a timeout for each attempt, for a peer that may never reply."""

    def limit(self, seconds: float) -> None:
        """Sets the timeout of each attempt, and a deadline ``seconds`` from now, after which requests are not repeated.

        The timeout is ``seconds``, clamped to the range from 0.1 to 60.
        """
        super().limit(seconds)
        self._client.timeout = httpx.Timeout(min(LONGEST_SECONDS, max(0.1, seconds)))
