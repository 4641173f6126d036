"""Stores served in this process without a socket, and sites that talk to them."""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from threading import Thread
from typing import Any

import httpx
import torch
from torch import Tensor

from engine.checkpoint.format.pieces import Part
from engine.config.optim_sections import OptimizerConfig
from engine.config.outer_section import OuterConfig, shared_settings
from engine.outer.http.line import HttpLink
from engine.outer.http.server import StoreServer
from engine.outer.messages import JoinRequest, NamedPiece, PushKey, PushMeta, RankLayout
from engine.outer.store.store import Store

TENSORS = (("layer.weight", (6, 4)), ("layer.bias", (6,)))
ELEMENTS = 30


class AppTransport(httpx.BaseTransport):
    """Transport into an ASGI application, which runs in a thread of its own."""

    def __init__(self, server: StoreServer) -> None:
        self.server = server
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, daemon=True)
        self._inner = httpx.ASGITransport(app=server)
        self._thread.start()
        self._ticking = server.ticking()
        self._run(self._ticking.__aenter__())

    def _run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        async def answer() -> tuple[httpx.Response, bytes]:
            data = request.read()
            sent = httpx.Request(request.method, request.url, headers=request.headers, content=data)
            response = await self._inner.handle_async_request(sent)
            return response, b"".join([part async for part in response.stream])  # type: ignore[union-attr]

        response, content = self._run(answer())
        return httpx.Response(response.status_code, headers=response.headers, stream=httpx.ByteStream(content))

    def stop(self) -> None:
        """Ends the application."""
        self._run(self._ticking.__aexit__(None, None, None))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def settings_of(**keys: Any) -> dict[str, Any]:
    """The settings of a store for a section "outer"."""
    adamw = OptimizerConfig(type="SGD", params={"lr": 0.1})
    return shared_settings(OuterConfig(url="http://store", **keys), adamw, 0.0)


@contextmanager
def served(store: Store, token: str = "") -> Iterator[AppTransport]:
    """Serves a store."""
    transport = AppTransport(StoreServer(store, token))
    try:
        yield transport
    finally:
        transport.stop()


@contextmanager
def linked(*transports: httpx.BaseTransport, **options: Any) -> Iterator[HttpLink]:
    """Connects one rank to stores."""
    urls = [f"http://store{i}" for i in range(len(transports))]
    link = HttpLink(urls, transport=lambda i: transports[i], **options)
    try:
        yield link
    finally:
        link.close()


def layout_of(tensors: tuple[tuple[str, tuple[int, ...]], ...] = TENSORS) -> RankLayout:
    """All of the tensors on one rank."""
    whole = tuple(NamedPiece(name, Part(shape).whole()) for name, shape in tensors)
    return RankLayout(whole, whole)


def join_request(site: int, settings: Mapping[str, Any], tensors: Any = TENSORS) -> JoinRequest:
    """A site of one rank."""
    return JoinRequest(site=site, ranks=1, tensors=tensors, settings=settings)


def body_of(values: Tensor) -> Tensor:
    """Numbers as the fp32 body of a push."""
    return values.float().contiguous().view(torch.uint8)


def meta_of(life: int, seq: int, base: int, fragment: int = 0) -> PushMeta:
    """A push of one step."""
    return PushMeta(PushKey(life, fragment, seq), base, steps=1, tokens=8.0, rows=8 * (seq + 1), step=seq)
