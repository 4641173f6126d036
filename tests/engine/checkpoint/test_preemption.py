"""SIGTERM as a request to stop: several signals at once are one request, and a later one ends the process."""

import os
import signal
import sys
import time
import warnings
from collections.abc import Iterator

import pytest

from engine.checkpoint.coordinator import EXIT_CODE, ONE_REQUEST_SECONDS, StopSignal


@pytest.fixture
def ended() -> Iterator[list[int]]:
    """What was there before: a handler of the user's, which hears the first signal and what an engine passes on."""
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    yield heard
    signal.signal(signal.SIGTERM, before)


def test_signals_at_once_are_one_request_and_a_later_one_insists(
    ended: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    stop = StopSignal()
    for later in (0.0, 0.1, ONE_REQUEST_SECONDS - 0.2):  # the scheduler's, torchrun's, and torchrun's on a slow machine
        now[0] += later
        signal.raise_signal(signal.SIGTERM)
        assert stop.asked and ended == [signal.SIGTERM]
    now[0] += 0.2
    signal.raise_signal(signal.SIGTERM)
    assert ended == [signal.SIGTERM] * 2


def test_what_was_there_comes_back(ended: list[int]) -> None:
    stop = StopSignal()
    stop.remove()
    signal.raise_signal(signal.SIGTERM)
    assert ended == [signal.SIGTERM] and not stop.asked


def test_two_engines_hear_the_same_signal_and_leave_in_any_order(ended: list[int]) -> None:
    first, second = StopSignal(), StopSignal()
    signal.raise_signal(signal.SIGTERM)
    assert first.asked and second.asked and ended == [signal.SIGTERM]
    third, fourth = StopSignal(), StopSignal()
    third.remove()  # from under the fourth
    signal.raise_signal(signal.SIGTERM)
    assert fourth.asked and not third.asked and ended == [signal.SIGTERM]
    for stop in (fourth, first, second):
        stop.remove()
    signal.raise_signal(signal.SIGTERM)
    assert ended == [signal.SIGTERM] * 2, "what was there before all of them"


def test_a_handler_of_the_users_that_exits_does_so_after_the_checkpoint() -> None:
    def leave(number: int, frame: object) -> None:
        sys.exit(3)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        stop = StopSignal()
        signal.raise_signal(signal.SIGTERM)
        assert stop.asked and stop.code == 3
        stop.remove()
        with pytest.raises(SystemExit):
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    fresh = StopSignal()
    assert fresh.code == EXIT_CODE
    fresh.remove()


def test_a_forked_child_is_ended_at_once() -> None:
    """A worker of a data loader, say, which never makes a step."""
    stop, (ours, theirs) = StopSignal(), os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads
        child = os.fork()
    if not child:
        os.write(theirs, b"here")  # Python forgets what comes before that
        time.sleep(60)
        os._exit(0)
    os.read(ours, 4)
    os.kill(child, signal.SIGTERM)
    _, status = os.waitpid(child, 0)
    stop.remove()
    assert os.WTERMSIG(status) == signal.SIGTERM and not stop.asked
