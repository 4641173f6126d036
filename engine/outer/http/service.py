"""Process of a store: its socket, its signals and its end."""

import asyncio
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from ipaddress import ip_address
from pathlib import Path
from threading import Thread
from typing import Any, cast
from urllib.parse import urlsplit

from engine.config import Config
from engine.config.outer_section import OuterConfig, shared_settings
from engine.errors import LaunchError, first_line
from engine.outer.fragments import Fragment
from engine.outer.http.open_link import read_token
from engine.outer.store.store import Store

try:
    import starlette  # noqa: F401
    import uvicorn

    from engine.outer.http.line import HttpLink
    from engine.outer.http.server import StoreServer
except ImportError as error:
    raise LaunchError(
        f"a store serves by starlette and uvicorn, but {error.name} is not installed; run: pip install 'trine[outer]'."
    ) from error

_GRACE_SECONDS, _IDLE_SECONDS = 3, 60


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
        listening = socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        raise LaunchError(
            f"the store cannot listen at {host} port {port} ({first_line(error)}); give an address of this host with "
            "--host, and a free port with --port."
        ) from error
    # asyncio sets it only on sockets with an explicit protocol; without it, each reply waits 40 ms for a delayed ACK
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


def address_of(listening: socket.socket) -> str:
    """Returns the address at which sites reach a socket."""
    host, port = listening.getsockname()[:2]
    if ip_address(host).is_unspecified:
        host = socket.gethostname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class HttpService:
    """HTTP server of an application on a socket."""

    def __init__(self, application: object, listening: socket.socket) -> None:
        self._listening = listening
        self._server = _Server(
            uvicorn.Config(
                cast(Any, application),  # ASGI applications have loose types
                log_level="warning",
                access_log=False,
                ws="none",
                timeout_keep_alive=_IDLE_SECONDS,
                timeout_graceful_shutdown=_GRACE_SECONDS,
            )
        )

    async def run(self) -> None:
        """Serves until ``stop``; answers the requests that have arrived."""
        await self._server.serve([self._listening])

    def stop(self) -> None:
        """Ends the server; call it in the thread of its event loop."""
        self._server.should_exit = True


class StoreService(HttpService):
    """HTTP server of a store on a socket."""

    def __init__(self, store: Store, token: str, listening: socket.socket) -> None:
        self._application = StoreServer(store, token)
        super().__init__(self._application, listening)
        self._application.on_failure = self.stop

    async def run(self) -> None:
        """Serves until ``stop``.

        Raises:
            Exception: the error that has ended the store's ticks.
        """
        await super().run()
        if self._application.failure is not None:
            raise self._application.failure

    def stop(self) -> None:
        """Ends the server, and all requests that wait; call it in the thread of its event loop."""
        self._application.end_waits()
        super().stop()


def serve(store: Store, token: str, listening: socket.socket, ready: Callable[[], None]) -> None:
    """Serves a store until SIGTERM or SIGINT."""

    async def run() -> None:
        service = StoreService(store, token, listening)
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, service.stop)
        ready()
        await service.run()

    asyncio.run(run())


class _Server(uvicorn.Server):
    """Server without signal handlers of its own, which would end the process by the signal."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves the signals to ``serve``."""
        yield


def serving(store: Store, token: str, listening: socket.socket) -> AbstractContextManager[None]:
    """Serves a store in a thread of this process until the block ends.

    Raises:
        Exception: the error that has ended the store's ticks.
    """
    return in_thread(StoreService(store, token, listening))


@contextmanager
def in_thread(service: HttpService) -> Iterator[None]:
    """Serves in a thread of this process until the block ends; raises an error that has ended the service."""
    loop = asyncio.new_event_loop()
    failures: list[BaseException] = []

    def run() -> None:
        try:
            loop.run_until_complete(service.run())
        except BaseException as error:
            failures.append(error)

    thread = Thread(target=run, name="trine-http", daemon=True)
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(service.stop)
        thread.join()
        loop.close()
    if failures:
        raise failures[0]


class HostedLink(HttpLink):
    """Connection to a store of this process; the store ends when the site leaves.

    Raises:
        LaunchError: the address cannot be served, or a store without a token would serve other hosts.
    """

    def __init__(self, config: Config, outer: OuterConfig, fragments: Sequence[Fragment]) -> None:
        token, address = read_token(outer), urlsplit(outer.urls[0])
        host = address.hostname or ""
        check_host(host, token)
        settings = shared_settings(outer, config.optimizer, config.gradient_clipping)
        folder = Path(outer.folder) if outer.folder is not None else None
        self._served = ExitStack()
        listening = self._served.enter_context(listen(host, address.port or 80))
        store = Store(settings, folder, snapshot_every=outer.snapshot_every)
        self._served.enter_context(serving(store, token, listening))
        super().__init__(outer.urls, fragments, token)

    def leave(self, life: int) -> None:
        """Ends the life, and the store after the requests under way."""
        super().leave(life)
        self._served.close()
