"""What an engine holds of its process and of the user's model, and when it gives that back."""

import os
import sys
from collections.abc import Callable
from contextlib import ExitStack

from engine.errors import EngineError


class EngineResources:
    """Closes what an engine owns: patches of the model, logs, signal handlers, process groups, shared memory.

    ``close`` does it, or the collection of the engine, whose parts alone refer to this object.

    What is closed refers to the user's model, and the model may refer to the engine. ``weakref.finalize``, which holds
    its callback outside of the engine, would keep both alive; with ``__del__`` the garbage collector finds the cycle.
    """

    def __init__(self) -> None:
        self._closers = ExitStack()
        self._closed = False
        self._refusals: list[Callable[[str], object]] = []
        self._process = os.getpid()

    def add(self, close: Callable[[], object]) -> None:
        """Own something; ``close``, which may be called again, gives it back without waiting for other ranks."""
        self._closers.callback(close)

    def close(self) -> None:
        """Give everything back, the newest first, also what is left when one of them raises."""
        self._closed = True
        self._closers.close()

    def refuse_by(self, check: Callable[[str], object]) -> None:
        """Ask ``check`` too before a call; it raises if it has a reason against the call of that name."""
        if check not in self._refusals:
            self._refusals.append(check)

    def refuse_no_more_by(self, check: Callable[[str], object]) -> None:
        """End what ``refuse_by`` began with ``check``, if it did."""
        self._refusals = [known for known in self._refusals if known != check]

    def refuse_closed(self, call: str) -> None:
        """Refuse ``call`` after ``close``, and whenever a check of ``refuse_by`` does.

        Raises:
            EngineError: everything has been given back, or what the call needs is not there.
        """
        if self._closed:
            raise EngineError(
                f"{call} after close(), which has given back the engine's parts; build a new engine with "
                "engine.initialize."
            )
        for check in self._refusals:
            check(call)

    def __del__(
        self, is_finalizing: Callable[[], bool] = sys.is_finalizing, getpid: Callable[[], int] = os.getpid
    ) -> None:
        """Close; not in a forked child, whose parent still uses everything, nor when the interpreter ends.

        An engine that a script has not closed outlives the names of this module, which the interpreter empties first.
        """
        if not is_finalizing() and getpid() == self._process:
            self.close()
