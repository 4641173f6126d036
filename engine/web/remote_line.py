"""Requests of one client to a server, numbered so that a repeated request is answered once.

A request repeats after a broken connection and after 408, 429 and 5xx, with growing pauses; ``Retry-After`` is obeyed.
Bodies are safetensors in both directions.
"""

import json
import uuid
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from random import uniform
from threading import Lock
from time import monotonic, sleep
from typing import Any

from safetensors.torch import load, save
from torch import Tensor

from engine.errors import EngineError, GridError, first_line
from engine.web.tensor_headers import NUMBER, SESSION, TENSORS, VERSION

try:
    import httpx
except ImportError as error:
    raise GridError("engine.remote needs httpx, which is not installed; run: pip install httpx.") from error

_LATER = (408, 429)
_TROUBLE = 500
_REFUSED = 400
_WAITING = 202
_ENDED = 404
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 5.0
Tensors = Mapping[str, Tensor]


class RemoteError(EngineError):
    """Error of a request to a server: its sentence, or that it does not answer."""


@dataclass(frozen=True, slots=True)
class Reply:
    """Reply of a server: tensors by name, and the version of the model's weights."""

    tensors: dict[str, Tensor]
    version: int


class RemoteLine:
    """Requests of one session.

    Args:
        url: address of the server.
        token: its secret; empty: none.
        patience: seconds for which a request repeats.
        transport: replaces the network.
    """

    def __init__(
        self, url: str, token: str = "", patience: float = 600.0, transport: httpx.BaseTransport | None = None
    ) -> None:
        self.url, self._patience = url.rstrip("/"), patience
        headers = {SESSION: uuid.uuid4().hex, **({"authorization": f"Bearer {token}"} if token else {})}
        timeout = httpx.Timeout(60.0, connect=5.0)
        self._client = httpx.Client(base_url=self.url, headers=headers, timeout=timeout, transport=transport)
        weakref.finalize(self, self._client.close)  # sockets end with the line
        self._numbers, self._tickets, self._lock = count(1), count(1), Lock()

    def post(self, path: str, tensors: Tensors, options: Mapping[str, str] | None = None) -> Reply:
        """Sends tensors and returns the tensors of the reply.

        Raises:
            RemoteError: the server refuses the request, or does not answer in time.
        """
        body = save({name: value.detach().cpu().contiguous() for name, value in tensors.items()})
        response = self._numbered("POST", path, options, content=body, headers={"content-type": TENSORS})
        return _reply(response)

    def ask(self, path: str, value: object = None, method: str = "POST") -> Any:
        """Sends a JSON value and returns that of the reply; errors as in ``post``."""
        response = self._numbered(method, path, None, json=value) if method == "POST" else self._repeat(
            lambda: self._client.request(method, path)
        )  # fmt: skip
        return response.json()

    def fetch(self, path: str, tensor: Tensor | None = None) -> Tensor | None:
        """Sends one tensor, or none, and returns that of the reply, if it has one; errors as in ``post``."""
        reply = self.post(path, {} if tensor is None else {"0": tensor})
        if len(reply.tensors) > 1:
            raise RemoteError(f"{self.url}{path} replied with {len(reply.tensors)} tensors; call post for several.")
        return next(iter(reply.tensors.values()), None)

    def new_ticket(self) -> str:
        """Returns a name for a retained graph that no other client uses."""
        with self._lock:
            return f"{self._client.headers[SESSION]}-{next(self._tickets)}"

    def close(self) -> None:
        """Closes the connection."""
        self._client.close()

    def _numbered(self, method: str, path: str, options: Mapping[str, str] | None, **request: Any) -> httpx.Response:
        with self._lock:
            number = str(next(self._numbers))
        headers = {**request.pop("headers", {}), NUMBER: number}
        return self._repeat(lambda: self._client.request(method, path, params=options, headers=headers, **request))

    def _repeat(self, request: Callable[[], httpx.Response]) -> httpx.Response:
        began, pause, why, renewed = monotonic(), _FIRST_PAUSE, "", False
        while True:
            wait = pause
            try:
                response = request()
            except httpx.TransportError as error:
                why = f"{type(error).__name__}: {first_line(error)}"
            else:
                status = response.status_code
                if status == _WAITING:
                    began, wait = monotonic(), 0.0  # the server works, and has a place for the reply
                elif status < _REFUSED:
                    return response
                elif status == _ENDED and not renewed and _sentence(response).startswith("session "):
                    # this client was silent for long; all of its earlier requests have been answered
                    self._client.headers[SESSION], renewed, wait = uuid.uuid4().hex, True, 0.0
                elif (status in _LATER or status >= _TROUBLE) and not _field(response, "final"):
                    why = _sentence(response) or f"status {status}"
                    wait = max(pause, _retry_after(response))
                else:
                    raise RemoteError(_sentence(response) or f"{self.url} replies with status {status}.")
            if monotonic() - began + wait > self._patience:
                raise RemoteError(f"{self.url} does not answer for {monotonic() - began:,.0f} s ({why}).")
            sleep(uniform(wait / 2, wait))
            pause = min(2 * pause, _LONGEST_PAUSE)


def _reply(response: httpx.Response) -> Reply:
    try:
        return Reply(load(response.content), int(response.headers.get(VERSION, 0)))
    except Exception as error:
        raise RemoteError(f"the reply of {response.url} is no set of tensors: {first_line(error)}") from error


def _field(response: httpx.Response, name: str) -> Any:
    try:
        return json.loads(response.content)[name]
    except (ValueError, KeyError, TypeError):
        return None


def _sentence(response: httpx.Response) -> str:
    return str(_field(response, "detail") or "")


def _retry_after(response: httpx.Response) -> float:
    try:
        return min(60.0, float(response.headers.get("retry-after", 0)))
    except ValueError:
        return 0.0
