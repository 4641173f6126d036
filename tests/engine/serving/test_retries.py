"""Repeated requests: statuses, pauses and patience, for remote models and stores alike."""

from time import monotonic

import httpx
import pytest

from engine.web.retries import TroubleError, refuse_trouble, repeat_request, sentence_of


class CallerError(Exception):
    """Error of a caller."""


def repeated(replies: list[httpx.Response | Exception], seconds: float) -> tuple[httpx.Response, list[float]]:
    """Return the reply that ended the repetition, and the pauses before it."""
    pauses: list[float] = []

    def attempt() -> httpx.Response:
        reply = replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        refuse_trouble(reply)
        return reply

    until = monotonic() + seconds

    def describe(error: Exception) -> CallerError:
        return CallerError(str(error))

    return repeat_request(attempt, lambda: until - sum(pauses), describe, pauses.append), pauses


def test_trouble_is_repeated_with_growing_pauses_and_after_what_the_server_asks() -> None:
    replies: list[httpx.Response | Exception] = [
        httpx.ReadError("lost"), httpx.Response(503), httpx.Response(408),
        httpx.Response(429, headers={"retry-after": "7"}),
        httpx.Response(500), httpx.Response(404, json={"detail": "none."}),
    ]  # fmt: skip
    reply, pauses = repeated(replies, 60.0)
    assert (reply.status_code, sentence_of(reply)) == (404, "none.")
    for pause, least in zip(pauses, (0.025, 0.05, 0.1, 3.5, 0.4), strict=True):
        assert least <= pause <= 2 * least


def test_a_final_reply_is_no_trouble_and_patience_ends() -> None:
    final = httpx.Response(500, json={"detail": "the command failed.", "final": True})
    assert repeated([final], 1.0) == (final, [])
    with pytest.raises(CallerError, match="busy"):
        repeated([httpx.Response(503, json={"error": "busy."}) for _ in range(99)], 1.0)
    with pytest.raises(TroubleError) as found:
        refuse_trouble(httpx.Response(502))
    assert not found.value.described and str(found.value) == "status 502"
