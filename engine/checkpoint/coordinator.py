"""An engine's dealings with checkpoints: before the model is built, between steps, on SIGTERM, at the end."""

import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from engine.checkpoint.contents.trainer_state import Stateful, TrainerState
from engine.checkpoint.format.filesystem import Files, resolved
from engine.checkpoint.format.step_reader import StepReader
from engine.checkpoint.full_state import Entry, FullState
from engine.checkpoint.preemption import EXIT_CODE, StopSignal
from engine.checkpoint.resume import LoadRequest, Resume, agreed, find_checkpoint, start_weights
from engine.checkpoint.run_state import RunState
from engine.checkpoint.writer import CheckpointWriter, PendingSave
from engine.config import Config
from engine.errors import CheckpointError, EngineError
from engine.parallel.comm.comm import Comm
from engine.parallel.comm.host_group import TorchHostGroup
from engine.parallel.comm.world import timeout_seconds
from engine.step.runtime import RankRuntime
from engine.step.update import Update

logger = logging.getLogger("trine")


class CheckpointCoordinator:
    """What of an engine lasts."""

    def __init__(
        self, model: nn.Module, config: Config, comm: Comm, device: torch.device, model_files: Mapping[str, bytes]
    ) -> None:
        self._model, self._config, self._comm, self.device = model, config, comm, device
        self._model_files = model_files
        self._tracked: dict[str, Stateful] = {}
        self._files = Files()
        self._host: TorchHostGroup | None = None
        self._run: RunState | None = None
        self._checkpoints: CheckpointWriter | None = None
        self._wish: LoadRequest | None = None
        self._spoiled = False
        self._saved_at = -1
        """The update whose state is in the run's folder."""
        self._last: PendingSave | None = None
        """The last save into the run's folder."""
        self._folder = _path(config.checkpoint.folder)
        self._init_from = _path(config.checkpoint.init_from)
        self._signal = StopSignal() if config.checkpoint.folder is not None else None
        if self._signal is not None:
            comm.broken = self._signal.give_up  # a launcher ends the ranks of a broken job by the same signal

    @property
    def stop_asked(self) -> bool:
        """This rank was asked to stop."""
        return self._signal is not None and self._signal.asked

    def built(self, runtime: RankRuntime, update: Update, entries: Mapping[str, Entry]) -> None:
        """The model is on the grid: read the weights it starts from, and what was to be loaded. Collective."""
        progress = self._progress(update)
        self._run = RunState(
            model=self._model,
            config=self._config,
            comm=self._comm,
            device=self.device,
            progress=progress,
            runtime=runtime,
            full_state=FullState(self._model, runtime.plan, entries, self._comm),
            model_files=self._model_files,
            files=self._files,
        )
        wish, self._wish = self._wish, None
        self._spoiled = wish is not None or self._init_from is not None  # until it has been read
        if self._init_from is not None and wish is None:
            start_weights(self._run, self._group(), self._init_from)
            self._spoiled = False
        if wish is not None:
            self._resume(wish)

    def _progress(self, update: Update) -> TrainerState:
        return TrainerState(update, self._tracked, self._comm.grid, self.device)

    def register(self, things: Mapping[str, object]) -> None:
        """See :meth:`engine.Engine.register_for_checkpointing`."""
        for name, thing in things.items():
            if not isinstance(thing, Stateful):
                raise EngineError(
                    f"register_for_checkpointing({name}=...): a {type(thing).__name__} has no state_dict and "
                    "load_state_dict; give it both, or pass its state as client_state."
                )
            self._tracked[name] = thing

    def save(self, folder: str | os.PathLike[str] | None, client_state: Any) -> PendingSave:
        """See :meth:`engine.Engine.save_checkpoint`."""
        path = self._folder if folder is None else resolved(folder)
        if path is None:
            raise EngineError("save_checkpoint() without a folder, and checkpoint.folder is null; give one of the two.")
        self.refuse_spoiled()
        checkpoints, run = self._writer("save_checkpoint")
        if path != self._folder:
            return checkpoints.save(path, client_state, keep=None)
        self._saved_at = run.progress.update.made
        self._last = checkpoints.save(path, client_state, self._config.checkpoint.keep)
        return self._last

    def load(
        self, folder: str | os.PathLike[str] | None, module_only: bool, optimizer_states: bool, update: Update
    ) -> Any:
        """See :meth:`engine.Engine.load_checkpoint`."""
        path = self._folder if folder is None else resolved(folder)
        if path is None:
            raise EngineError("load_checkpoint() without a folder, and checkpoint.folder is null; give one of the two.")
        self.drain()
        step = find_checkpoint(path, self._group(), self._files)
        if step is None:
            return None
        wish = LoadRequest(step, module_only, optimizer_states)
        return self._begin(wish, update) if self._run is None else self._resume(wish)

    def gather_full_state(self) -> dict[str, torch.Tensor]:
        """See :meth:`engine.Engine.full_state_dict`; the engine is built."""
        assert self._run is not None, "the caller has looked"
        runtime = self._run.runtime
        return self._run.full_state.gather((*runtime.buckets, *runtime.frozen))

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """See :meth:`engine.Engine.save_pretrained`."""
        self.refuse_spoiled()
        checkpoints, _ = self._writer("save_pretrained")
        checkpoints.export(resolved(folder))

    def problem(self) -> CheckpointError | None:
        """Why the run has to stop: a checkpoint that was not written, where the configuration says so. Told once."""
        if self._checkpoints is None:
            return None
        problem, self._checkpoints.problem = self._checkpoints.problem, None
        return problem

    def after_step(self, made: bool, stops: bool) -> None:
        """Save if it is time; end the run if any rank was asked to. The same on all ranks.

        Raises:
            SystemExit: status 143, after a committed checkpoint.
            CheckpointError: the run was to end, and its checkpoint was not written.
        """
        settings, run = self._config.checkpoint, self._run
        assert run is not None, "a step needs a built model"
        done = run.progress.update.made
        due = made and settings.every > 0 and done % settings.every == 0
        if (due or stops) and self._folder is not None and done != self._saved_at:
            self.save(None, {})
        if stops:
            self.drain()
            if self._last is not None:
                self._last.wait()
            if self._comm.grid.rank == 0:
                logger.warning("stopped by SIGTERM after update %d; the next run goes on from there", done)
            raise SystemExit(EXIT_CODE)

    def refuse_spoiled(self) -> None:
        """Refuse to go on with weights of which a failed load has replaced a part."""
        if self._spoiled:
            raise CheckpointError(
                "the last load_checkpoint, or checkpoint.init_from, failed in the middle, so the weights are those of "
                "no checkpoint; load another one first."
            )

    def drain(self) -> None:
        """Wait for the save under way."""
        if self._checkpoints is not None:
            self._checkpoints.drain()

    def close(self) -> None:
        """Wait for the save under way, then ``release``.

        Raises:
            CheckpointError: the last save has failed and nobody was told, where such a failure stops the run.
        """
        if self._signal is not None:
            self._signal.remove()
        self.drain()
        self.release()
        if (problem := self.problem()) is not None:
            raise problem

    def release(self) -> None:
        """Give back the signal handler and destroy the host group, without waiting. A second call does nothing.

        A save under way goes on in its thread to its end, and that thread destroys the group.
        """
        if self._signal is not None:
            self._signal.remove()
        if self._host is None:
            return
        if self._checkpoints is None:
            self._host.close()
        else:
            self._checkpoints.afterwards(self._host.close)

    def _resume(self, wish: LoadRequest) -> Any:
        assert self._run is not None, "the caller has looked"
        resume = Resume(self._run, self._group(), wish)
        try:
            user = resume.load()
        except BaseException:
            self._spoiled = self._spoiled or resume.touched
            raise
        self._spoiled = False
        done, whole = self._run.progress.update.made, wish.optimizer_states and not wish.module_only
        self._saved_at = done if whole and wish.step.parent == self._folder else -1
        if self._comm.grid.rank == 0:
            logger.info("checkpoint loaded: %s, %d updates made", wish.step, done)
        return user

    def _begin(self, wish: LoadRequest, update: Update) -> Any:
        """Restore what needs no model; the rest waits for it."""
        reader = agreed(self._group(), lambda: StepReader(self._files, wish.step), wish.step, str)
        if not wish.module_only:
            progress = self._progress(update)
            agreed(self._group(), lambda: progress.check(reader), wish.step, str)
            agreed(self._group(), lambda: progress.restore(reader), wish.step, str)
        self._wish = replace(wish, begun=not wish.module_only)
        return reader.manifest.user

    def _writer(self, call: str) -> tuple[CheckpointWriter, RunState]:
        if self._run is None:
            raise EngineError(
                f"{call} before the model is cut, which needs a batch; pass example_batch=... to engine.initialize, or "
                "train a batch first."
            )
        if self._run.runtime.gatherer is not None:
            self._run.runtime.gatherer.refuse_opened(call)
        if self._checkpoints is None:
            self._checkpoints = CheckpointWriter(self._run, self._group())
        return self._checkpoints, self._run

    def _group(self) -> TorchHostGroup:
        if self._host is None:
            grid = self._comm.grid
            self._host = TorchHostGroup(grid.rank, grid.world_size, timeout_seconds())
        return self._host


def _path(folder: str | None) -> Path | None:
    return resolved(folder) if folder is not None else None
