"""Checkpoint lifecycle of an engine: before the model is built, between steps, on SIGTERM and at the end.

Graceful preemption: after SIGTERM the run finishes its step, saves a checkpoint and exits on all ranks together.
"""

import logging
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Mapping, Set
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from engine.checkpoint.contents.adapter_folder import AdapterSource, prompt_encoders, write_adapters
from engine.checkpoint.contents.trainer_state import Stateful, TrainerState
from engine.checkpoint.foreign import open_checkpoint
from engine.checkpoint.format.filesystem import Files, resolved
from engine.checkpoint.format.step_folders import FolderLocks, make_run_folder, step_of
from engine.checkpoint.full_state import Entry, FullState
from engine.checkpoint.huggingface import refuse_adapters
from engine.checkpoint.load import read_unplaced
from engine.checkpoint.memory_checkpoints import MemoryCheckpoints
from engine.checkpoint.resume import (
    ClientState,
    LoadOptions,
    LoadRequest,
    Resume,
    find_checkpoint,
    loading,
    start_weights,
)
from engine.checkpoint.run_state import RunState
from engine.checkpoint.weights_transfer import copy_weights, load_given
from engine.checkpoint.writer import CheckpointWriter, PendingSave
from engine.config import Config
from engine.errors import EngineError
from engine.parallel.comm.agreement import first_rank
from engine.parallel.comm.comm import Comm
from engine.parallel.comm.host_group import TorchHostGroup
from engine.parallel.comm.world import timeout_seconds
from engine.parallel.model.adapters import is_peft_model
from engine.step.parts import StepPart
from engine.step.runtime import RankRuntime
from engine.step.state import RunControl
from engine.step.update import Update
from engine.zero.optim.averaged_weights import Average

EXIT_CODE = 128 + signal.SIGTERM
"""Exit status that a shell reports for a process ended by SIGTERM."""
ONE_REQUEST_SECONDS = 3.0
"""Signals within this time count as one request: schedulers send SIGTERM to all processes of a job, and torchrun, which
receives it too, forwards it to its own processes."""


class StopSignal:
    """SIGTERM handler that records the first signal, so that the run saves and ends; a later signal ends the process.

    It passes the first signal to the previous handler too.
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
        """Removes the handler. If SIGTERM was received, repeats it: the previous handler, or the default, acts."""
        self.remove()
        if self.asked and not self._active:
            signal.raise_signal(signal.SIGTERM)

    def remove(self) -> None:
        """Removes this handler from the chain of SIGTERM handlers."""
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


logger = logging.getLogger("trine")


class CheckpointCoordinator:
    """Owner of an engine's checkpoints: starts saves and loads, and ends the run after SIGTERM."""

    def __init__(
        self, model: nn.Module, config: Config, comm: Comm, device: torch.device, model_files: Mapping[str, bytes]
    ) -> None:
        self._model, self._config, self._comm, self.device = model, config, comm, device
        self._model_files = model_files
        self._tracked: dict[str, Stateful] = {}
        self._encoders = prompt_encoders(model)
        """Copies of a ``PeftModel``'s prompt encoders, from before modules were changed."""
        self._files, self._locks = Files(), FolderLocks()
        self._host: TorchHostGroup | None = None
        self._run: RunState | None = None
        self._checkpoints: CheckpointWriter | None = None
        self._request: LoadRequest | None = None
        self._saved_at = -1
        """Update of the newest save into the run's folder; -1 before the first save."""
        self._last: PendingSave | None = None
        """The most recent save into the run's folder."""
        self._folder = _path(config.checkpoint.folder)
        self._memory: MemoryCheckpoints | None = None
        """Checkpoints in the memory of the hosts; None: off."""
        self._left_out = False
        """True once a skipped copy in memory was logged."""
        if config.checkpoint.memory_every and self._folder is not None:
            self._memory = MemoryCheckpoints(self._folder, self._files)
        self._init_from = _path(config.checkpoint.init_from)
        self._signal = StopSignal() if config.checkpoint.folder is not None else None
        if self._signal is not None:
            comm.broken = self._signal.give_up  # a launcher ends the ranks of a broken job by the same signal
        self.control = RunControl(stop=self._signal)
        self.due = config.checkpoint.every > 0 or self._memory is not None
        """True if steps may end with a save, so each calls ``after_step``."""

    def hold_folder(self) -> None:
        """Locks ``checkpoint.folder`` on rank 0 until the engine closes. Communicates nothing. Logs a warning if the
        folder cannot be created; the first save into it then raises.

        Raises:
            CheckpointError: an engine of another process saves its checkpoints there.
        """
        if self._folder is None or self._comm.grid.rank:
            return
        try:
            make_run_folder(self._files, self._folder)
            self._locks.hold(self._folder, early=True)
        except OSError as error:
            logger.warning("checkpoint.folder %s: %s", self._folder, error.strerror or error)

    def built(self, runtime: RankRuntime, update: Update, entries: Mapping[str, Entry]) -> None:
        """Reads the checkpoint of an earlier ``load``, else of ``checkpoint.init_from``, into the shards. Collective.

        ``update``: counters and loss scale of the run. ``entries``: from :func:`state_entries`.
        """
        self._run = RunState(
            model=self._model,
            config=self._config,
            comm=self._comm,
            device=self.device,
            trainer_state=self._trainer_state(update),
            runtime=runtime,
            full_state=FullState(self._model, runtime.plan, entries, self._comm),
            model_files=self._model_files,
            files=self._files,
            locks=self._locks,
        )
        request, self._request = self._request, None
        self.control.spoiled = request is not None or self._init_from is not None  # until the weights have been read
        if self._init_from is not None and request is None:
            start_weights(self._run, self._group(), self._init_from)
            self.control.spoiled = False
        if request is not None:
            self._resume(request)

    def _trainer_state(self, update: Update) -> TrainerState:
        late = ("outer",) if self._config.outer is not None else ()
        return TrainerState(update, self._tracked, self._comm.grid, self.device, late)

    def register(self, things: Mapping[str, object]) -> None:
        """Adds ``things``, name -> object with ``state_dict`` and ``load_state_dict``, to later saves and loads."""
        for name, thing in things.items():
            if not isinstance(thing, Stateful):
                raise EngineError(
                    f"register_for_checkpointing({name}=...): a {type(thing).__name__} lacks state_dict or "
                    "load_state_dict; give it both, or pass its state as client_state."
                )
            self._tracked[name] = thing

    def save(
        self, folder: str | os.PathLike[str] | None, client_state: Any, without_frozen: bool = False
    ) -> PendingSave:
        """Starts a save into ``folder``, by default ``checkpoint.folder``, and returns its handle. See
        :meth:`engine.Engine.save_checkpoint`.
        """
        path = self._folder if folder is None else self.control.save_folder(resolved(folder))
        if path is None:
            raise EngineError(
                "save_checkpoint() got no folder, and checkpoint.folder is null; pass a folder, or set "
                "checkpoint.folder."
            )
        if isinstance(client_state, str):
            raise EngineError(
                f"save_checkpoint(folder, {client_state!r:.80}): the second argument is client_state, because "
                "checkpoints are named by their step, not by a tag; leave the tag out, or pass client_state={...}."
            )
        self.control.refuse_spoiled()
        checkpoints, run = self._writer("save_checkpoint")
        with run.runtime.saving():
            if path != self._folder:
                return checkpoints.save(path, client_state, None, without_frozen)
            self._saved_at = run.trainer_state.update.made
            self._last = checkpoints.save(path, client_state, self._config.checkpoint.keep, without_frozen)
        return self._last

    def load(
        self,
        folder: str | os.PathLike[str] | None,
        update: Update,
        options: LoadOptions,
        missing_ok: bool,
    ) -> Any:
        """Loads the newest checkpoint; see :meth:`engine.Engine.load_checkpoint`. Fills in the counters ``update``."""
        path = self._folder if folder is None else resolved(folder)
        if path is None:
            raise EngineError(
                "load_checkpoint() got no folder, and checkpoint.folder is null; pass a folder, or set "
                "checkpoint.folder."
            )
        self._renew_group()
        path = self.control.load_folder(path)
        request = self._find(path, options, missing_ok)
        if request is None:
            return None
        user = self._begin(request, update) if self._run is None else self._resume(request)
        return ClientState(user) if isinstance(user, dict) else user

    def gather_state(self, average: Average | None = None, keys: Set[str] | None = None) -> dict[str, Tensor]:
        """Returns the full state dict on rank 0, {} elsewhere. Collective. ``average``: weight average in place of the
        trained weights. ``keys``: selected keys, equal on all ranks; None: all.
        """
        assert self._run is not None, "the caller has checked that the model is built"
        runtime = self._run.runtime
        return self._run.full_state.gather((*runtime.buckets, *runtime.frozen), average, keys)

    def copy_weights(self, source: "CheckpointCoordinator") -> None:
        """Copies weights from another engine; see :meth:`engine.Engine.copy_weights_from`."""
        assert self._run is not None and source._run is not None, "the caller has checked that the models are built"
        source.control.refuse_spoiled()
        copy_weights(source._run, self._run)
        self._run.runtime.weights_written()

    def load_state(self, state: Mapping[str, Any], strict: bool) -> None:
        """Loads rank 0's full state dict; see :meth:`engine.Engine.load_full_state_dict`."""
        assert self._run is not None, "the caller has checked that the model is built"
        load_given(self._run, state, strict)
        self._run.runtime.weights_written()

    def save_pretrained(self, folder: str | os.PathLike[str], shard_bytes: int | None = None) -> None:
        """Writes a Hugging Face folder in files of ``shard_bytes``; see :meth:`engine.Engine.save_pretrained`."""
        self.control.refuse_spoiled()
        if is_peft_model(self._model):
            run = self.placed("save_pretrained")
            source = AdapterSource(
                model=self._model,
                entries=run.full_state.entries,
                gather=lambda keys: self.gather_state(keys=keys),
                shapes=run.runtime.without_content,
                encoders=self._encoders,
            )
            with run.runtime.saving():
                return write_adapters(resolved(folder), source, self._comm, self.device)
        refuse_adapters(self._model)
        checkpoints, run = self._writer("save_pretrained")
        with run.runtime.saving():
            checkpoints.export(resolved(folder), shard_bytes)

    def after_step(self, made: bool, stops: bool, ends_trial: bool = False) -> None:
        """Saves after a step if a save is due. Also saves before the run ends (``stops``: a rank received SIGTERM) or a
        trial of a sweep ends (``ends_trial``). ``made``: the step updated the weights. All ranks pass the same values.

        Raises:
            SystemExit: with ``stops``, after the save; status 143, or that of the previous handler's exit.
            CheckpointError: the last checkpoint before the end could not be written.
        """
        settings, run = self._config.checkpoint, self._run
        assert run is not None, "a step needs a built model"
        done = run.trainer_state.update.made
        due = made and settings.every > 0 and done % settings.every == 0
        if (due or stops or ends_trial) and self._folder is not None and done != self._saved_at:
            self.save(None, {})
        elif made and self._memory is not None and done % settings.memory_every == 0:
            self._save_in_memory(self._memory)
        if stops or ends_trial:
            self.drain()
            if self._last is not None:
                self._last.wait()
        if stops:
            if self._comm.grid.rank == 0:
                logger.warning("stopped by SIGTERM after update %d; the next run resumes from there", done)
            raise SystemExit(self._signal.code if self._signal is not None else EXIT_CODE)

    def drain(self) -> None:
        """Waits until the pending save has ended."""
        if self._checkpoints is not None:
            self._checkpoints.drain()

    def close(self) -> None:
        """Waits for the pending save, then calls ``release``.

        Raises:
            CheckpointError: a save failed, ``checkpoint.on_failure`` is "stop", and no step has raised the error.
        """
        if self._signal is not None:
            self._signal.remove()
        self.drain()
        if self._memory is not None and isinstance(sys.exception(), SystemExit | None):
            self._memory.remove()  # a failed run resumes from there
        self.release()
        if (problem := self.control.take_problem()) is not None:
            raise problem

    def release(self) -> None:
        """Removes the signal handler. Then unlocks the checkpoint folders and destroys the CPU process group; a pending
        save does this in its thread, at its end. May be called twice.
        """
        if self._signal is not None:
            self._signal.remove()
        closers = [self._locks.close] if self._host is None else [self._locks.close, self._host.close]
        if self._memory is not None:
            closers.append(self._memory.close)
        for close in closers:
            if self._checkpoints is None:
                close()
            else:
                self._checkpoints.afterwards(close)

    def _resume(self, request: LoadRequest) -> Any:
        assert self._run is not None, "the caller has checked that the model is built"
        resume = Resume(self._run, self._group(), request)
        try:
            user = resume.load()
        except BaseException:
            self.control.spoiled = self.control.spoiled or resume.touched
            raise
        finally:
            if self._memory is not None:
                self._memory.close()
        self.control.spoiled = False
        for part in self._run.runtime.parts.having(StepPart.restarted):
            part.restarted(self._run.trainer_state.update.made)
        done, whole = self._run.trainer_state.update.made, request.options.moments
        self._saved_at = done if whole and request.step.parent == self._folder else -1
        if self._comm.grid.rank == 0 and request.files is not self._files:
            logger.info("checkpoint loaded from the memory of the hosts, %d updates made", done)
        elif self._comm.grid.rank == 0:
            logger.info(
                "checkpoint loaded: %s, %d updates made; the loaded data is sound, and `trine checkpoint verify %s` "
                "checks the rest",
                request.step,
                done,
                shlex.quote(str(request.step)),
            )
        return user

    def _find(self, path: Path, options: LoadOptions, missing_ok: bool) -> LoadRequest | None:
        """Returns the newest checkpoint of a run, on disk or in memory, or the checkpoint at ``path``."""
        memory = self._memory if path == self._folder else None
        step = find_checkpoint(path, self._group(), self._files, missing_ok or memory is not None)
        if memory is not None:
            on_disk = step_of(step.name) if step is not None else None
            newer = memory.find(self._group(), on_disk[0] if on_disk is not None else -1)
            if newer is not None:
                return LoadRequest(newer.folder, options, newer.files)
            if step is None and not missing_ok:
                step = find_checkpoint(path, self._group(), self._files)  # raises
        return LoadRequest(step, options, self._files) if step is not None else None

    def _save_in_memory(self, memory: MemoryCheckpoints) -> None:
        """Starts a save into memory, unless a rank still writes an earlier one: training does not wait for a disk."""
        busy = self._checkpoints is not None and self._checkpoints.busy
        if first_rank(busy, self._comm, self.device, "checkpoint") is not None:
            if not self._left_out and self._comm.grid.rank == 0:
                logger.warning(
                    "checkpoint: step %d is not copied into memory, because an earlier save is still being written; "
                    "later steps may be skipped too, so raise checkpoint.memory_every",
                    self._run.trainer_state.update.made if self._run is not None else 0,
                )
            self._left_out = True
            return
        checkpoints, run = self._writer("checkpoint.memory_every")
        with run.runtime.saving():
            checkpoints.save_in_memory(memory)

    def _begin(self, request: LoadRequest, update: Update) -> Any:
        """Restores the state outside the model, and the weights of the unplaced model; its shards follow the plan."""
        with loading(self._group(), request.step):
            reader = open_checkpoint(request.files, request.step, request.options.moments)
        if not request.options.module_only:
            state = self._trainer_state(update)
            with loading(self._group(), request.step):
                state.check(reader)
            with loading(self._group(), request.step):
                state.restore(reader)
        with loading(self._group(), request.step):
            read_unplaced(reader, self._model)
        self._request = replace(request, begun=not request.options.module_only)
        return reader.manifest.user

    def placed(self, call: str) -> RunState:
        """Returns this rank's model, optimizer and counters. Raises EngineError before the model is sharded, and inside
        ``full_parameters``; the error names the method ``call``.
        """
        if self._run is None:
            raise EngineError(
                f"{call} was called before the model is placed on the grid, which needs a batch; pass "
                "example_batch=... to engine.initialize, or train a batch first."
            )
        if self._run.runtime.gatherer is not None:
            self._run.runtime.gatherer.refuse_opened(call)
        return self._run

    def _writer(self, call: str) -> tuple[CheckpointWriter, RunState]:
        run = self.placed(call)
        self._renew_group()
        if self._checkpoints is None:
            self._checkpoints = CheckpointWriter(run, self._group(), self.control)
        return self._checkpoints, run

    def _group(self) -> TorchHostGroup:
        if self._host is None:
            grid, patience = self._comm.grid, self._config.communication.timeout_seconds
            self._host = TorchHostGroup(grid.rank, grid.world_size, timeout_seconds(patience))
        return self._host

    def _renew_group(self) -> None:
        """Waits for the pending save, and makes another host group if any rank has lost a message in this one.

        One all-reduce of 8 bytes over the world, label "checkpoint", if there is a group: a slow rank, or one that
        has lost nothing itself, does not know that the group is broken.
        """
        self.drain()
        if self._host is None or self._comm.grid.world_size == 1:
            return
        if first_rank(self._host.broken, self._comm, self.device, "checkpoint") is None:
            return
        if self._comm.grid.rank == 0:
            logger.warning("checkpoint: the last save or load has lost a rank; the ranks reconnect")
        self._host.close()
        self._host = None
        if self._checkpoints is not None:
            self._checkpoints.use(self._group())


def _path(folder: str | None) -> Path | None:
    return resolved(folder) if folder is not None else None
