"""Uvicorn around an application, on a given socket."""

import asyncio
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any, cast

import uvicorn

_GRACE_SECONDS, _IDLE_SECONDS = 3, 60


class HostedApplication:
    """Uvicorn server that serves an ASGI application on a listening socket.

    Args:
        application: ASGI application.
        listening: listening socket; the caller closes it.
        before_stop: callback that ``stop`` calls first, to answer requests that wait for an event.
        options: options of ``uvicorn.Config``, such as ``ssl_certfile``.
    """

    def __init__(
        self, application: object, listening: socket.socket, before_stop: Callable[[], None], **options: Any
    ) -> None:
        self._listening, self._before_stop = listening, before_stop
        self._server = _Server(
            uvicorn.Config(
                cast(Any, application),  # ASGI applications have loose types
                log_level="warning",
                access_log=False,
                ws="none",
                timeout_keep_alive=_IDLE_SECONDS,
                timeout_graceful_shutdown=_GRACE_SECONDS,
                **options,
            )
        )

    async def run(self) -> None:
        """Serves until ``stop``, and answers all requests that have arrived before."""
        await self._server.serve([self._listening])

    def stop(self) -> None:
        """Stops the server after it has answered the requests that have arrived, or after 3 seconds.

        Call it in the thread of the server's event loop.
        """
        self._before_stop()
        self._server.should_exit = True


class _Server(uvicorn.Server):
    """Server without signal handlers of its own, which would end the process by the signal."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves the signals to the caller."""
        yield


def run_until_signal(hosted: HostedApplication, ready: Callable[[], None]) -> None:
    """Runs the server ``hosted`` in this thread until SIGTERM or SIGINT.

    Calls the callback ``ready`` just before the server begins to serve.
    """

    async def run() -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, hosted.stop)
        ready()
        await hosted.run()

    asyncio.run(run())


@contextmanager
def run_in_thread(hosted: HostedApplication, name: str) -> Iterator[None]:
    """Opens a context that runs the server ``hosted`` in a thread called ``name``, and stops it at the end.

    Raises:
        Exception: an error has ended the server; raised at the end of the context.
    """
    loop = asyncio.new_event_loop()
    failures: list[BaseException] = []

    def run() -> None:
        try:
            loop.run_until_complete(hosted.run())
        except BaseException as error:
            failures.append(error)

    thread = Thread(target=run, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        if not loop.is_closed() and thread.is_alive():
            loop.call_soon_threadsafe(hosted.stop)
        thread.join()
        loop.close()
    if failures:
        raise failures[0]
