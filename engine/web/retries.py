"""Requests that repeat until a server answers: one rule for statuses, pauses and patience.

repeats    broken connections, 408, 429, 5xx unless the reply is ``final``
pauses     50 ms, doubled up to 5 s, each of them between half and all of it; at least ``Retry-After``
"""

from collections.abc import Callable
from random import uniform
from time import monotonic, sleep
from typing import TypeVar

from engine.errors import GridError
from engine.web.json_text import parse_json

try:
    import httpx as httpx  # for all modules with requests, so that one error names it
except ImportError as error:
    raise GridError("requests to a server need httpx, which is not installed; run: pip install httpx.") from error

FOREVER = float("inf")
_FIRST_PAUSE, _LONGEST_PAUSE, _LONGEST_AFTER = 0.05, 5.0, 60.0
_LATER, _TROUBLE = (408, 429), 500
T = TypeVar("T")


class TroubleError(Exception):
    """Failure of an HTTP request that may succeed if it is repeated."""

    def __init__(self, why: str, described: bool = False, pause: float = 0.0) -> None:
        super().__init__(why)
        self.described, self.pause = described, pause
        """True if the server gave the sentence, and the seconds after which to repeat."""


def refuse_trouble(response: httpx.Response) -> None:
    """Raises if the status of ``response`` means that a repeated request may succeed.

    Raises:
        TroubleError: the status is 408, 429 or 5xx, and the JSON of the reply does not have "final": true.
    """
    status = response.status_code
    if (status in _LATER or status >= _TROUBLE) and field_of(response, "final") is not True:
        reason = sentence_of(response)
        raise TroubleError(reason or f"status {status}", bool(reason), _retry_after(response))


def repeat_request(
    attempt: Callable[[], T],
    until: Callable[[], float],
    describe: Callable[[Exception], Exception],
    pause: Callable[[float], object] = sleep,
) -> T:
    """Calls ``attempt`` until it succeeds, and returns its result.

    Repeats it after TroubleError and after connection errors, with growing pauses; raises any other error at once.

    Args:
        until: callback that returns the time (``monotonic``) after which no attempt begins.
        describe: callback, called with the error of each failed attempt; returns the error to raise if no attempt
            follows.
        pause: callback that waits for the given number of seconds.
    """
    seconds = _FIRST_PAUSE
    while True:
        try:
            return attempt()
        except (TroubleError, httpx.TransportError) as error:
            described = describe(error)
            wait = max(seconds, error.pause if isinstance(error, TroubleError) else 0.0)
            if monotonic() + wait > until():
                raise described from error
        pause(uniform(wait / 2, wait))
        seconds = min(2 * seconds, _LONGEST_PAUSE)


def field_of(response: httpx.Response, name: str) -> object:
    """Returns the value of the field ``name`` in the JSON object of ``response``.

    Returns None if there is no such field or object.
    """
    try:
        return parse_json(response.content).get(name)
    except ValueError:
        return None


def sentence_of(response: httpx.Response) -> str:
    """Returns the error sentence in the JSON of the reply ``response``: its field "error" or "detail", or ""."""
    return str(field_of(response, "error") or field_of(response, "detail") or "")


def _retry_after(response: httpx.Response) -> float:
    try:
        return min(_LONGEST_AFTER, float(response.headers.get("retry-after", 0)))
    except ValueError:
        return 0.0
