"""Failed communication calls of this rank, and the decision whether the engine can continue.

    all ranks fail at one place     their communication matches, so the engine goes on from the state before the call
    one rank fails, or elsewhere    others wait for messages of this rank: the engine has ended on every rank

The error is raised at once; the verdict applies from the next call: a thread waits for the other ranks' votes in the
job's store. If the engine has ended, the rank aborts its communication, so that waiting ranks fail too, with the error
of the first rank that failed.

A vote for the end adds ``_OVER`` to a sum, any other vote 1; the engine continues only if all ranks voted before any
vote for the end.
"""

import atexit
import socket
import threading
import time
from collections.abc import Callable

from engine.errors import EngineError, first_line
from engine.parallel.comm.rendezvous import KeyStore

_OVER = 1 << 20
"""More than any number of ranks."""
_ALIKE_SECONDS = 10.0
"""Seconds between failures that still count as one."""
_LEAVE_SECONDS = 1.0
"""Time for a rank to end by its error, before it ends its communication; a launcher then sees the cause first."""
_WORDS_SECONDS = 2.0
"""Seconds for which a rank waits for the message of the rank that failed first."""
_POLL_SECONDS = 0.02


def has_lost_ranks(error: BaseException) -> bool:
    """Returns True if ``error`` reports failed communication with other ranks."""
    return isinstance(error, EngineError) and isinstance(error.__cause__, RuntimeError)


def worded(error: BaseException) -> str:
    """Formats ``error`` as its class name and the first line of its message, such as ``ValueError: bad shape``."""
    line = first_line(error) if isinstance(error, Exception) else str(error)
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


class FailedCalls:
    """Votes of all ranks, one after each failed call: the engine continues only if all ranks failed at the same point.

    Args:
        store: key-value store of the job, with this engine's prefix of keys; None: a single process.
        leave: callback that ends this rank's communication if a vote ends the engine.
    """

    def __init__(self, store: KeyStore | None, rank: int, size: int, leave: Callable[[], None]) -> None:
        self._store, self._rank, self._size, self._leave = store, rank, size, leave
        self._past = 0
        """Failures from which all ranks have gone on."""
        self._verdict: str | None = ""
        """Why the engine is over; empty: it is not, None: nobody knows yet."""
        self._known = threading.Event()
        self._exits = threading.Event()

    @property
    def noted(self) -> bool:
        """True if a call has failed on this rank and the engine has not resumed since."""
        return self._verdict != ""

    def note(self, call: str, error: BaseException, place: str | None) -> None:
        """Records that ``call`` has failed on this rank with ``error``, and starts, in a thread, a vote of all ranks:
        the engine continues or ends.

        ``place``: text for the point of failure; the engine continues if all ranks vote with the same text. None, or
        an ``error`` of failed communication with other ranks: the engine ends.
        """
        if self._verdict != "":
            return
        lost = has_lost_ranks(error)
        words = f"rank {self._rank} ({socket.gethostname()}) failed in {call}"
        cause = worded(error)
        if self._store is None or self._size == 1:
            self._verdict = "" if place is not None else _sentence(words, cause)
            return
        self._verdict = None
        self._known.clear()
        atexit.register(self._exits.set)
        vote = (None if lost else place, _sentence(words, cause), lost)
        threading.Thread(target=self._decide, args=(self._store, *vote), daemon=True).start()

    def refuse(self, call: str) -> None:
        """Raises if a vote of all ranks after a failed call has ended the engine; waits for a running vote first.

        The argument ``call`` is unused.

        Raises:
            EngineError: the engine has ended; the same message on every rank.
        """
        if self._verdict is None:
            self._known.wait()
        if self._verdict:
            raise EngineError(self._verdict)

    def sentence(self, error: BaseException) -> EngineError | None:
        """Returns an EngineError that names the rank that failed first, or None.

        If ``error`` reports lost ranks, waits a few seconds for the vote of all ranks. Returns None if it reports none,
        or if the vote has not ended the engine.
        """
        if not has_lost_ranks(error) or self._store is None:
            return None
        self._known.wait(2 * _WORDS_SECONDS)
        return EngineError(self._verdict) if self._verdict and _REMEDY in self._verdict else None

    def close(self) -> None:
        """Prevents a running vote from ending this rank's communication later; a second call does nothing."""
        self._exits.set()
        atexit.unregister(self._exits.set)

    # ------------------------------------------------------------------ the vote, in a thread

    def _decide(self, store: KeyStore, place: str | None, told: str, lost: bool) -> None:
        try:
            verdict = self._vote(store, place, told, lost)
        except RuntimeError as error:
            verdict = f"this engine is over, because the store of the job is lost ({first_line(error)}); start anew."
        if not verdict:
            self._past += 1
        self._verdict = verdict
        self._known.set()
        if verdict and not self._exits.wait(0.0 if lost else _LEAVE_SECONDS):
            self._leave()

    def _vote(self, store: KeyStore, place: str | None, told: str, lost: bool) -> str:
        """The verdict of all ranks: empty, or why the engine is over."""
        here = f"failed call {self._past}"
        kind = "lost" if lost else "words"
        if store.add(f"{here}/first {kind}", 1) == 1:
            store.set(f"{here}/{kind}", told)
        store.set(f"{here}/place/{self._rank}", place or "")
        votes = store.add(f"{here}/votes", _OVER if place is None else 1)
        if votes == self._size:
            places = {store.get(f"{here}/place/{rank}") for rank in range(self._size)}
            return self._announce(store, here, alike=len(places) == 1)
        if votes > self._size:
            return self._announce(store, here, alike=False)
        deadline = time.monotonic() + _ALIKE_SECONDS
        while not store.check([f"{here}/verdict"]):
            time.sleep(_POLL_SECONDS)
            if time.monotonic() > deadline:
                deadline += _ALIKE_SECONDS
                if store.add(f"{here}/votes", _OVER) - _OVER != self._size:
                    return self._announce(store, here, alike=False)
        return store.get(f"{here}/verdict").decode()

    def _announce(self, store: KeyStore, here: str, alike: bool) -> str:
        """Write the verdict for all ranks; it is the same on whichever rank writes it."""
        verdict = "" if alike else self._first_words(store, here)
        store.set(f"{here}/verdict", verdict)
        return verdict

    def _first_words(self, store: KeyStore, here: str) -> str:
        """Returns the sentence of the first rank with an error of its own, else of the first rank that lost another."""
        deadline = time.monotonic() + _WORDS_SECONDS
        while not store.check([f"{here}/words"]):
            if time.monotonic() > deadline:
                if store.check([f"{here}/lost"]):
                    return store.get(f"{here}/lost").decode()
                return _sentence("a rank has ended", "none, since it has left no word")
            time.sleep(_POLL_SECONDS)
        return store.get(f"{here}/words").decode()


_REMEDY = "make it anew on all ranks with engine.initialize, and load the last checkpoint"


def _sentence(words: str, cause: str) -> str:
    return (
        f"{words} in the middle of a step and the other ranks did not fail alike, so this engine is over: {_REMEDY}; "
        f"see the error of the rank that failed: {cause}"
    )
