"""ASGI application of the training service: token, limits of bodies, errors as sentences, and the ledger's clock."""

import asyncio
import hmac
from collections.abc import AsyncIterator, MutableMapping
from contextlib import asynccontextmanager
from pathlib import Path
from time import monotonic
from typing import Any, cast

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from engine.serving.bookkeeping.entry import FutureEntry, RequestRefusedError
from engine.serving.bookkeeping.journal import JournalRecord
from engine.serving.bookkeeping.ledger import Ledger
from engine.serving.commands import Result
from engine.serving.wire.directory import Directory
from engine.serving.wire.listings import ListingRoutes
from engine.serving.wire.requests import RequestReader
from engine.serving.wire.routes import PREFIX, FutureRoutes, json_reply
from engine.serving.wire.served_model import ServedModel
from engine.serving.wire.statistics import ServiceStatistics
from engine.serving.wire.tensor_routes import TensorRoutes

STATUS, STATISTICS = "/v1/status", "/v1/statistics"
_TICK_SECONDS, _RETRY_SECONDS = 1.0, 2
_OPEN = (f"{PREFIX}healthz", "/")
_TINKER_KEY = b"tml-"
"""Beginning that Tinker's client demands of a key; a token without it is accepted with it."""
_PAGE = Path(__file__).with_name("page.html")
_PAGE_MAY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
"""Policy of the page: it loads nothing, and asks this service only."""


class ServiceApplication:
    """ASGI application of a training service: it submits HTTP requests as commands, and replies with their results.

    Args:
        ledger: record of the service's commands and results; the application sets ``ledger.on_finish``.
        model: facts about the base model, for checks of requests.
        token: secret that requests must carry, as X-API-Key or bearer token; empty: none.
        body_bytes: maximum bytes of the body of a request.
        creates_shared: True if the service creates a model named "shared", with all parameters trainable, when the
            first request with tensors for it comes.
    """

    def __init__(
        self, ledger: Ledger, model: ServedModel, token: str = "", body_bytes: int = 64_000_000,
        creates_shared: bool = False,
    ) -> None:  # fmt: skip
        self.ledger, self.model = ledger, model
        self.statistics, self.directory = ServiceStatistics(), Directory(ledger)
        self._token, self._body_bytes = token.encode(), body_bytes
        self._loop: asyncio.AbstractEventLoop | None = None
        ledger.on_finish = self._finish
        reader = RequestReader(model, self.directory)
        self._futures = FutureRoutes(ledger, self.directory, reader, self._body)
        listings = ListingRoutes(model, ledger, self.directory, self._body)
        tensors = TensorRoutes(ledger, self._futures, self._body, creates_shared)
        posts = {**self._futures.posts(), **listings.posts()}
        checkpoint = f"{PREFIX}training_runs/{{run}}/checkpoints/{{checkpoint:path}}"
        refused = cast(Any, self._refused)
        self._app = Starlette(
            routes=[
                *(Route(PREFIX + path, handler, methods=["POST"]) for path, handler in posts.items()),
                Route(checkpoint, listings.delete_checkpoint, methods=["DELETE"]),
                *(Route(PREFIX + path, handler, methods=["GET"]) for path, handler in listings.gets().items()),
                *tensors.routes(),
                Route(STATUS, self._status, methods=["GET"]),
                Route(STATISTICS, self._routes, methods=["GET"]),
                Route("/", self._page, methods=["GET"]),
            ],
            lifespan=lambda _: self._ticking(),
            exception_handlers={RequestRefusedError: refused, HTTPException: refused, ClientDisconnect: refused},
        )

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        """Answers one connection of an ASGI server."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        started, status = monotonic(), 0

        async def counted(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        refusal = self._refusal(scope)
        await (self._app if refusal is None else _error_reply(refusal))(scope, receive, counted)
        route = scope.get("route")
        self.statistics.record_request(getattr(route, "path", "other"), monotonic() - started, status)

    def _refusal(self, scope: MutableMapping[str, Any]) -> RequestRefusedError | None:
        """Returns the refusal of a request that no route answers."""
        if self._futures.ended is not None or scope["path"] in _OPEN:
            return self._futures.ended
        if not self._is_known(scope):
            return RequestRefusedError(
                "the request has a wrong X-API-Key or none; give the token of the service, as TINKER_API_KEY or as "
                "token= of engine.remote.",
                401,
            )
        if self.ledger.is_replaying:
            return RequestRefusedError("the service loads its models; repeat the request soon.", 503, _RETRY_SECONDS)
        return None

    def _is_known(self, scope: MutableMapping[str, Any]) -> bool:
        """Returns True if a request carries the token, in a time that does not depend on it."""
        if not self._token:
            return True
        headers = dict(scope["headers"])
        given = headers.get(b"x-api-key", b"") or headers.get(b"authorization", b"").removeprefix(b"Bearer ")
        accepted = [self._token, _TINKER_KEY + self._token]
        return any([hmac.compare_digest(given, one) for one in accepted])

    def end_waits(self) -> None:
        """Answers "not done yet" to all requests that wait for results, before the server stops."""
        self._futures.end_waits()

    def end(self, sentence: str) -> None:
        """Answers every waiting and later request with status 503 and ``sentence``; any thread may call it."""
        self._futures.ended = RequestRefusedError(sentence, 503, _RETRY_SECONDS)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._futures.end_waits)

    def _finish(self, entry: FutureEntry, result: Result) -> list[JournalRecord]:
        self.statistics.record_result(entry, result)
        return self.directory.record_result(entry, result)

    @asynccontextmanager
    async def _ticking(self) -> AsyncIterator[None]:
        self._loop = asyncio.get_running_loop()
        ticks = asyncio.create_task(self._tick_forever())
        try:
            yield
        finally:
            ticks.cancel()
            await asyncio.wait([ticks])

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            if self.ledger.is_replaying:
                continue
            self.ledger.tick()
            self.directory.forget_sessions()
            self.directory.remove_expired()

    async def _body(self, request: Request) -> bytes:
        """Returns the body of a request; one that is too long is refused before it is read."""
        if request.headers.get("content-encoding", "identity") != "identity":
            raise RequestRefusedError("the body is compressed; send it as it is, as client/config says.", 415)
        length = request.headers.get("content-length", "0")
        if not (length.isascii() and length.isdecimal()) or int(length[:20]) > self._body_bytes:
            raise self._too_long(f"{length[:20]} bytes")
        data = bytearray()
        async for part in request.stream():
            data += part
            if len(data) > self._body_bytes:
                raise self._too_long(f"more than {self._body_bytes:,} bytes")
        return bytes(data)

    def _too_long(self, size: str) -> RequestRefusedError:
        return RequestRefusedError(
            f"the body has {size}, and may have {self._body_bytes:,}; send fewer data in a request.", 413
        )

    async def _status(self, request: Request) -> Response:
        return json_reply(self.statistics.status(self.model, self.ledger))

    async def _routes(self, request: Request) -> Response:
        return json_reply({"routes": self.statistics.routes(), "commands": self.ledger.commands_done})

    async def _page(self, request: Request) -> Response:
        return Response(_PAGE.read_bytes(), 200, {"Content-Security-Policy": _PAGE_MAY}, "text/html; charset=utf-8")

    async def _refused(self, request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException):
            sentence = f"{request.method} {request.url.path[:80]} is no request to this service."
            error = RequestRefusedError(sentence, error.status_code)
        if not isinstance(error, RequestRefusedError):
            error = RequestRefusedError("the connection has ended within a request; send it again.")
        return _error_reply(error)


def _error_reply(error: RequestRefusedError) -> Response:
    headers = {} if error.retry_seconds is None else {"Retry-After": str(error.retry_seconds)}
    sentence = str(error)
    return json_reply({"detail": sentence, "error": sentence}, error.status, headers)  # the doors' two names of it
