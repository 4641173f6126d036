"""Background writing of saves, in a thread during training; at most one save is pending."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from engine.checkpoint.contents.local_tensors import ModelTensor
from engine.checkpoint.contents.optimizer_state import unsaved_state
from engine.checkpoint.contents.snapshot import Snapshot
from engine.checkpoint.format.filesystem import Files
from engine.checkpoint.memory_checkpoints import MemoryCheckpoints
from engine.checkpoint.run_state import WORTH_A_LINE, RunState, logger
from engine.checkpoint.save import Saver
from engine.errors import CheckpointError, EngineError
from engine.parallel.comm.host_group import HostGroup
from engine.step.state import RunControl


class PendingSave:
    """Handle of a save, which usually runs in a background thread. ``wait`` returns the checkpoint's folder or raises.

    A failure is logged even if ``wait`` is never called.
    """

    def __init__(self, work: Callable[[], Path], told: Callable[["PendingSave"], None], background: bool) -> None:
        self.folder: Path | None = None
        """Folder of the checkpoint once it is committed, otherwise None."""
        self.problem: Exception | None = None
        self._work: Callable[[], Path] | None = work
        self._told: Callable[[PendingSave], None] | None = told
        self._ended = False
        self._afterwards: list[Callable[[], None]] = []
        # not a daemon: at exit the interpreter waits for the thread, so that a started save is completed
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=False)
        if background:
            self._thread.start()
        else:
            self._run()

    @property
    def done(self) -> bool:
        """True once the save has ended, successfully or not."""
        return not self._thread.is_alive()

    def join(self) -> None:
        """Blocks until the save has ended. Does not raise if the save has failed."""
        if self._thread.ident is not None:
            self._thread.join()

    def wait(self) -> Path:
        """Blocks until the save has ended; returns the checkpoint's folder.

        Raises:
            CheckpointError: the save has failed; names the reason.
        """
        self.join()
        if self.problem is not None:
            raise self.problem
        assert self.folder is not None, "a successful save has a folder"
        return self.folder

    def afterwards(self, call: Callable[[], None]) -> None:
        """Calls ``call`` once when the save has ended: in the save's thread, or at once if it has ended already."""
        self._afterwards.append(call)
        if self._ended:
            self._call_afterwards()

    def _call_afterwards(self) -> None:
        while self._afterwards:
            with suppress(IndexError):  # the other thread has popped the last one
                self._afterwards.pop()()

    def _run(self) -> None:
        work, told, self._work, self._told = self._work, self._told, None, None
        assert work is not None and told is not None, "it runs once"
        try:
            self.folder = work()
        except EngineError as error:
            self.problem = error
        except Exception as error:  # threading would print the exception and drop it
            self.problem = CheckpointError(
                f"not saved, because writing raised {type(error).__name__}: {error}; see the traceback of this error."
            )
            self.problem.__cause__ = error
        try:
            told(self)
        finally:
            self._ended = True
            self._call_afterwards()


class CheckpointWriter:
    """Writer of one engine's checkpoints in a background thread, one at a time."""

    def __init__(self, run: RunState, host: HostGroup, control: RunControl) -> None:
        self._run, self._config, self._control = run, run.config.checkpoint, control
        self._saver = Saver(run.ownership, run.stored, host, run.files, run.locks.hold)
        self._pending: PendingSave | None = None
        others = [key for key, entry in run.full_state.entries.items() if entry.kind == "other"]
        if others and run.comm.grid.rank == 0:
            logger.warning(
                "checkpoint: %r of the state dict is neither a parameter nor a buffer and is not stored", others[0]
            )
        self._said = False
        """True once a warning of unsaved optimizer state was logged."""
        self._problem_of_copy = ""
        """Problem of the last save into memory."""

    def save(self, folder: Path, user: Any, keep: int | None, without_frozen: bool = False) -> PendingSave:
        """Waits for a pending save, copies the run to host memory, and starts to save the copy into ``folder``. Returns
        the handle of the save. Collective. ``user``: the ``client_state`` to store.

        Args:
            keep: number of checkpoints that remain in the folder; None: all.
            without_frozen: True to leave out frozen parameters.
        """
        self.drain()
        self._warn_of_unsaved_state()
        started = time.perf_counter()
        saver = self._saver_of(self._run.trained if without_frozen else self._run.stored)
        snapshot = self._snapshot(user, saver)
        stall = time.perf_counter() - started
        write = partial(saver.run, snapshot, folder, keep)
        told = partial(self._told, step=self._run.trainer_state.update.made, stall=stall, started=time.perf_counter())
        self._pending = PendingSave(write, told, self._config.asynchronous)
        return self._pending

    @property
    def busy(self) -> bool:
        """True while a save is being written."""
        return self._pending is not None and not self._pending.done

    def save_in_memory(self, copies: MemoryCheckpoints) -> None:
        """Starts a save into this host's memory, with a copy of each file on another host. A failure is only logged."""
        self.drain()
        saver, snapshot = self._saver, self._snapshot({}, self._saver)

        def write(files: Files, folder: Path) -> Path:
            return saver.elsewhere(files).run(snapshot, folder, keep=None)

        step = self._run.trainer_state.update.made
        save = partial(copies.save, saver.host, write)
        self._pending = PendingSave(save, partial(self._told_of_copy, step=step), self._config.asynchronous)

    def use(self, host: HostGroup) -> None:
        """Sets the process group of CPU tensors for later saves. No save may be pending."""
        self._saver.host = host

    def export(self, folder: Path, shard_bytes: int | None = None) -> None:
        """Writes a Hugging Face folder of the model and waits until it is complete.

        ``shard_bytes``: largest size of a file with several tensors, in bytes; None: one file for each rank.

        Raises:
            CheckpointError: frozen weights are quantized, so that their exact values are not available.
        """
        _refuse_codes(self._run)
        self.drain()
        saver = self._saver_of(self._run.tensors)  # a model folder has all tensors
        saver.export(self._snapshot(None, saver, weights_only=True), folder, shard_bytes)

    def _saver_of(self, tensors: tuple[ModelTensor, ...]) -> Saver:
        """Returns a saver of these tensors: the usual one, or another, which frees its memory after its save."""
        if tensors == self._saver.tensors:
            return self._saver
        return Saver(self._run.ownership, tensors, self._saver.host, self._run.files, self._run.locks.hold)

    def _warn_of_unsaved_state(self) -> None:
        """Warns once of optimizer state in attributes that a checkpoint does not store."""
        optimizer = self._run.runtime.optimizer
        place = None if self._said or self._run.comm.grid.rank else unsaved_state(optimizer)
        if place is not None:
            self._said = True
            logger.warning(
                "checkpoint: optimizer %s has state in %s, which is not saved and starts afresh on resume; store it "
                "in self.state[parameter], which is saved",
                type(optimizer.inner).__name__,
                place,
            )

    def _snapshot(self, user: Any, saver: Saver, weights_only: bool = False) -> Snapshot | Exception:
        """Returns this rank's snapshot, or the error that prevented it, which all ranks have to learn."""
        try:
            return saver.snapshot(self._run.ours(weights_only), self._run.contents(user, saver.tensors))
        except Exception as error:
            return error

    def afterwards(self, call: Callable[[], None]) -> None:
        """Calls ``call`` when no save is pending: at once, or in the pending save's thread at its end."""
        if self._pending is None:
            call()
        else:
            self._pending.afterwards(call)

    def drain(self) -> None:
        """Waits until no save is pending. Does not raise if the save has failed."""
        pending = self._pending
        if pending is None:
            return
        started = time.perf_counter()
        pending.join()
        self._pending = None
        seconds = time.perf_counter() - started
        if seconds >= WORTH_A_LINE:
            logger.info("checkpoint: waited %.1f s for the pending save", seconds)

    def _told_of_copy(self, save: PendingSave, step: int) -> None:
        """Logs a failure, each problem once. Runs in the background thread."""
        problem = "" if save.problem is None else str(save.problem)
        lost = not isinstance(save.problem, CheckpointError)  # a CheckpointError is equal on all ranks
        if problem and problem != self._problem_of_copy and (lost or self._run.comm.grid.rank == 0):
            logger.warning("checkpoint: no copy of step %d in memory: %s", step, problem)
        self._problem_of_copy = problem

    def _told(self, save: PendingSave, step: int, stall: float, started: float) -> None:
        """Logs the result of a save and stores a failure. Runs in the background thread."""
        first = self._run.comm.grid.rank == 0
        if save.problem is None:
            if first:
                seconds = time.perf_counter() - started
                logger.info("checkpoint saved: %s (paused %.2f s, written in %.2f s)", save.folder, stall, seconds)
            return
        if first or not isinstance(save.problem, CheckpointError):  # a CheckpointError is equal on all ranks
            logger.error("checkpoint failed at step %d: %s", step, save.problem)
        if self._config.on_failure == "stop":
            self._control.problem = CheckpointError(
                f'the checkpoint of step {step} was not saved (checkpoint.on_failure is "stop"): {save.problem}'
            )


def _refuse_codes(run: RunState) -> None:
    for row in run.runtime.plan.table:
        if row.quantized is not None:
            raise CheckpointError(
                f"save_pretrained: the frozen weight {row.name!r} is stored in {row.quantized.kind} (quantize_frozen), "
                "so the folder would contain rounded weights; train a PeftModel, for which save_pretrained writes only "
                "the adapters, or load the trained weights from eng.full_state_dict() into the unquantized model."
            )
