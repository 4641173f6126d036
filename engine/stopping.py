"""SIGTERM as a wish: the run ends after its step, with a checkpoint, on all ranks together."""

import signal
import threading
import time
from types import FrameType
from typing import Any

EXIT_CODE = 128 + signal.SIGTERM
"""What a shell reports of a process that SIGTERM has ended."""
ONE_WISH_SECONDS = 3.0
"""Signals within this time are one wish: schedulers send SIGTERM to all processes of a job, and torchrun, which gets it
too, sends it to its own once more."""


class StopSignal:
    """Notes the first SIGTERM; another one that comes later ends the process as it always did."""

    def __init__(self) -> None:
        self.asked = False
        self._first = 0.0
        self._before: Any = None
        self._installed = threading.current_thread() is threading.main_thread()
        if self._installed:
            self._before = signal.signal(signal.SIGTERM, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.asked:
            self.asked, self._first = True, now
        elif now - self._first > ONE_WISH_SECONDS:
            self.remove()
            signal.raise_signal(number)

    def give_up(self) -> None:
        """The ranks do not meet any more and no step will end: SIGTERM acts as it did, also one that has come."""
        self.remove()
        if self.asked and not self._installed:
            signal.raise_signal(signal.SIGTERM)

    def remove(self) -> None:
        """Put back what was there."""
        if self._installed and threading.current_thread() is threading.main_thread():
            self._installed = False
            signal.signal(signal.SIGTERM, self._before if self._before is not None else signal.SIG_DFL)
