"""Routes over a store: requests are checked, and one thread does all work on the store in the order of their arrival.

Requests have no influence on names of files, and nothing on the wire is evaluated or unpickled. A refused request
leaves the store unchanged.
"""

import asyncio
import hmac
import logging
import re
from collections.abc import AsyncIterator, Callable, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from time import monotonic
from typing import Any, TypeVar, cast

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from torch import Tensor

from engine.checkpoint.format.host_image import as_bytes
from engine.errors import first_line
from engine.outer.http import requests as wire
from engine.outer.http.bodies import (
    HASH_HEADER,
    HEAD_BYTES,
    RANGE,
    TOTAL_HEADER,
    Arrived,
    DamagedBodyError,
    Downloads,
    FrameReader,
    Uploads,
    digest,
    tensor_from,
)
from engine.outer.http.values import from_json
from engine.outer.messages import JoinReply, Offer, PushState, StoreRefusedError
from engine.outer.store.store import DISK_FULL, Store
from engine.web.json_text import dump_json, parse_json

MESSAGE_BYTES = 64 << 20
"""Maximum bytes of a request without a range."""
_TICK_SECONDS = 0.25
_IN_TROUBLE = 500
_SAME_VERSION = "use the same version of trine on sites and stores."
logger = logging.getLogger("trine")
T = TypeVar("T")


class StoreServer:
    """ASGI application that serves a store over HTTP.

    Args:
        store: the store; the application closes it at shutdown.
        token: secret that every request must carry, except for ``/v1/healthz``; empty: requests need none.
    """

    def __init__(self, store: Store, token: str = "") -> None:
        self.store = store
        self.failure: BaseException | None = None
        """Error that has ended the ticks."""
        self.on_failure: Callable[[], None] = lambda: None
        self._token = wire.authorization(token).encode() if token else b""
        self._thread = ThreadPoolExecutor(1, "store")
        self._uploads, self._downloads = Uploads(), Downloads()
        self._attempts: dict[int, tuple[str, JoinReply]] = {}
        self._offers: dict[tuple[int, int], tuple[int, Offer | None]] = {}
        """Number of the latest request for an offer, and its offer, by life and fragment."""
        posts = {
            wire.JOIN: self._join, wire.REGISTER: self._register, wire.LEAVE: self._leave, wire.RENEW: self._renew,
            wire.SEED: self._receive_seed, wire.PUSH: self._receive_push, wire.ARRIVED: self._arrived,
            wire.OFFER: self._offer,
        }  # fmt: skip
        gets = {wire.PULL: self._pull, wire.STATUS: self._status, wire.HEALTH: self._health}
        refused = cast(Any, self._refused)
        self._app = Starlette(
            routes=[Route(path, handler, methods=["POST"]) for path, handler in posts.items()]
            + [Route(path, handler, methods=["GET"]) for path, handler in gets.items()],
            lifespan=lambda _: self.ticking(),
            exception_handlers={StoreRefusedError: refused, HTTPException: refused, ClientDisconnect: refused},
        )

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        """Answers one connection of an ASGI server."""
        if scope["type"] == "http" and self._token and scope["path"] != wire.HEALTH:
            given = b"".join(value for name, value in scope["headers"] if name == b"authorization")
            if not hmac.compare_digest(given, self._token):
                reply = _reply({"error": "the request has a wrong token or none; give sites and stores the same "
                                "TRINE_OUTER_TOKEN, or the same outer.token_file."}, 401)  # fmt: skip
                return await reply(scope, receive, send)
        await self._app(scope, receive, send)

    @asynccontextmanager
    async def ticking(self) -> AsyncIterator[None]:
        """Runs ``Store.tick`` four times a second until the ``with`` block ends; then closes the store after its
        current work.
        """
        ticks = asyncio.create_task(self._tick_forever())
        try:
            yield
        finally:
            ticks.cancel()
            await asyncio.wait([ticks])
            await self._run(self.store.close)
            await asyncio.to_thread(self._thread.shutdown)

    async def _tick_forever(self) -> None:
        while True:
            # renewals that have come during a long merge are work before the tick that would end their leases
            await asyncio.get_running_loop().run_in_executor(self._thread, _end_of_queue)
            try:
                await self._run(self._tick)
            except StoreRefusedError:
                pass  # the store cannot write, and has logged it
            except Exception as error:
                self.failure = error
                self.on_failure()
                raise
            await asyncio.sleep(_TICK_SECONDS)

    def _tick(self) -> None:
        self.store.tick()
        for bodies in (self._uploads, self._downloads):
            bodies.expire(monotonic())

    async def _run(self, work: Callable[..., T], *given: object) -> T:
        """Runs work on the store in its thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, partial(work, *given))

    # ---------------------------------------------------------------- requests without a body

    async def _join(self, request: Request) -> Response:
        call = _message(wire.JoinCall, await _text(request))
        return _reply(await self._run(self._start_life, call))

    def _start_life(self, call: wire.JoinCall) -> JoinReply:
        attempt, joined = self._attempts.get(call.request.site, ("", None))
        if joined is None or attempt != call.attempt:
            joined = self.store.join(call.request)
            self._attempts[call.request.site] = call.attempt, joined
            self._forget_others(set(self.store.status().members.values()))
        return joined

    def _forget_others(self, lives: set[int]) -> None:
        """Drops everything about lives that have ended."""
        self._uploads.forget_others(lives)
        self._downloads.forget_others(lives)
        self._offers = {key: latest for key, latest in self._offers.items() if key[0] in lives}

    async def _register(self, request: Request) -> Response:
        call = _message(wire.RegisterCall, await _text(request))
        await self._run(self.store.register, call.life, call.rank, call.layout)
        return _reply(wire.Done())

    async def _leave(self, request: Request) -> Response:
        await self._run(self.store.leave, _message(wire.LifeCall, await _text(request)).life)
        return _reply(wire.Done())

    async def _renew(self, request: Request) -> Response:
        await self._run(self.store.renew, _message(wire.LifeCall, await _text(request)).life)
        return _reply(wire.Done())

    async def _status(self, request: Request) -> Response:
        return _reply(await self._run(self.store.status))

    async def _health(self, request: Request) -> Response:
        return _reply({"status": "full"}, DISK_FULL) if self.store.problem else _reply({"status": "ok"})

    async def _refused(self, request: Request, error: Exception) -> Response:
        if isinstance(error, StoreRefusedError):
            return _reply({"error": str(error), "again": isinstance(error, DamagedBodyError)}, error.status)
        if isinstance(error, HTTPException):
            sentence = f"{request.method} {request.url.path} is no request to a store; {_SAME_VERSION}"
            return _reply({"error": sentence}, error.status_code)
        return _reply({"error": "the connection has ended within a request; send it again."}, 400)

    # ---------------------------------------------------------------- offers

    async def _offer(self, request: Request) -> Response:
        call = _message(wire.OfferCall, await _text(request))
        return _reply(wire.OfferReply(await self._run(self._offer_once, call)))

    def _offer_once(self, call: wire.OfferCall) -> Offer | None:
        """Returns the offer of a request; a repeated or a late one gets the offer of the latest.

        Such a request must not move the store to a newer version, which would end the one that the ranks pull.
        """
        key = call.life, call.fragment
        latest = self._offers.get(key)
        if latest is not None and call.asked <= latest[0]:
            return latest[1]
        offer = self.store.offer(*key)
        self._offers[key] = call.asked, offer
        return offer

    # ---------------------------------------------------------------- bodies

    async def _receive_push(self, request: Request) -> Response:
        head, data = await self._framed(request, wire.PushHead)

        def store(body: Tensor) -> PushState:
            return self.store.push(head.meta, head.rank, head.share, body)

        return _reply(await self._run(self._add_range, head, data, store))

    async def _receive_seed(self, request: Request) -> Response:
        head, data = await self._framed(request, wire.SeedHead)

        def store(body: Tensor) -> PushState:
            self.store.seed(head.life, head.rank, head.fragment, body)
            return PushState.COMPLETE

        return _reply(await self._run(self._add_range, head, data, store))

    async def _framed(self, request: Request, kind: type[T]) -> tuple[T, memoryview]:
        """Returns JSON and range of a request; refuses it before its range is read if the store does not expect it."""
        _check_length(request, HEAD_BYTES + RANGE + 4)
        reader, head = FrameReader(), cast(T | None, None)
        async for data in request.stream():
            reader.add(data)
            if head is None and reader.has_head:
                head = _message(kind, reader.head)
                await self._run(self._admit, head)
        if head is None:
            raise StoreRefusedError("the request ends before its JSON; send it again.")
        return head, reader.data

    def _admit(self, head: wire.PushHead | wire.SeedHead) -> None:
        """Refuses a range of a life that has ended, and of a body with another size than its pieces have."""
        key, part = head.key, head.part
        size = self.store.body_bytes(key.life, key.rank, key.fragment, key.seq == wire.SEED_NUMBER)
        if part.total != size:
            raise StoreRefusedError(
                f"the body of rank {key.rank} for fragment {key.fragment} has {part.total:,} bytes, and its pieces "
                f"take {size:,}; send the pieces that the rank has registered.",
                413 if part.total > size else 422,
            )

    def _add_range(
        self, head: wire.PushHead | wire.SeedHead, data: memoryview, store: Callable[[Tensor], PushState]
    ) -> Arrived:
        key, whole = head.key, head.part.whole
        if (known := self._uploads.arrived(key, whole)).state is not None:
            return known
        body = self._uploads.add(key, head.part, data, monotonic())
        if body is None:
            return self._uploads.arrived(key, whole)
        try:
            result = Arrived(len(body), store(tensor_from(body)))
        except StoreRefusedError as error:
            if error.status < _IN_TROUBLE:
                self._uploads.drop(key)
            raise
        self._uploads.finish(key, whole, result)
        return result

    async def _arrived(self, request: Request) -> Response:
        call = _message(wire.ArrivedCall, await _text(request))

        def arrived() -> Arrived:
            self.store.renew(call.life)
            return self._uploads.arrived(call.key, call.whole)

        return _reply(await self._run(arrived))

    async def _pull(self, request: Request) -> Response:
        life, rank, fragment, version = (_number(request, name) for name in ("life", "rank", "fragment", "version"))
        first = re.fullmatch(r"bytes=(\d{1,18})-", request.headers.get("range", "bytes=0-"), re.ASCII)
        if first is None:
            raise StoreRefusedError(f"the header Range is no start of a range; {_SAME_VERSION}")
        data, whole = await self._run(self._body, (life, rank, fragment), version)
        start = int(first[1])
        if start > len(data):
            raise StoreRefusedError(f"a range begins at {start:,} of {len(data):,} bytes; {_SAME_VERSION}", 416)
        part = bytes(data[start : start + RANGE])
        if start + len(part) == len(data):
            await self._run(self._downloads.drop, (life, rank, fragment))
        headers = {HASH_HEADER: whole, TOTAL_HEADER: str(len(data))}
        return Response(part, 200, headers, "application/octet-stream")

    def _body(self, place: tuple[int, int, int], version: int) -> tuple[memoryview, str]:
        """Returns the bytes and the hash of a version for a life, rank and fragment."""
        found = self._downloads.find(place, version, monotonic())
        if found is not None:
            self.store.renew(place[0])
            return found
        data = as_bytes(self.store.pull(*place, version))
        body = data, digest(data)
        if len(data) > RANGE:
            self._downloads.keep(place, version, body, monotonic())
        return body


def _end_of_queue() -> None:
    """Runs once all work that was waiting has been done."""


def _reply(value: object, status: int = 200) -> Response:
    return Response(dump_json(value), status, media_type="application/json")


def _message(kind: type[T], text: bytes) -> T:
    try:
        return from_json(kind, parse_json(text), "request")
    except (ValueError, TypeError) as error:
        raise StoreRefusedError(f"the request is no {kind.__name__}: {first_line(error)}; {_SAME_VERSION}") from error


def _number(request: Request, name: str) -> int:
    text = request.query_params.get(name, "")
    if not re.fullmatch(r"\d{1,18}", text, re.ASCII):
        raise StoreRefusedError(f"the request has no number {name}; {_SAME_VERSION}")
    return int(text)


def _check_length(request: Request, most: int) -> None:
    length = request.headers.get("content-length", "0")
    if not length.isdecimal() or int(length[:20]) > most:
        raise StoreRefusedError(f"the request has {length[:20]} bytes, and may have {most:,}; {_SAME_VERSION}", 413)


async def _text(request: Request) -> bytes:
    """Returns the body of a request without a range."""
    _check_length(request, MESSAGE_BYTES)
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > MESSAGE_BYTES:
            raise StoreRefusedError(f"the request has more than {MESSAGE_BYTES:,} bytes; {_SAME_VERSION}", 413)
    return bytes(data)
