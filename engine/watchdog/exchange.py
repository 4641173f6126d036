"""Messages between the monitors of a job: JSON lines over TCP, between the first host and each other one.

    monitor of host A (hub)   <--- hello, views, bye ---   monitor of host B (spoke)
                              ---- stacks, end, over --->  monitor of host C (spoke)

No end ever blocks, so that a host with a broken network delays no other.
"""

import json
import select
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]
_PIECE = 1 << 16
_MOST_UNSENT = 1 << 22
"""Unsent bytes after which a connection is closed, because its other end reads nothing."""
_RECONNECT_SECONDS = 1.0
"""Seconds between two attempts to connect, and the limit of an attempt."""


def await_any(readable: Sequence[int], seconds: float, writable: Sequence[int] = ()) -> bool:
    """Waits at most ``seconds`` until a file descriptor of ``readable`` or ``writable`` is ready; returns True if one
    is. Numbers above 1023 are allowed, which ``select`` refuses.
    """
    ready = select.poll()
    for descriptor in readable:
        ready.register(descriptor, select.POLLIN)
    for descriptor in writable:
        ready.register(descriptor, select.POLLIN | select.POLLOUT)
    return bool(ready.poll(1e3 * seconds))


@dataclass(slots=True)
class Line:
    """TCP connection between the watchdog processes (monitors) of two hosts. A message is a dict, sent as a line of
    JSON. No method blocks.
    """

    link: socket.socket
    heard: float
    """Time of the last received message."""
    host: str = ""
    ranks: tuple[int, ...] = ()
    open: bool = True
    _inward: bytes = b""
    _outward: bytes = b""
    _broken: bool = False
    """True after a failed send."""

    def send(self, message: Mapping[str, Any]) -> None:
        """Queues ``message``, and sends queued bytes as far as possible without blocking. Closes the connection if more
        than 4 MiB remain queued.
        """
        self._outward += json.dumps(message).encode() + b"\n"
        self.flush()
        if len(self._outward) > _MOST_UNSENT:
            self.close()

    def flush(self) -> None:
        """Sends queued messages as far as possible without blocking, and drops them after a network error, on which
        ``receive`` closes the connection.
        """
        try:
            while self.open and self._outward:
                self._outward = self._outward[self.link.send(self._outward) :]
        except BlockingIOError:
            pass
        except OSError:
            # the other side may have sent its last message, such as the cause of a hang, before it closed
            self._outward, self._broken = b"", True

    @property
    def all_sent(self) -> bool:
        """True if the kernel has accepted all sent messages; the other end may not have received them yet."""
        return not self._outward

    def receive(self) -> Iterator[Message]:
        """Yields the complete messages that have arrived, without waiting. Closes the connection if the other side has
        closed it, or after an error or a message that is not JSON.
        """
        try:
            while self.open:
                piece = self.link.recv(_PIECE)
                if not piece:
                    self.close()
                self._inward += piece
                self.heard = time.monotonic() if piece else self.heard
        except BlockingIOError:
            if self._broken:
                self.close()
        except OSError:
            self.close()
        *whole, self._inward = self._inward.split(b"\n")
        for text in whole:
            try:
                message = json.loads(text)
            except (ValueError, RecursionError):
                self.close()  # the other end is no monitor
                return
            if isinstance(message, dict):
                yield message

    def close(self) -> None:
        """Closes the TCP connection; unsent messages are lost."""
        self.open = False
        self.link.close()


@dataclass(slots=True)
class Hub:
    """TCP server in the watchdog monitor of the first host; the monitors of all other hosts connect to it.

    Args:
        job: secret of this job; a connection without it is closed.
        address: host name or IP address on which the server listens.
    """

    job: str
    address: str
    listener: socket.socket = field(init=False)
    lines: list[Line] = field(default_factory=list)

    def __post_init__(self) -> None:
        family = socket.getaddrinfo(self.address, 0, type=socket.SOCK_STREAM)[0][0]
        self.listener = socket.create_server((self.address, 0), family=family, backlog=4096)
        self.listener.setblocking(False)

    @property
    def port(self) -> int:
        """TCP port of the listening socket."""
        return int(self.listener.getsockname()[1])

    def poll(self, seconds: float, also: Sequence[int] = ()) -> list[tuple[Line, Message]]:
        """Returns the arrived messages of other hosts, each with its connection.

        Accepts new connections and sends queued messages.

        Args:
            seconds: longest wait; it ends earlier if a connection or a descriptor in ``also`` is readable.
            also: other file descriptors that end the wait; this method does not read them.
        """
        links = [self.listener.fileno(), *(line.link.fileno() for line in self.lines if line.open)]
        await_any([*links, *also], seconds)
        while True:
            try:
                link, _ = self.listener.accept()
            except OSError:
                break
            link.setblocking(False)
            self.lines.append(Line(link, time.monotonic()))
        found = []
        for line in self.lines:
            line.flush()
            for message in line.receive():
                if "hello" in message and message["hello"] == self.job:
                    line.host, line.ranks = str(message["host"]), tuple(message["ranks"])
                elif not line.host:
                    line.close()  # not a monitor of this job
                    break
                found.append((line, message))
        self.lines = [line for line in self.lines if line.open or line.host]
        return found

    def broadcast(self, message: Message) -> None:
        """Sends a message to all connected hosts without blocking; ``poll`` sends the bytes that remain."""
        for line in self.lines:
            if line.open:
                line.send(message)

    def close(self) -> None:
        """Closes the connections to all hosts and the listening socket."""
        for line in self.lines:
            line.close()
        self.listener.close()


class Spoke:
    """TCP client in the watchdog process (monitor) of every host except the first.

    It connects to the hub, the monitor of the first host; ``poll`` connects again after a break.

    Args:
        address, port: host name or IP address and TCP port of the hub.
        hello: first message on each new connection, which identifies this host.
    """

    def __init__(self, address: str, port: int, hello: Message) -> None:
        self._place, self._hello = (address, port), hello
        self._line: Line | None = None
        self._opening = False
        """True until the connection is established."""
        self._tried = float("-inf")
        self.heard = time.monotonic()
        """Time of the last contact with the hub."""

    def poll(self, seconds: float, also: Sequence[int] = ()) -> list[Message]:
        """Returns the arrived messages of the hub, and sends queued messages.

        Without a connection, it tries to connect, at most once a second.

        Args:
            seconds: longest wait; it ends earlier if the connection or a descriptor in ``also`` is readable.
            also: other file descriptors that end the wait; this method does not read them.
        """
        if (self._line is None or self._opening or not self._line.open) and self._due():
            self._connect()
        links = [self._line.link.fileno()] if self._line is not None and self._line.open else []
        await_any([*links, *also], seconds, links if self._opening else ())
        if self._line is None:
            return []
        self._line.flush()
        found = list(self._line.receive())
        if self._opening and self._line.open and self._line.all_sent:
            self._opening, self._line.heard = False, time.monotonic()
        self.heard = max(self.heard, self._line.heard)
        return found

    def send(self, message: Message) -> None:
        """Sends a message to the hub without blocking; ``poll`` sends the bytes that remain.

        Drops the message if there is no connection.
        """
        if self._line is not None and self._line.open and not self._opening:
            self._line.send(message)

    def close(self) -> None:
        """Sends queued messages as far as possible without blocking, and closes the connection."""
        if self._line is not None:
            self._line.flush()
            self._line.close()

    def _due(self) -> bool:
        return time.monotonic() - self._tried >= _RECONNECT_SECONDS

    def _connect(self) -> None:
        """Begins a connection without waiting for it, because a dead host does not even refuse it."""
        if self._line is not None:
            self._line.close()
        self._tried, self._line, self._opening = time.monotonic(), None, True
        try:
            family, *_, place = socket.getaddrinfo(*self._place, type=socket.SOCK_STREAM)[0]
            link = socket.socket(family, socket.SOCK_STREAM)
        except OSError:
            return
        link.setblocking(False)
        link.connect_ex(place)  # the first send shows its result
        self._line = Line(link, self.heard)
        self._line.send(self._hello)
