"""Listening sockets of servers, and their addresses."""

import socket
from ipaddress import ip_address

from engine.errors import LaunchError, first_line


def is_loopback(host: str) -> bool:
    """Returns True if ``host`` is a loopback address or "localhost", which only this host can reach."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listen(host: str, port: int, server: str) -> socket.socket:
    """Returns a TCP socket that listens at ``host`` and ``port``; port 0 takes a free port.

    Args:
        server: name of the server for errors, such as "the store".

    Raises:
        LaunchError: the address is in use, or does not belong to this host.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family, backlog=1024)
    except (OSError, OverflowError) as error:
        raise LaunchError(
            f"{server} cannot listen at {host} port {port} ({first_line(error)}); give an address of this host with "
            "--host, and a free port with --port."
        ) from error
    # asyncio sets it only on sockets with an explicit protocol; without it, each reply waits 40 ms for a delayed ACK
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


def reachable(host: str) -> str:
    """Returns an address for clients of a server that listens at ``host``.

    If ``host`` is the unspecified address, such as 0.0.0.0, returns this host's name, else ``host``.
    """
    try:
        return socket.gethostname() if ip_address(host).is_unspecified else host
    except ValueError:
        return host


def address_of(listening: socket.socket, scheme: str = "http") -> str:
    """Returns the URL at which clients reach the server on the socket ``listening``, such as "http://host:8000"."""
    host, port = listening.getsockname()[:2]
    host = reachable(host)
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
