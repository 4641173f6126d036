"""Lines of an engine on stderr of rank 0: the banner, notes, warnings, and slow parts of the start.

the application has configured logging   its handlers and levels apply, and nothing is added
it has not                               lines of the logger "trine" from INFO, without prefix
TRINE_QUIET=1                            errors only, in both cases
"""

import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Timer
from time import monotonic

logger = logging.getLogger("trine")

SLOW_SECONDS = 2.0
"""Seconds after which a phase of the engine's start is logged as under way."""


def open_console(rank: int) -> Callable[[], None]:
    """Shows the log lines of the logger "trine" on stderr on rank 0; the returned function undoes this.

    All engines of a process share one logging handler, until each has called its function.
    """
    if rank:
        return lambda: None
    console = next((handler for handler in logger.handlers if isinstance(handler, Console)), None) or Console()
    console.engines += 1
    ended = False

    def end() -> None:
        nonlocal ended
        if not ended:
            ended = True
            console.leave()

    return end


class Console(logging.Handler):
    """Logging handler that prints the logger "trine" to stderr if the application has configured no handler."""

    def __init__(self) -> None:
        super().__init__()
        self.engines = 0
        self._level_before = logger.level
        self._quiet = os.environ.get("TRINE_QUIET", "0") not in ("", "0")
        if logger.level == logging.NOTSET and not self._quiet:
            logger.setLevel(logging.INFO)
        logger.addHandler(self)
        logger.addFilter(self._is_wanted)

    def emit(self, record: logging.LogRecord) -> None:
        """Prints a log record to stderr, unless the application has a handler of its own."""
        if not _configured():
            print(self.format(record), file=sys.stderr, flush=True)

    def leave(self) -> None:
        """Ends the use of this handler by one engine; the last engine removes it and restores the logger's level."""
        self.engines -= 1
        if not self.engines:
            logger.removeFilter(self._is_wanted)
            logger.removeHandler(self)
            logger.setLevel(self._level_before)

    def _is_wanted(self, record: logging.LogRecord) -> bool:
        """Returns True if the logger passes a record on; the application's level applies, also if it is set late."""
        if self._quiet and record.levelno < logging.ERROR:
            return False
        given = logger.parent if self._level_before == logging.NOTSET and _configured() else None
        return given is None or record.levelno >= given.getEffectiveLevel()


def _configured() -> bool:
    """Returns True if the application has a handler at the logger "trine" or above it."""
    own = any(not isinstance(handler, Console) for handler in logger.handlers)
    return own or (logger.propagate and logger.parent is not None and logger.parent.hasHandlers())


@contextmanager
def unless_within(seconds: float, call: Callable[[], object]) -> Iterator[None]:
    """Returns a context manager that calls ``call`` in a thread if its block takes longer than ``seconds``.

    It does not interrupt the block.
    """
    timer = Timer(seconds, call)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns one line of text for each row of cells, padded to aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


@contextmanager
def say_if_slow(what: str, rank: int, seconds: float = SLOW_SECONDS) -> Iterator[None]:
    """Returns a context manager that logs on rank 0 if its block takes longer than ``seconds``.

    It logs at that moment, and again with the total seconds at the end. ``what``: name of the block in the log.
    """
    if rank:
        yield
        return
    began = monotonic()
    try:
        with unless_within(seconds, lambda: logger.info("%s ...", what)):
            yield
    finally:
        if (took := monotonic() - began) >= seconds:
            logger.info("%s took %.1f s", what, took)
