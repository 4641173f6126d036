"""Process of a store: its socket, its signals and its end."""

import asyncio
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from threading import Thread

from engine.errors import LaunchError, first_line
from engine.outer.store.store import Store

try:
    import starlette  # noqa: F401
    import uvicorn

    from engine.outer.http.server import StoreServer
except ImportError as error:
    raise LaunchError(
        f"a store serves by starlette and uvicorn, of which {error.name} is not installed; run: pip install "
        "'trine[outer]'."
    ) from error

_GRACE_SECONDS = 3


def check_host(host: str, token: str) -> None:
    """Refuses an address that other hosts reach if there is no token.

    Raises:
        LaunchError: names the address.
    """
    if not token and not is_loopback(host):
        raise LaunchError(
            f"--host {host} serves other hosts, and a store without a token serves its own only; set TRINE_OUTER_TOKEN "
            "or outer.token_file, or leave --host out."
        )


def is_loopback(host: str) -> bool:
    """Returns True if only this host reaches the address."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listen(host: str, port: int) -> socket.socket:
    """Returns a socket at an address; port 0 is any free one.

    Raises:
        LaunchError: the address is in use, or not one of this host.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        raise LaunchError(
            f"the store cannot listen at {host} port {port} ({first_line(error)}); give an address of this host with "
            "--host, and a free port with --port."
        ) from error


def address_of(listening: socket.socket) -> str:
    """Returns the address of a socket as a site has it."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(store: Store, token: str, listening: socket.socket, ready: Callable[[], None]) -> None:
    """Serves a store until SIGTERM or SIGINT; answers what has arrived and closes the store.

    Raises:
        Exception: the error that has ended the store's ticks.
    """
    service = _Service(store, token)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, service.stop)
        ready()
        await service.run(listening)

    asyncio.run(run())
    service.raise_failure()


@contextmanager
def serving(store: Store, token: str, listening: socket.socket) -> Iterator[None]:
    """Serves a store in a thread of this process, such as a site's rank 0, until the block ends.

    Raises:
        Exception: the error that has ended the store's ticks.
    """
    service, loop = _Service(store, token), asyncio.new_event_loop()
    thread = Thread(
        target=loop.run_until_complete, args=(service.run(listening),), name="trine-outer-store", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(service.stop)
        thread.join()
        loop.close()
    service.raise_failure()


class _Service:
    """Application and server of one store."""

    def __init__(self, store: Store, token: str) -> None:
        self._application = StoreServer(store, token)
        # ASGI applications have loose types
        config = uvicorn.Config(
            self._application,
            log_level="warning",
            access_log=False,
            ws="none",
            timeout_graceful_shutdown=_GRACE_SECONDS,
        )
        self._server = uvicorn.Server(config)
        self._application.on_failure = self._end

    async def run(self, listening: socket.socket) -> None:
        """Answers requests until ``stop``; leaves signals to the caller."""
        await self._server._serve([listening])

    def stop(self) -> None:
        """Ends the service after the requests under way; called in the thread of its loop."""
        self._application.end_waits()
        self._end()

    def raise_failure(self) -> None:
        """Raises the error that has ended the store's ticks."""
        if self._application.failure is not None:
            raise self._application.failure

    def _end(self) -> None:
        self._server.should_exit = True
