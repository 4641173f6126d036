"""Process of a store: its socket, its signals and its end."""

import socket
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from urllib.parse import urlsplit

from engine.config import Config
from engine.config.outer_section import OuterConfig, shared_settings
from engine.errors import LaunchError
from engine.outer.fragments import Fragment
from engine.outer.http.open_link import read_token
from engine.outer.store.store import Store
from engine.web.sockets import is_loopback, listen

try:
    import starlette  # noqa: F401

    from engine.outer.http.line import HttpLink
    from engine.outer.http.server import StoreServer
    from engine.web.hosted import HostedApplication, run_in_thread, run_until_signal
except ImportError as error:
    raise LaunchError(
        f"a store serves by starlette and uvicorn, but {error.name} is not installed; run: pip install 'trine[outer]'."
    ) from error

SERVER = "the store"
"""Name of the server in errors."""


def check_host(host: str, token: str) -> None:
    """Raises unless ``host`` is a loopback address or there is a token.

    Raises:
        LaunchError: ``host`` is open to other hosts, and ``token`` is empty.
    """
    if not token and not is_loopback(host):
        raise LaunchError(
            f"--host {host} lets other hosts connect, and a store serves them only with a token; set the environment "
            "variable TRINE_OUTER_TOKEN or the key outer.token_file, or leave --host out."
        )


class StoreService(HostedApplication):
    """HTTP server for ``store`` on the socket ``listening``; it also calls ``Store.tick`` periodically.

    ``token``: secret that requests must carry; "": they need none.
    """

    def __init__(self, store: Store, token: str, listening: socket.socket) -> None:
        self._application = StoreServer(store, token)
        super().__init__(self._application, listening, lambda: None)
        self._application.on_failure = self.stop

    async def run(self) -> None:
        """Serves until ``stop``, and answers all requests that have arrived before.

        Raises:
            Exception: the error that has stopped the store's periodic work.
        """
        await super().run()
        if self._application.failure is not None:
            raise self._application.failure


def serve_store(store: Store, token: str, listening: socket.socket, ready: Callable[[], None]) -> None:
    """Serves ``store`` on the socket ``listening`` until SIGTERM or SIGINT; calls ``ready`` once the server listens.

    ``token``: secret that requests must carry; "": they need none.
    """
    run_until_signal(StoreService(store, token, listening), ready)


def serving(store: Store, token: str, listening: socket.socket) -> AbstractContextManager[None]:
    """Returns a context in which a thread of this process serves ``store`` on the socket ``listening``.

    Raises:
        Exception: an error has stopped the store's periodic work; it is raised at the end of the context.
    """
    return run_in_thread(StoreService(store, token, listening), "trine-outer-store")


class HostedLink(HttpLink):
    """Connection of a site to its only store, which runs in the site's own process until the site leaves.

    Raises:
        LaunchError: the store cannot listen at its address, or would serve other hosts without a token.
    """

    def __init__(self, config: Config, outer: OuterConfig, fragments: Sequence[Fragment]) -> None:
        token, address = read_token(outer), urlsplit(outer.urls[0])
        host = address.hostname or ""
        check_host(host, token)
        settings = shared_settings(outer, config.optimizer, config.gradient_clipping)
        folder = Path(outer.folder) if outer.folder is not None else None
        self._served = ExitStack()
        listening = self._served.enter_context(listen(host, address.port or 80, SERVER))
        store = Store(settings, folder, snapshot_every=outer.snapshot_every)
        self._served.enter_context(serving(store, token, listening))
        super().__init__(outer.urls, fragments, token)

    def leave(self, life: int) -> None:
        """Ends the site's run on the store, and stops the store after its current requests."""
        super().leave(life)
        self._served.close()
