"""Requests of one client to a server, numbered so that a repeated request is answered once.

A request repeats as ``engine.web.retries`` has it, but only briefly until the server has answered once: its address may
be wrong. Bodies are safetensors in both directions.
"""

import logging
import ssl
import uuid
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from threading import Lock
from time import monotonic
from typing import Any

from safetensors.torch import load, save
from torch import Tensor

from engine.errors import EngineError, first_line
from engine.web.retries import TroubleError, httpx, refuse_trouble, repeat_request, sentence_of
from engine.web.tensor_headers import NUMBER, SESSION, TENSORS, VERSION

logger = logging.getLogger("trine")
_REFUSED = 400
_WAITING = 202
_ENDED = 404
_FIRST_SECONDS = 0.5
"""Patience until the first reply."""
Tensors = Mapping[str, Tensor]


class RemoteError(EngineError):
    """Error of a request that a server refuses, or does not answer in time."""


@dataclass(frozen=True, slots=True)
class Reply:
    """Reply of a server to a request with tensors: result tensors by name, and the version of the model's weights."""

    tensors: dict[str, Tensor]
    version: int


class RemoteLine:
    """HTTP connection of one client session to a training service.

    Requests are numbered and repeated until the server answers; the server runs a repeated request once.

    Args:
        url: address of the server.
        token: secret of the server; empty: none.
        patience: seconds for which an unanswered request is repeated. If the server has never answered, a request is
            repeated for 0.5 seconds only.
        transport: httpx transport that replaces the network, for tests.
        certificate: PEM file with the server's certificate or its authority's; empty: this host's trusted authorities.

    Raises:
        RemoteError: ``url`` is no HTTP address, or the certificate cannot be read.
    """

    def __init__(
        self, url: str, token: str = "", patience: float = 600.0, transport: httpx.BaseTransport | None = None,
        certificate: str = "",
    ) -> None:  # fmt: skip
        self.url, self._patience = url.rstrip("/"), patience
        headers = {SESSION: uuid.uuid4().hex, **({"authorization": f"Bearer {token}"} if token else {})}
        timeout = httpx.Timeout(60.0, connect=5.0)
        try:
            checked = ssl.create_default_context(cafile=certificate) if certificate else True
            self._client = httpx.Client(
                base_url=self.url, headers=headers, timeout=timeout, transport=transport, verify=checked
            )
        except (httpx.InvalidURL, OSError, ValueError) as error:  # a token with other characters than ASCII too
            raise RemoteError(
                f"no line to {self.url!r} can be made ({first_line(error)}); check the address, the token, and the "
                f"certificate {certificate!r}."
            ) from error
        if self._client.base_url.scheme not in ("http", "https"):
            raise RemoteError(f"{self.url!r} is no address of a server; give http://HOST:PORT or https://HOST:PORT.")
        weakref.finalize(self, self._client.close)  # sockets end with the line
        self._numbers, self._tickets, self._lock = count(1), count(1), Lock()
        self._is_known = False
        """The server has answered a request."""

    def post(self, path: str, tensors: Tensors, options: Mapping[str, str] | None = None) -> Reply:
        """Posts ``tensors`` to ``path``, with ``options`` as query parameters, and returns the tensors of the reply.

        Raises:
            RemoteError: the server refuses the request, or does not answer in time.
        """
        body = save(_apart({name: value.detach().cpu().contiguous() for name, value in tensors.items()}))
        response = self._numbered("POST", path, options, content=body, headers={"content-type": TENSORS})
        return _reply(response)

    def ask(self, path: str, value: object = None, method: str = "POST") -> Any:
        """Posts ``value`` as JSON to ``path``; returns the JSON of the reply.

        With another ``method``, such as "GET", sends no value.

        Raises:
            RemoteError: the server refuses the request, or does not answer in time.
        """
        response = self._numbered(method, path, None, json=value) if method == "POST" else self._repeat(
            lambda: self._client.request(method, path)
        )  # fmt: skip
        return response.json()

    def fetch(self, path: str, tensor: Tensor | None = None) -> Tensor | None:
        """Posts ``tensor``, or no tensor, to ``path``; returns the tensor of the reply, or None if it has none.

        Raises:
            RemoteError: the server refuses, does not answer in time, or replies with several tensors.
        """
        reply = self.post(path, {} if tensor is None else {"0": tensor})
        if len(reply.tensors) > 1:
            raise RemoteError(
                f"{self.url}{path} replied with {len(reply.tensors)} tensors, but this call returns at most one; call "
                f'remote_model.line.post({path!r}, {{"0": tensor}}), and read all tensors from its result.tensors.'
            )
        return next(iter(reply.tensors.values()), None)

    def new_ticket(self) -> str:
        """Returns a new unique name (ticket) for the autograd graph of one forward on the server."""
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
        began, renewed = monotonic(), False

        def attempt() -> httpx.Response:
            nonlocal began, renewed
            while True:
                response = request()
                self._is_known = True
                if response.status_code == _WAITING:
                    began = monotonic()  # the server works, and has a place for the reply
                elif response.status_code == _ENDED and not renewed and sentence_of(response).startswith("session "):
                    # this client was silent for long; all of its earlier requests have been answered
                    self._client.headers[SESSION], renewed = uuid.uuid4().hex, True
                else:
                    break
            refuse_trouble(response)
            if response.status_code >= _REFUSED:
                bare = f"{self.url} replies with status {response.status_code}; check the address."
                raise RemoteError(sentence_of(response) or bare)
            return response

        told = False

        def describe(error: Exception) -> RemoteError:
            nonlocal told
            why = str(error) if isinstance(error, TroubleError) else f"{type(error).__name__}: {first_line(error)}"
            if not self._is_known:
                return RemoteError(
                    f"{self.url} does not answer ({why}); check the address, http or https, the certificate, and that "
                    "the server runs."
                )
            sentence = f"{self.url} does not answer for {monotonic() - began:,.0f} s ({why})"
            if not told:
                logger.warning("%s; the request repeats for up to %g s.", sentence, self._patience)
            told = True
            return RemoteError(f"{sentence}; start the server again.")

        return repeat_request(attempt, lambda: began + (self._patience if self._is_known else _FIRST_SECONDS), describe)


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns tensors of which no two share memory, which safetensors refuses: a call may have one argument twice."""
    users = Counter(value.untyped_storage()._cdata for value in tensors.values())
    return {
        name: value.clone() if users[value.untyped_storage()._cdata] > 1 else value for name, value in tensors.items()
    }


def _reply(response: httpx.Response) -> Reply:
    try:
        return Reply(load(response.content), int(response.headers.get(VERSION, 0)))
    except Exception as error:
        raise RemoteError(
            f"the reply of {response.url} cannot be read as tensors in safetensors format ({first_line(error)}); check "
            "that a Trine service answers at this address, and not another server."
        ) from error
