"""End of a service whose command does not end: every client is answered 503 with a sentence before the process ends."""

import hashlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread, Timer
from typing import Any

import httpx
import pytest

from engine.config.serve_section import ServeConfig
from engine.errors import EngineError
from engine.serving.host import service
from engine.serving.host.front import LedgerSource, open_front
from engine.serving.host.service import answering_late_stops
from tests.engine.serving.wire.tinker_calls import BASE, MODEL


def poll(url: str, replies: list[Any]) -> Thread:
    """Sends a command, and polls its result in a thread."""
    client = httpx.Client(base_url=f"{url}/api/v1/", timeout=20)
    while client.post("client/config", json={}).status_code == 503:
        pass
    session = client.post("create_session", json={"tags": []}).json()["session_id"]
    body = {"session_id": session, "model_seq_id": 0, "base_model": BASE}
    key = client.post("create_model", json=body).json()["request_id"]

    def wait() -> None:
        replies.append(client.post("retrieve_future", json={"request_id": key}))
        client.close()

    thread = Thread(target=wait)
    thread.start()
    return thread


def began(source: LedgerSource) -> None:
    """Takes the command, as a loop does whose ranks do not finish it; returns once the poll waits for it."""
    while (taken := source.take(0.1)) is None:
        pass
    entry = source._ledger.find(taken[0])
    while not entry.listeners:
        time.sleep(0.01)


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[ServeConfig]:
    """Configuration of a service on a free port."""
    yield ServeConfig(port=0, folder=str(tmp_path))


def test_a_lost_rank_is_503_with_its_sentence_for_waiting_and_later_requests(serve: ServeConfig) -> None:
    lines, replies = list[str](), list[Any]()

    def fail() -> None:
        with open_front(serve, MODEL, lines.append) as source:
            list(iter(lambda: source.take(0), None))  # nothing is stored
            url = lines[0].split()[2].rstrip(":")
            thread = poll(url, replies)
            began(source)
            source.end("all ranks have gone")
            thread.join(20)
            replies.append(httpx.post(f"{url}/api/v1/create_session", json={"tags": []}))

    fail()
    assert [reply.status_code for reply in replies] == [503, 503]
    for reply in replies:
        assert reply.json()["detail"].startswith("all ranks have gone; repeat the request after the next start, which")
    assert replies[0].headers["retry-after"] == "2"


def test_an_error_of_the_loop_is_the_sentence_of_the_polls_that_wait(serve: ServeConfig) -> None:
    lines, replies, threads = list[str](), list[Any](), list[Thread]()

    def fail() -> None:
        with open_front(serve, MODEL, lines.append) as source:
            list(iter(lambda: source.take(0), None))
            threads.append(poll(lines[0].split()[2].rstrip(":"), replies))
            began(source)
            raise EngineError("rank 0 has lost rank 3.")

    with pytest.raises(EngineError, match="lost rank 3"):
        fail()
    threads[0].join(20)
    assert replies[0].status_code == 503
    assert "has failed: rank 0 has lost rank 3; repeat the request" in replies[0].json()["detail"]


@pytest.mark.parametrize("ends", [True, False])
def test_a_signal_is_heard_while_the_main_thread_is_in_native_code(monkeypatch: pytest.MonkeyPatch, ends: bool) -> None:
    said, heard = list[str](), Event()
    monkeypatch.setattr(service, "STOP_SECONDS", 20.0 if ends else 0.01)
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.set())
    try:
        with answering_late_stops(said.append):
            timer = Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM))
            timer.start()
            if ends:
                timer.join()
            else:
                hashlib.pbkdf2_hmac("sha256", b"a", b"b", 2_000_000)  # one call in C, in which no Python handler runs
                assert "a rank has ended, and a command has not finished" in said[0]
    finally:
        signal.signal(signal.SIGTERM, before)
    assert len(said) == (0 if ends else 1) and heard.wait(5)
