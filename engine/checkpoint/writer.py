"""The writing half of a save, in a thread beside training: at most one save is under way."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from engine.checkpoint.contents.snapshot import Snapshot
from engine.checkpoint.run_state import WORTH_A_LINE, RunState, logger
from engine.checkpoint.save import Saver
from engine.errors import CheckpointError, EngineError
from engine.parallel.comm.host_group import HostGroup


class PendingSave:
    """A save under way. ``wait`` for its end; nobody has to, a failure is logged.

    While it runs it keeps what it writes; afterwards it keeps nothing of its engine.
    """

    def __init__(self, work: Callable[[], Path], told: Callable[["PendingSave"], None], background: bool) -> None:
        self.folder: Path | None = None
        """The checkpoint, once it is committed."""
        self.problem: Exception | None = None
        self._work: Callable[[], Path] | None = work
        self._told: Callable[[PendingSave], None] | None = told
        self._ended = False
        self._afterwards: list[Callable[[], None]] = []
        # not a daemon: the interpreter waits for it at its exit, so that a save that was begun is ended
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=False)
        if background:
            self._thread.start()
        else:
            self._run()

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def join(self) -> None:
        """Block until it has ended."""
        if self._thread.ident is not None:
            self._thread.join()

    def wait(self) -> Path:
        """Block until it has ended; the folder of the checkpoint.

        Raises:
            CheckpointError: why there is none.
        """
        self.join()
        if self.problem is not None:
            raise self.problem
        assert self.folder is not None, "a save that has ended well has a folder"
        return self.folder

    def afterwards(self, call: Callable[[], None]) -> None:
        """Let the save call this when it has ended; at once if it has. No lock, so that a finalizer may do it."""
        self._afterwards.append(call)
        if self._ended:
            self._call_afterwards()

    def _call_afterwards(self) -> None:
        while self._afterwards:
            with suppress(IndexError):  # the other thread has taken the last one
                self._afterwards.pop()()

    def _run(self) -> None:
        work, told, self._work, self._told = self._work, self._told, None, None
        assert work is not None and told is not None, "it runs once"
        try:
            self.folder = work()
        except EngineError as error:
            self.problem = error
        except Exception as error:  # a thread's exception would be printed and forgotten
            self.problem = CheckpointError(f"not saved: {type(error).__name__}, {error}.")
            self.problem.__cause__ = error
        try:
            told(self)
        finally:
            self._ended = True
            self._call_afterwards()


class CheckpointWriter:
    """Writes the checkpoints of one run, one at a time."""

    def __init__(self, run: RunState, host: HostGroup) -> None:
        self._run, self._config = run, run.config.checkpoint
        self._saver = Saver(run.shares, run.tensors, host, run.files)
        self._pending: PendingSave | None = None
        others = [key for key, entry in run.full_state.entries.items() if entry.kind == "other"]
        if others and run.comm.grid.rank == 0:
            logger.warning("checkpoint: %r of the state dict is no parameter or buffer and is not stored", others[0])
        self.problem: CheckpointError | None = None
        """Why the run has to stop; ``checkpoint.on_failure``."""

    def save(self, folder: Path, user: Any, keep: int | None) -> PendingSave:
        """Begin to save into the folder of a run; see :meth:`engine.Engine.save_checkpoint`. ``keep``: None for all."""
        self.drain()
        started = time.perf_counter()
        snapshot = self._snapshot(user)
        stall = time.perf_counter() - started
        write = partial(self._saver.run, snapshot, folder, keep)
        told = partial(self._told, step=self._run.progress.update.made, stall=stall, started=time.perf_counter())
        self._pending = PendingSave(write, told, self._config.asynchronous)
        return self._pending

    def export(self, folder: Path) -> None:
        """Write the model folder alone, and wait for it."""
        self.drain()
        self._saver.export(self._snapshot(None, weights_only=True), folder)

    def _snapshot(self, user: Any, weights_only: bool = False) -> Snapshot | Exception:
        """Or why this rank can take none, which all ranks have to hear."""
        try:
            return self._saver.snapshot(self._run.ours(weights_only), self._run.contents(user))
        except Exception as error:
            return error

    def afterwards(self, call: Callable[[], None]) -> None:
        """Call this when no save is under way: now, or by the thread of the save at its end."""
        if self._pending is None:
            call()
        else:
            self._pending.afterwards(call)

    def drain(self) -> None:
        """Wait for the save under way; how it went is told elsewhere."""
        pending = self._pending
        if pending is None:
            return
        started = time.perf_counter()
        pending.join()
        self._pending = None
        seconds = time.perf_counter() - started
        if seconds >= WORTH_A_LINE:
            logger.info("checkpoint: waited %.1f s for the save under way", seconds)

    def _told(self, save: PendingSave, step: int, stall: float, started: float) -> None:
        """From the background: say it, and remember a failure."""
        first = self._run.comm.grid.rank == 0
        if save.problem is None:
            if first:
                seconds = time.perf_counter() - started
                logger.info("checkpoint saved: %s (paused %.2f s, written in %.2f s)", save.folder, stall, seconds)
            return
        if first or not isinstance(save.problem, CheckpointError):  # that one is the same on all ranks
            logger.error("checkpoint failed at step %d: %s", step, save.problem)
        if self._config.on_failure == "stop":
            self.problem = CheckpointError(f"the checkpoint of step {step} was not saved: {save.problem}")
