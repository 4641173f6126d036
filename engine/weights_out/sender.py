"""HTTP server of a rank or receiver: its images, and on rank 0 the geometry, the newest version and its readers.

Requests have no influence on names of files, and nothing on the wire is evaluated or unpickled.
"""

import asyncio
import hmac
from collections.abc import AsyncIterator, Iterable, Mapping, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from threading import Lock
from time import monotonic
from typing import Any, TypeVar

from engine.errors import GridError, first_line
from engine.outer.http.bodies import RANGE
from engine.outer.http.requests import Done, authorization
from engine.outer.http.values import from_json
from engine.outer.messages import StoreRefusedError
from engine.web.json_text import dump_json, parse_json
from engine.weights_out import version as wire
from engine.weights_out.image import BlockReply, WeightImage
from engine.weights_out.version import (
    GONE,
    BlocksCall,
    Geometry,
    HashesCall,
    HashesReply,
    LeaseCall,
    LeaseReply,
    NewestReply,
    OwnerRank,
)

try:
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import Response, StreamingResponse
except ImportError as error:
    raise GridError(
        f"weights_out serves by starlette and uvicorn, but {error.name} is not installed; run: pip install "
        "'trine[outer]'."
    ) from error

CALL_BYTES = 64 << 20
"""Maximum bytes of a request."""
_PEERS = 16
"""Receivers of which a later one learns."""
T = TypeVar("T")


class NoticeBoard:
    """Newest published version and its present readers, on rank 0.

    Args:
        geometry: descriptions of all tensors, and the ranks that serve them.
    """

    def __init__(self, geometry: Geometry) -> None:
        self._geometry = dump_json(geometry)
        self._deadline, self._run = geometry.deadline, geometry.run
        self._newest: wire.WeightVersion | None = None
        self._readers: dict[str, float] = {}
        self._peers: dict[str, OwnerRank] = {}
        """Receivers that serve the newest version, in the order in which they began to read it."""
        self._lock = Lock()

    def begin(self) -> bool:
        """Withdraws the newest version, so that the next may overwrite its memory, and returns True.

        Returns False and does nothing while a receiver reads the newest version.
        """
        with self._lock:
            if any(until > monotonic() for until in self._readers.values()):
                return False
            self._forget()
            return True

    def withdraw(self) -> None:
        """Withdraws the newest version, even if receivers read it, so that its memory can be overwritten."""
        with self._lock:
            self._forget()

    def _forget(self) -> None:
        self._newest, self._readers, self._peers = None, {}, {}

    def announce(self, version: wire.WeightVersion) -> None:
        """Makes ``version`` the newest version, which receivers may read."""
        with self._lock:
            self._newest, self._peers = version, {}

    def answer(self, path: str, data: bytes) -> bytes | None:
        """Returns the JSON reply to the request ``data`` at ``path``, or None if this class does not serve the path."""
        if path == wire.GEOMETRY:
            return self._geometry
        if path == wire.NEWEST:
            with self._lock:
                return dump_json(NewestReply(self._newest))
        if path == wire.OPEN:
            return dump_json(self._open(read_call(LeaseCall, data)))
        if path == wire.CLOSE:
            call = read_call(LeaseCall, data)
            with self._lock:
                if self._newest is not None and self._newest.number == call.number:
                    self._readers.pop(call.reader, None)
                    if not call.whole:
                        self._peers.pop(call.reader, None)
            return dump_json(Done())
        return None

    def _open(self, call: LeaseCall) -> LeaseReply:
        check_run(call, self._run)
        with self._lock:
            if self._newest is None or self._newest.number != call.number:
                raise StoreRefusedError(f"version {call.number} is not the newest one; read the newest version.", GONE)
            if not call.seconds >= 0:
                raise StoreRefusedError(f"a receiver reads for {call.seconds} seconds; give at least 0.")
            self._readers[call.reader] = monotonic() + min(call.seconds, self._deadline)
            self._peers.pop(call.reader, None)  # one that begins again comes after those that may read from it
            earlier = tuple(self._peers.values())[-_PEERS:]
            if call.peer is not None:
                self._peers[call.reader] = call.peer
            return LeaseReply(earlier)


class WeightServer:
    """ASGI application by which a rank of a training run, or a receiver, serves weights.

    Args:
        images: memory with the served elements, by number of the owner (serving rank).
        run: name of the run.
        token: secret that every request must carry; empty: none.
        board: newest version and its readers; on rank 0 only.
    """

    def __init__(
        self, images: Mapping[int, WeightImage], run: str, token: str = "", board: NoticeBoard | None = None
    ) -> None:
        self._images, self._board, self.run = images, board, run
        self._token = authorization(token).encode() if token else b""
        self._thread = ThreadPoolExecutor(1, "weights-out")  # one core at most besides the training

    def answer(self, path: str, data: bytes) -> BlockReply:
        """Returns the reply to the request with the content ``data`` at ``path``: hashes, blocks, or a reply of
        ``board``.

        Raises:
            StoreRefusedError: the request is refused; the error has the HTTP status.
        """
        if path == wire.BLOCKS:
            asked = read_call(BlocksCall, data)
            return self._image(asked).read(asked.number, asked.layout, asked.blocks, RANGE)
        if path == wire.HASHES:
            call = read_call(HashesCall, data)
            check_run(call, self.run)
            layout, hashes = self._image(call).hashes(call.number, call.wanted, call.hashed)
            reply = dump_json(HashesReply(layout, tuple(each.astype("<u8").tobytes().hex() for each in hashes)))
            return BlockReply(len(reply), [reply])
        told = self._board.answer(path, data) if self._board is not None else None
        if told is None:
            raise StoreRefusedError(f"{path[:80]} is no request to this rank; use the same version of trine.", 404)
        return BlockReply(len(told), [told])

    def _image(self, call: HashesCall | BlocksCall) -> WeightImage:
        """Returns the image of the owner that a request names."""
        if call.owner not in self._images:
            raise StoreRefusedError(f"owner {call.owner} is not served here; read the geometry again.", GONE)
        return self._images[call.owner]

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        """Answers one connection of an ASGI server; blocks are copied from the image one by one."""
        if scope["type"] == "lifespan":
            return await self._live(receive, send)
        try:
            content = await self._reply(Request(scope, receive))
            headers = {"content-length": str(content.size)}
            # the server waits after each part until the network has taken it, so replies take no memory
            reply: Response = StreamingResponse(_parts(content.parts), 200, headers, "application/octet-stream")
        except StoreRefusedError as error:
            reply = Response(dump_json({"error": str(error)}), error.status, media_type="application/json")
        except ClientDisconnect:
            return None
        with suppress(StoreRefusedError):  # the version has ended: so does the connection, and the reader asks again
            await reply(scope, receive, send)

    async def _live(self, receive: Any, send: Any) -> None:
        """Answers start and end of the server."""
        while True:
            event = (await receive())["type"]
            await send({"type": f"{event}.complete"})
            if event == "lifespan.shutdown":
                return self._thread.shutdown(wait=False)

    async def _reply(self, request: Request) -> BlockReply:
        if not hmac.compare_digest(request.headers.get("authorization", "").encode(), self._token):
            raise StoreRefusedError(
                f"the request has a wrong token or none; give trainer and receivers the same {wire.TOKEN_VARIABLE}, or "
                "weights_out.token_file.",
                401,
            )
        data = bytearray()
        async for part in request.stream():
            data += part
            if len(data) > CALL_BYTES:
                raise StoreRefusedError(f"the request has more than {CALL_BYTES:,} bytes; ask for fewer tensors.", 413)
        work = partial(self.answer, request.url.path, bytes(data))
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


async def _parts(parts: Iterable[bytes]) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


def check_run(call: HashesCall | LeaseCall, run: str) -> None:
    """Refuses a request ``call`` for a version of another run than ``run``.

    Raises:
        StoreRefusedError: the runs differ, because the training has started again.
    """
    if call.run != run:
        raise StoreRefusedError(f"version {call.number} is of an earlier run; read the newest version.", GONE)


def read_call(kind: type[T], data: bytes) -> T:
    """Returns the JSON request ``data`` as an instance of the message class ``kind``.

    Raises:
        StoreRefusedError: the request has a wrong form.
    """
    try:
        return from_json(kind, parse_json(data), "request")
    except (ValueError, TypeError) as error:
        raise StoreRefusedError(
            f"the request is no {kind.__name__}: {first_line(error)}; use the same version of trine."
        ) from error
