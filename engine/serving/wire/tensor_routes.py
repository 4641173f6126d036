"""Routes of the second door: tensors in, tensors out, gradients back. Bodies are safetensors.

POST /v1/forward/{model}?ticket=        tensors -> outputs; with a ticket, the graph is retained
POST /v1/backward/{model}/{ticket}      gradients of outputs -> gradients of inputs; ?step= updates the weights
POST /v1/step/{model}                   AdamW as JSON -> version
POST, GET /v1/call/{name}               a function of the server

A request carries its session and number. A repeat waits for the same future, so that a lost reply changes nothing
twice. The reply waits for the command; after ``POLL_SECONDS`` it is 202, and the client repeats its request.
"""

import json
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import fields
from itertools import count
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from engine.serving.bookkeeping.entry import EntryState, FutureEntry, RequestRefusedError
from engine.serving.bookkeeping.ledger import Ledger
from engine.serving.bookkeeping.session import HOUSE, SHARED
from engine.serving.commands import (
    AdamParameters,
    Array,
    BackwardTensors,
    CallFunction,
    Command,
    CreateModel,
    Failure,
    ForwardTensors,
    OptimStep,
    PlainOutput,
    Result,
    TensorOutput,
)
from engine.serving.wire.routes import FutureRoutes
from engine.web.tensor_headers import NUMBER, SESSION, TENSORS, VERSION

MOST_TENSORS = 256
"""Maximum number of tensors of a request."""
CREATE = "create"
"""Route of the entry that creates the model that all clients share."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,119}")
_DONE, _WAITING = 200, 202
_STATUS: Mapping[str, int] = {"user": 400, "gone": 410}
"""Status of failures by who is at fault; others are 500."""

Handler = Callable[[Request], Awaitable[Response]]


class TensorRoutes:
    """HTTP routes by which clients send tensors to a model, and get outputs and gradients back.

    Args:
        ledger: record of the service's commands, to which the routes add the command of each request.
        futures: handlers with which the routes wait for a command's storage on disk, and later for its result.
        read_body: callback that returns the body of a request, or refuses a long body.
        creates: True if the first request for the model "shared" creates it, with all parameters trainable.
    """

    def __init__(
        self, ledger: Ledger, futures: FutureRoutes, read_body: Callable[[Request], Awaitable[bytes]], creates: bool
    ) -> None:
        self._ledger, self._futures, self._body, self._creates = ledger, futures, read_body, creates
        self._gets = count()

    def routes(self) -> list[Route]:
        """Returns the routes, for a Starlette application."""
        posts: Mapping[str, Callable[[Request], Awaitable[Command]]] = {
            "/v1/forward/{model}": self._forward,
            "/v1/backward/{model}/{ticket}": self._backward,
            "/v1/step/{model}": self._step,
            "/v1/call/{name}": self._call,
        }
        made = [Route(path, self._handler(path, parse), methods=["POST"]) for path, parse in posts.items()]
        return [
            *made,
            Route("/v1/call/{name}", self._handler("/v1/call/{name}", self._call), methods=["GET"]),
        ]

    def _handler(self, path: str, parse: Callable[[Request], Awaitable[Command]]) -> Handler:
        async def handle(request: Request) -> Response:
            return _reply(await self._run(request, path, await parse(request)))

        return handle

    async def _run(self, request: Request, path: str, command: Command) -> Result | None:
        """Submits a command and waits for its result; None if it still runs after ``POLL_SECONDS``."""
        session = _named(request.headers.get(SESSION, ""), f"the header {SESSION}")
        number = request.headers.get(NUMBER, "")
        if request.method == "GET":
            number = f"get{next(self._gets)}"
        elif not number.isdecimal() or len(number) > 18:
            raise RequestRefusedError(f"the header {NUMBER} is {number[:40]!r}; number requests of a session from 1.")
        if session == HOUSE:
            raise RequestRefusedError(f"the header {SESSION} is {HOUSE!r}, which is the service's own; choose another.")
        await self._open(session)
        model = getattr(command, "model", None)
        if model == SHARED and self._creates and SHARED not in self._ledger.lines:
            await self._open(HOUSE)
            created = FutureEntry(f"{HOUSE}:create", HOUSE, CreateModel(SHARED, "", None), SHARED, 0, route=CREATE)
            house = self._ledger.sessions[HOUSE].entries
            if (known := house.get(created.key)) is not None and known.has_failed:
                del house[created.key]  # the pool may have room now
            created = self._ledger.submit(created)
            await self._futures.wait_stored(created.stored)
            await self._futures.wait(created)
            if created.state is not EntryState.DONE or created.has_failed:
                return created.result
        line = model if model in self._ledger.lines else None
        entry = FutureEntry(f"{session}:tensors:{number}", session, command, line, route=path)
        entry = self._ledger.submit(entry)
        await self._futures.wait_stored(entry.stored)
        await self._futures.wait(entry)
        if entry.state not in (EntryState.DONE, EntryState.FORGOTTEN):
            return None
        result = entry.result
        if result is None:
            raise RequestRefusedError(f"the result of {entry.key} was fetched before and has been removed.", 410)
        self._ledger.mark_fetched(entry)
        return result

    async def _open(self, session: str) -> None:
        """Opens a session at its first request."""
        if session not in self._ledger.sessions and session not in self._ledger.ended:
            self._ledger.open_session(session)
            await self._futures.wait_stored(self._ledger.append(self._ledger.note("session", session, {})))

    # ------------------------------------------------------------------ requests

    async def _forward(self, request: Request) -> Command:
        ticket = request.query_params.get("ticket", "")
        model, tensors = _model(request), await self._tensors(request)
        if not tensors:
            raise RequestRefusedError("a forward was sent without tensors; send the model's arguments.")
        return ForwardTensors(model, tensors, _named(ticket, "ticket") if ticket else "")

    async def _backward(self, request: Request) -> Command:
        step = request.query_params.get("step")
        adam = _adam(_json(step.encode())) if step is not None else None
        ticket = _named(request.path_params["ticket"], "ticket")
        return BackwardTensors(_model(request), ticket, await self._tensors(request), adam)

    async def _step(self, request: Request) -> Command:
        return OptimStep(_model(request), _adam(_json(await self._body(request))))

    async def _call(self, request: Request) -> Command:
        name = _named(request.path_params["name"], "the function's name")
        return CallFunction(name, {} if request.method == "GET" else await self._tensors(request))

    async def _tensors(self, request: Request) -> dict[str, Array]:
        body = await self._body(request)
        if not body:
            return {}
        try:
            found = load(body)
        except (SafetensorError, KeyError, ValueError, TypeError) as error:
            raise RequestRefusedError(f"the body is no safetensors file: {str(error)[:200]}.") from error
        if len(found) > MOST_TENSORS:
            raise RequestRefusedError(f"the body has {len(found)} tensors, but at most {MOST_TENSORS} are taken.")
        return {name: np.ascontiguousarray(value) for name, value in found.items()}


def _reply(result: Result | None) -> Response:
    if result is None:
        return Response(status_code=_WAITING)
    if isinstance(result, Failure):
        return JSONResponse({"detail": result.error, "final": True}, _STATUS.get(result.category, 500))
    if isinstance(result, TensorOutput):
        body = save({name: np.ascontiguousarray(value) for name, value in result.tensors.items()})
        return Response(body, _DONE, {VERSION: str(result.version)}, TENSORS)
    assert isinstance(result, PlainOutput), "commands of this door have these results"
    return JSONResponse(dict(result.values))


def _model(request: Request) -> str:
    return _named(request.path_params["model"], "the model's id")


def _named(text: str, what: str) -> str:
    if not _NAME.fullmatch(text):
        raise RequestRefusedError(f"{what} is {text[:40]!r}; use letters, digits, '.', ':', '_' and '-', at most 120.")
    return text


def _json(body: bytes) -> Any:
    try:
        return json.loads(body) if body else {}
    except (ValueError, RecursionError) as error:
        raise RequestRefusedError(f"the request is no JSON: {str(error)[:100]}.") from error


def _adam(value: Any) -> AdamParameters:
    known = {one.name for one in fields(AdamParameters)}
    if not isinstance(value, dict) or not set(value) <= known:
        raise RequestRefusedError(f"an update takes a JSON object of {', '.join(sorted(known))}; send numbers by name.")
    for name, number in value.items():
        if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number < float("inf"):
            raise RequestRefusedError(f"{name} is {str(number)[:40]}, but it must be a number from 0; change it.")
    return AdamParameters(**{name: float(number) for name, number in value.items()})
