"""Messages between the monitors of a job, and that none of them waits for a host that is gone."""

import os
import resource
import socket
import time
from collections.abc import Iterator

import pytest

from engine.watchdog.exchange import Hub, Message, Spoke

JOB, HERE = "a job", "127.0.0.1"
HELLO = {"hello": JOB, "host": "node1", "ranks": [2, 3]}


@pytest.fixture
def hub() -> Iterator[Hub]:
    """The end of the first host."""
    hub = Hub(JOB, HERE)
    yield hub
    hub.close()


def heard(hub: Hub, spoke: Spoke, word: str) -> list[Message]:
    """What the hub hears until a message has ``word``."""
    found: list[Message] = []
    for _ in range(100):
        spoke.poll(0.01)
        found += [message for _, message in hub.poll(0.01)]
        if any(word in message for message in found):
            return found
    raise AssertionError(found)


def test_a_host_says_hello_and_then_what_its_ranks_do(hub: Hub) -> None:
    spoke = Spoke(HERE, hub.port, HELLO)
    spoke.poll(0.5)
    spoke.send({"views": []})
    assert heard(hub, spoke, "views") == [HELLO, {"views": []}]
    assert [(line.host, line.ranks) for line in hub.lines] == [("node1", (2, 3))]
    hub.broadcast({"alive": True})
    assert spoke.poll(0.5) == [{"alive": True}]
    spoke.close()


def test_a_hub_has_more_hosts_than_select_can_wait_for(hub: Hub) -> None:
    many = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (many[1], many[1]))
    taken = [os.open(os.devnull, os.O_RDONLY) for _ in range(1024)]
    try:
        spoke = Spoke(HERE, hub.port, HELLO)
        spoke.poll(0.5)
        assert heard(hub, spoke, "hello") == [HELLO]
        spoke.close()
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, many)


def test_what_is_nested_too_deeply_closes_its_line(hub: Hub) -> None:
    with socket.create_connection((HERE, hub.port)) as other:
        other.sendall(b"[" * 100_000 + b"\n")
        for _ in range(9):
            assert not hub.poll(0.01)
    assert not hub.lines


def test_the_last_message_of_a_hub_that_has_closed_is_read(hub: Hub) -> None:
    """A closing end with unread bytes resets the connection, so that sends fail before its last message is read."""
    spoke = Spoke(HERE, hub.port, HELLO)
    spoke.poll(0.5)
    heard(hub, spoke, "hello")
    spoke.send({"views": []})
    hub.broadcast({"end": "the cause"})
    hub.close()
    for _ in range(3):
        spoke.send({"views": []})
    assert spoke.poll(0.5) == [{"end": "the cause"}]
    spoke.close()


def test_nobody_waits_for_a_host_that_does_not_answer() -> None:
    """A full queue takes no connection, as a machine without power does: nothing comes back, not even a refusal."""
    with socket.create_server((HERE, 0), backlog=0) as silent:
        port = silent.getsockname()[1]
        queued = [socket.socket() for _ in range(3)]
        for link in queued:
            link.setblocking(False)
            link.connect_ex((HERE, port))
        spoke = Spoke(HERE, port, HELLO)
        before = spoke.heard
        began = time.monotonic()
        for _ in range(3):
            assert spoke.poll(0.0) == []
        assert time.monotonic() - began < 0.4  # a connection that is waited for takes half a second at least
        assert spoke.heard == before
        spoke.close()
        for link in queued:
            link.close()


def test_a_host_that_refuses_is_tried_again(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server((HERE, 0)) as gone:
        port = gone.getsockname()[1]
    spoke = Spoke(HERE, port, HELLO)
    before = spoke.heard
    for _ in range(3):
        assert spoke.poll(0.05) == []
    assert spoke.heard == before
    later = time.monotonic() + 2.0
    monkeypatch.setattr(time, "monotonic", lambda: later)
    monkeypatch.setattr(spoke, "_place", (HERE, hub.port))
    assert heard(hub, spoke, "hello") == [HELLO]
    assert spoke.heard == later
    spoke.close()
