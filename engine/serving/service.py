"""Training service on the ranks: rank 0 answers HTTP in a thread, and all ranks run its commands in one order.

start    replay of the journal -> HTTP server -> commands until SIGTERM or SIGINT on rank 0
end      the server stops, all ranks leave the loop after the same command, and close their engines
"""

import logging
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any

from engine.errors import EngineError
from engine.parallel.comm.host_group import HostGroup
from engine.serving.commands import Command, Result, Stop
from engine.serving.entry import FutureEntry
from engine.serving.executor import Executor
from engine.serving.ledger import Ledger
from engine.serving.loop import CommandLoop
from engine.serving.restart import Restart

logger = logging.getLogger("trine")

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class LedgerSource:
    """Commands of the ledger for the command loop: those of the journal first, then those of clients.

    Args:
        ledger: ledger of rank 0.
        restart: commands that an earlier process had accepted; None: there is no journal.
        begin: called once after the replay, before the first command of a client; it starts the HTTP server.
    """

    def __init__(self, ledger: Ledger, restart: Restart | None, begin: Callable[[], None]) -> None:
        self._ledger, self._begin = ledger, begin
        self._replay: Iterator[FutureEntry] | None = restart.entries() if restart is not None else iter(())
        self._running: FutureEntry | None = None
        self._stopped = False
        self.replayed = 0
        """Number of commands of the journal that were run again."""

    def stop(self) -> None:
        """Ends the loop of all ranks after the command that runs."""
        self._stopped = True

    def take(self, seconds: float) -> tuple[str, Command] | None:
        """Returns the next command with its key; None if none has come within ``seconds``."""
        if self._stopped:
            return "", Stop()
        entry = self._again() if self._replay is not None else None
        if entry is None:
            entry = self._ledger.queue.next(seconds)
        if entry is None or entry.command is None:
            return None
        self._running = entry
        return entry.key, entry.command

    def finish(self, key: str, result: Result) -> None:
        """Stores the result of the command that was taken last."""
        entry, self._running = self._running, None
        assert entry is not None and entry.key == key, "one command runs at a time"
        self._ledger.finish(entry, result)

    def _again(self) -> FutureEntry | None:
        """Returns the next command of the journal; after the last one, lets clients in."""
        assert self._replay is not None
        entry = next(self._replay, None)
        if entry is None:
            self._replay = None
            if self.replayed:
                logger.info("the service has run %d commands of its journal again", self.replayed)
            self._begin()
            return None
        self.replayed += 1
        return entry


def serve_ranks(
    executor: Executor, host: HostGroup, open_source: Callable[[], AbstractContextManager[LedgerSource]] | None
) -> None:
    """Runs the service on this rank until rank 0 gets SIGTERM or SIGINT. Every rank calls it.

    Args:
        executor: runs commands on this rank.
        host: messages between the ranks' host memories.
        open_source: opens ledger and HTTP server on rank 0; None on other ranks.

    Raises:
        EngineError: a rank is lost, or the journal cannot be read.
    """
    try:
        if open_source is None:
            with _signals_to(lambda: None):  # rank 0 ends the loop of all
                CommandLoop(host, executor.run, executor.spoil).run()
            return
        with open_source() as source, _signals_to(source.stop):
            CommandLoop(host, executor.run, executor.spoil, source).run()
    finally:
        executor.close()


@contextmanager
def _signals_to(stop: Callable[[], None]) -> Iterator[None]:
    """Calls ``stop`` at SIGTERM and SIGINT inside the block."""

    def handle(number: int, frame: FrameType | None) -> None:
        stop()

    before: dict[int, Any] = {}
    try:
        for number in _SIGNALS:
            before[number] = signal.signal(number, handle)
    except ValueError as error:
        raise EngineError("a service runs in the main thread of its process; call it there.") from error
    try:
        yield
    finally:
        for changed, handler in before.items():
            signal.signal(changed, handler)
