"""Messages between the monitors of a job: one JSON object a line, over TCP, from each host to the first one and back.

    monitor of host A (hub)   <--- hello, views, bye ---   monitor of host B (spoke)
                              ---- stacks, end, over --->  monitor of host C (spoke)

Neither end ever blocks: a host whose network is down, or whose monitor stands still, delays nobody.
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
"""Bytes after which a line whose other end takes nothing is given up."""
_RECONNECT_SECONDS = 1.0
"""Between two attempts to connect; one that has not succeeded by then is given up."""


@dataclass(slots=True)
class Line:
    """One connection."""

    link: socket.socket
    heard: float
    """When the other end was last heard of."""
    host: str = ""
    ranks: tuple[int, ...] = ()
    open: bool = True
    _inward: bytes = b""
    _outward: bytes = b""

    def send(self, message: Mapping[str, Any]) -> None:
        """Send as much as the kernel takes now; ``flush`` sends the rest."""
        self._outward += json.dumps(message).encode() + b"\n"
        self.flush()
        if len(self._outward) > _MOST_UNSENT:
            self.close()

    def flush(self) -> None:
        """Send what is left."""
        try:
            while self.open and self._outward:
                self._outward = self._outward[self.link.send(self._outward) :]
        except BlockingIOError:
            pass
        except OSError:
            self.close()

    @property
    def all_sent(self) -> bool:
        """Whether the kernel has taken everything; of a new connection, that it has come about."""
        return not self._outward

    def receive(self) -> Iterator[Message]:
        """Messages that have come."""
        try:
            while self.open:
                piece = self.link.recv(_PIECE)
                if not piece:
                    self.close()
                self._inward += piece
                self.heard = time.monotonic() if piece else self.heard
        except BlockingIOError:
            pass
        except OSError:
            self.close()
        *whole, self._inward = self._inward.split(b"\n")
        for text in whole:
            try:
                message = json.loads(text)
            except ValueError:
                self.close()  # this is no monitor
                return
            if isinstance(message, dict):
                yield message

    def close(self) -> None:
        """End the connection."""
        self.open = False
        self.link.close()


@dataclass(slots=True)
class Hub:
    """The end of the first host, to which all others connect.

    Args:
        job: a word that only this job knows; who does not say it is not heard.
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
        """Where it listens."""
        return int(self.listener.getsockname()[1])

    def poll(self, seconds: float, also: Sequence[int] = ()) -> list[tuple[Line, Message]]:
        """Messages of other hosts; waits at most ``seconds`` for one, or until one of ``also`` is readable."""
        links = [self.listener.fileno(), *(line.link.fileno() for line in self.lines if line.open)]
        select.select([*links, *also], [], [], seconds)
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
                    line.close()  # a stranger
                    break
                found.append((line, message))
        self.lines = [line for line in self.lines if line.open or line.host]
        return found

    def broadcast(self, message: Message) -> None:
        """Tell all other hosts."""
        for line in self.lines:
            if line.open:
                line.send(message)

    def close(self) -> None:
        """End all connections."""
        for line in self.lines:
            line.close()
        self.listener.close()


class Spoke:
    """The end of another host. It connects again when the line breaks.

    Args:
        hello: first message of each connection.
    """

    def __init__(self, address: str, port: int, hello: Message) -> None:
        self._place, self._hello = (address, port), hello
        self._line: Line | None = None
        self._opening = False
        """Whether the line has not come about yet."""
        self._tried = float("-inf")
        self.heard = time.monotonic()
        """When the hub was last reached."""

    def poll(self, seconds: float, also: Sequence[int] = ()) -> list[Message]:
        """Messages of the hub; waits at most ``seconds`` for one, or until one of ``also`` is readable."""
        if (self._line is None or self._opening or not self._line.open) and self._due():
            self._connect()
        links = [self._line.link.fileno()] if self._line is not None and self._line.open else []
        select.select([*links, *also], links if self._opening else [], [], seconds)
        if self._line is None:
            return []
        self._line.flush()
        found = list(self._line.receive())
        if self._opening and self._line.open and self._line.all_sent:
            self._opening, self._line.heard = False, time.monotonic()
        self.heard = max(self.heard, self._line.heard)
        return found

    def send(self, message: Message) -> None:
        """Tell the hub, if it can be reached."""
        if self._line is not None and self._line.open and not self._opening:
            self._line.send(message)

    def close(self) -> None:
        """End the connection."""
        if self._line is not None:
            self._line.flush()
            self._line.close()

    def _due(self) -> bool:
        return time.monotonic() - self._tried >= _RECONNECT_SECONDS

    def _connect(self) -> None:
        """Begin a connection; a host that is gone does not even refuse it, so nobody waits for its end."""
        if self._line is not None:
            self._line.close()
        self._tried, self._line, self._opening = time.monotonic(), None, True
        try:
            family, *_, place = socket.getaddrinfo(*self._place, type=socket.SOCK_STREAM)[0]
            link = socket.socket(family, socket.SOCK_STREAM)
        except OSError:
            return
        link.setblocking(False)
        link.connect_ex(place)  # what becomes of it is told by the first send
        self._line = Line(link, self.heard)
        self._line.send(self._hello)
