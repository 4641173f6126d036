"""Graceful preemption: after SIGTERM the run finishes its step, saves a checkpoint and exits on all ranks together."""

import os
import signal
import threading
import time
from types import FrameType
from typing import Any

EXIT_CODE = 128 + signal.SIGTERM
"""Exit status that a shell reports for a process ended by SIGTERM."""
ONE_REQUEST_SECONDS = 3.0
"""Signals within this time count as one request: schedulers send SIGTERM to all processes of a job, and torchrun, which
receives it too, forwards it to its own processes."""


class StopSignal:
    """Recorder of the first SIGTERM; a later one ends the process as if no handler were installed.

    Several engines may stack their handlers; each of them receives the signal. ``remove`` takes a handler out of the
    stack. Only the main thread can set handlers: a handler removed by another thread stays in place and passes signals
    on until the one above it is removed.

    A handler that the user has set before is called for the first signal. If it exits, the run first saves.
    """

    def __init__(self) -> None:
        self.asked = False
        self.code: Any = EXIT_CODE
        """Exit status of the process once the run has saved."""
        self._first = 0.0
        self._before: Any = None
        self._process = os.getpid()
        self._active = threading.current_thread() is threading.main_thread()
        if self._active:
            self._before = signal.signal(signal.SIGTERM, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self._active or os.getpid() != self._process:  # removed below another handler, or a forked child
            self._pass_on(number, frame)
        elif not self.asked:
            self.asked, self._first = True, now
            self._tell_previous(number, frame)
        elif now - self._first > ONE_REQUEST_SECONDS:
            self.remove()
            signal.raise_signal(number)

    def _tell_previous(self, number: int, frame: FrameType | None) -> None:
        """Calls the previous handler: another engine's, or the user's, whose exit waits for the checkpoint."""
        try:
            if callable(self._before):
                self._before(number, frame)
        except SystemExit as leaving:
            self.code = leaving.code

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        if callable(self._before):
            self._before(number, frame)
        elif self._before is not signal.SIG_IGN:
            signal.signal(signal.SIGTERM, self._default())
            signal.raise_signal(number)

    def give_up(self) -> None:
        """Restores SIGTERM's effect, also for a received signal: no step will end, because ranks cannot synchronize."""
        self.remove()
        if self.asked and not self._active:
            signal.raise_signal(signal.SIGTERM)

    def remove(self) -> None:
        """Stops recording signals: restores the previous handler, or makes the handler above skip this one."""
        if not self._active:
            return
        self._active = False
        if threading.current_thread() is not threading.main_thread():
            return
        top = signal.getsignal(signal.SIGTERM)
        if top == self._note:
            signal.signal(signal.SIGTERM, self._default())
            return
        above = _owner(top)
        while above is not None and _owner(above._before) is not self:
            above = _owner(above._before)
        if above is not None:
            above._before = self._before

    def _default(self) -> Any:
        """Returns the previous handler, skipping handlers that were removed."""
        below = self._before
        while (owner := _owner(below)) is not None and not owner._active:
            below = owner._before
        return below if below is not None else signal.SIG_DFL


def _owner(handler: Any) -> StopSignal | None:
    found = getattr(handler, "__self__", None)
    return found if isinstance(found, StopSignal) else None
