"""Calls of inference servers by HTTP and JSON: repeated while a server does not answer, and made on all of them."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from time import monotonic
from typing import Any, TypeVar

import httpx

from engine.checkpoint.format.strict_json import decode_json
from engine.errors import EngineError, first_line
from engine.outer.http.connection import LONGEST_SECONDS, BoundedConnection
from engine.outer.messages import StoreRefusedError
from engine.web.json_text import dump_json
from engine.web.retries import FOREVER, TroubleError

_REFUSED, _NOT_FOUND, _LATER = 400, 404, (429, 502, 503, 504)
_JSON = {"content-type": "application/json"}
INCOMPLETE = "incomplete"
"""Last word of the version of a server with weights that may be a mix; it stays paused."""


class InferenceServer(BoundedConnection):
    """HTTP connection to one inference server, such as vLLM or SGLang."""

    def absent(self, path: str) -> str:
        """Returns advice for the error that the server has no route ``path``, such as "start vLLM 0.32 or later"."""
        return "check the address."

    def call(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, patience: float = FOREVER,
        longest: float = LONGEST_SECONDS,
    ) -> Any:  # fmt: skip
        """Sends a request with ``body`` as JSON, and returns the parsed JSON of the reply.

        Repeats an unanswered request for at most ``patience`` seconds, but not after the deadline set by :meth:`limit`.

        Args:
            longest: maximum seconds of each attempt.

        Raises:
            StoreRefusedError: the server refuses the request.
            GridError: the server does not answer in time.
        """

        def request() -> Any:
            self._client.timeout = httpx.Timeout(min(longest, max(0.1, self._until - monotonic())))
            content = dump_json(body) if body is not None else None
            reply = self._client.request(method, path, content=content, headers=_JSON)
            if reply.status_code in _LATER:
                raise TroubleError(f"status {reply.status_code}")
            if reply.status_code >= _REFUSED:
                raise StoreRefusedError(f"the {self.noun} {self.url}: {self._reason(reply)}", reply.status_code)
            try:
                return decode_json(reply.content)
            except ValueError as error:
                raise StoreRefusedError(
                    f"{self.url}{path} does not answer as a {self.noun}; give its address."
                ) from error

        return self.repeat(request, patience)

    def _reason(self, reply: httpx.Response) -> str:
        """Returns the sentence in a refusal."""
        if reply.status_code == _NOT_FOUND:
            return f"it has no {reply.request.url.path}; {self.absent(reply.request.url.path)}"
        try:
            found = decode_json(reply.content)
            error = found.get("error", found.get("message"))
            return str(error["message"] if isinstance(error, dict) else error)
        except (ValueError, KeyError, TypeError, AttributeError):
            return f"status {reply.status_code}"


S = TypeVar("S", bound=InferenceServer)


def on_all(servers: Sequence[S], step: Callable[[S], None]) -> None:
    """Calls ``step`` with each server in parallel threads; raises the first error after all calls have ended.

    Raises:
        EngineError: a server refuses or does not answer; the message names it.
    """
    try:
        with ThreadPoolExecutor(len(servers), "servers") as pool:
            for job in as_completed([pool.submit(step, server) for server in servers]):
                job.result()
    except StoreRefusedError as refusal:
        raise EngineError(first_line(refusal)) from refusal


def after_failure(server: S, step: Callable[[S], None]) -> None:
    """Calls ``step(server)`` to clean up after a failed update; repeats unanswered requests for at most one second.

    Errors of ``step`` propagate.
    """
    server.limit(1.0)
    step(server)
