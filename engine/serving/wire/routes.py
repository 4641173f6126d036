"""Routes of Tinker's call set that change something: sessions, futures and their polls."""

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from engine.serving.bookkeeping.entry import EntryState, FutureEntry, RequestRefusedError
from engine.serving.bookkeeping.ledger import Ledger
from engine.serving.wire.directory import SAMPLER, Directory, now
from engine.serving.wire.fields import BodyFields
from engine.serving.wire.replies import JSON, reply_of
from engine.serving.wire.requests import LONGEST_SEQUENCE_NUMBER, ParsedRequest, RequestReader, metadata_of
from engine.web.json_text import dump_json

PREFIX = "/api/v1/"
POLL_SECONDS = 20.0
"""Seconds for which a poll waits; the client allows 45."""
CLIENT_CONFIG: Mapping[str, Any] = {
    "pjwt_auth_enabled": False, "credential_default_source": "api_key", "use_pyqwest_transport": False,
    "proto_compress_fwdbwd": False, "parallel_fwdbwd_chunks": True, "custom_loss_server_side": True,
}  # fmt: skip
"""Answer of client/config: the client sends HTTP/1.1 without compression, chunks in parallel, and losses as graphs."""
_MOST_SESSIONS = 1024
_LARGE_BODY = 1 << 20
_RETRY_DISK_SECONDS = 5
Handler = Callable[[Request], Awaitable[Response]]
ReadBody = Callable[[Request], Awaitable[bytes]]


def json_reply(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Returns an HTTP response with ``value`` as JSON; floats that are not finite become strings."""
    return Response(dump_json(value), status, headers, JSON)


class FutureRoutes:
    """Handlers of the HTTP routes that open sessions, accept commands, and return the results of accepted commands.

    Args:
        ledger: record of the service's commands and results.
        directory: sessions, training runs and saved weights.
        reader: parser of the requests.
        read_body: callback that returns the body of a request, or refuses a long body.
    """

    def __init__(self, ledger: Ledger, directory: Directory, reader: RequestReader, read_body: ReadBody) -> None:
        self._ledger, self._directory, self._reader, self._read_body = ledger, directory, reader, read_body
        self.is_stopping = asyncio.Event()
        self.ended: RequestRefusedError | None = None
        """Refusal of every request, once the ranks run no more commands."""
        self._news: set[asyncio.Future[None]] = set()

    def posts(self) -> Mapping[str, Handler]:
        """Returns the handlers of POST requests by path."""
        reader = self._reader
        work: dict[str, Callable[[BodyFields], ParsedRequest]] = {
            "create_model": reader.create_model, "optim_step": reader.optim_step, "save_weights": reader.save_weights,
            "save_weights_for_sampler": reader.save_weights_for_sampler, "load_weights": reader.load_weights,
            "asample": reader.asample, "create_custom_loss": reader.create_custom_loss,
            "unload_model": reader.unload_model,
        }  # fmt: skip
        others = {
            "create_session": self._create_session, "session_heartbeat": self._heartbeat,
            "create_sampling_session": self._create_sampling_session, "retrieve_future": self._retrieve,
            "cancel_future": self._cancel, "forward_backward": self._forward_backward,
            "sessions/{session}/finish": self._finish_session,
        }  # fmt: skip
        return {name: self._working(read) for name, read in work.items()} | others

    # ---------------------------------------------------------------- commands

    def _working(self, read: Callable[[BodyFields], ParsedRequest]) -> Handler:
        async def handle(request: Request) -> Response:
            return await self._submit(await self._parsed(request, lambda body: read(BodyFields.parsed(body))))

        return handle

    async def _forward_backward(self, request: Request) -> Response:
        return await self._submit(await self._parsed(request, self._reader.forward_backward))

    async def _parsed(self, request: Request, read: Callable[[bytes], ParsedRequest]) -> ParsedRequest:
        body = await self._read_body(request)
        # a large body is parsed in a thread, so that polls of others are answered meanwhile
        return await asyncio.to_thread(read, body) if len(body) > _LARGE_BODY else read(body)

    async def _submit(self, found: ParsedRequest) -> Response:
        entry = self._ledger.submit(*found.entries)
        await self.wait_stored(entry.stored)
        return json_reply({"request_id": entry.key, **found.reply})

    async def wait_stored(self, stored: Any) -> None:
        """Waits until ``stored``, the future of ``Ledger.append``, is done: the records are in the journal.

        Raises:
            RequestRefusedError: 503, the journal cannot be written.
        """
        try:
            # shielded: a client that hangs up must not cancel what the journal's thread completes
            await asyncio.shield(asyncio.wrap_future(stored))
        except OSError as error:
            raise RequestRefusedError(
                f"the service cannot write its journal ({error.strerror or error}); repeat the request later.",
                503,
                _RETRY_DISK_SECONDS,
            ) from error

    # ---------------------------------------------------------------- sessions

    async def _create_session(self, request: Request) -> Response:
        body = BodyFields.parsed(await self._read_body(request))
        attempt = request.headers.get("x-idempotency-key", "")[:200]
        name = self._directory.session_of_attempt(attempt)
        if name is None:
            if len(self._ledger.sessions) >= _MOST_SESSIONS:
                raise RequestRefusedError(f"{_MOST_SESSIONS} sessions are open; end one, or repeat later.", 429, 30)
            name = f"s{secrets.token_hex(8)}"
            tags = [str(tag)[:100] for tag in body.items("tags", [], most=100)]
            values = {
                "tags": tags, "display_name": body.text("display_name", None), "user_metadata": metadata_of(body),
            }  # fmt: skip
            record = self._directory.open_session(name, attempt, values)
            await self.wait_stored(self._ledger.append(record))
        return json_reply({"type": "create_session", "session_id": name})

    async def _heartbeat(self, request: Request) -> Response:
        name = BodyFields.parsed(await self._read_body(request)).text("session_id")
        try:
            self._ledger.session(name)
        except RequestRefusedError as error:
            raise RequestRefusedError(str(error), 410) from None
        return json_reply({"type": "session_heartbeat"})

    async def _finish_session(self, request: Request) -> Response:
        body, name = BodyFields.parsed(await self._read_body(request)), request.path_params["session"]
        if name in self._ledger.sessions:
            kind = body.mapping("reason", {}).text("type", "success")
            self._ledger.end_session(name, "was finished by its client", saved=kind != "success")
        return json_reply({})

    async def _create_sampling_session(self, request: Request) -> Response:
        body = BodyFields.parsed(await self._read_body(request))
        session = self._ledger.session(body.text("session_id")).name
        number = body.integer("sampling_session_seq_id", high=LONGEST_SEQUENCE_NUMBER)
        path, base = body.text("model_path", None, most=1024), body.text("base_model", None)
        if path is not None:
            base = self._directory.weights(path)["base_model"]
        else:
            self._reader.check_base(base or "")
        name = f"{session}:sample:{number}"
        values = {"base_model": base, "model_path": path, "time": now()}
        known = self._directory.notes(SAMPLER).get(name)
        if known is not None and (known["base_model"], known["model_path"]) != (base, path):
            raise RequestRefusedError(f"{name} was used before for other weights; number sampling sessions apart.")
        if known is None:
            await self.wait_stored(self._ledger.append(self._ledger.note(SAMPLER, name, values)))
        return json_reply({"type": "create_sampling_session", "sampling_session_id": name})

    # ---------------------------------------------------------------- polls

    async def _retrieve(self, request: Request) -> Response:
        key = BodyFields.parsed(await self._read_body(request)).text("request_id")
        entry = self._ledger.find(key)
        await self.wait(entry)
        if entry.state is EntryState.FORGOTTEN or (entry.state is EntryState.DONE and entry.result is None):
            entry = self._ledger.find(key)  # raises the sentence of its end
            raise RequestRefusedError(f"the result of {key} has been removed.", 410)
        if entry.state is not EntryState.DONE:
            return json_reply(self._try_again(entry), 408)
        body, kind = reply_of(entry)
        self._ledger.mark_fetched(entry)
        return Response(body, 200, media_type=kind)

    async def wait(self, entry: FutureEntry) -> None:
        """Waits until the command of ``entry`` is done or the server stops, at most ``POLL_SECONDS``.

        Raises:
            RequestRefusedError: 503, the ranks run no more commands.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def set_done() -> None:
            if not done.done():
                done.set_result(None)

        def listener() -> None:
            loop.call_soon_threadsafe(set_done)

        if not self.is_stopping.is_set() and self._ledger.watch(entry, listener):
            self._news.add(done)
            try:
                await asyncio.wait([done], timeout=POLL_SECONDS)
            finally:
                self._news.discard(done)
                self._ledger.unwatch(entry, listener)
        if self.ended is not None and entry.state is not EntryState.DONE:
            raise self.ended

    def end_waits(self) -> None:
        """Answers all requests that wait for results: with the refusal ``ended`` if it is set, else "not done yet".

        Later requests then do not wait either. Call it in the thread of the server's event loop.
        """
        self.is_stopping.set()
        for one in self._news:
            if not one.done():
                one.set_result(None)

    def _try_again(self, entry: FutureEntry) -> Mapping[str, Any]:
        line = self._ledger.lines.get(entry.line or "")
        reason = f"the command {entry.state.value}"
        if entry.state is EntryState.QUEUED:
            reason = f"{self._ledger.queue.before(entry)} commands are before it in the queue"
        elif entry.state is EntryState.HELD and line is not None:
            reason = f"number {line.following} of its model has not arrived"
        state = "active" if entry.state is EntryState.RUNNING else "paused_capacity"
        return {"type": "try_again", "request_id": entry.key, "queue_state": state, "queue_state_reason": reason}

    async def _cancel(self, request: Request) -> Response:
        key = BodyFields.parsed(await self._read_body(request)).text("request_id")
        return json_reply({"cancelled": self._ledger.cancel(key)})
