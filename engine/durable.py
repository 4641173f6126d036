"""An engine's dealings with checkpoints: before the model is built, between steps, on SIGTERM, at the end."""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from engine.build import Parts
from engine.checkpoint.background import PendingSave
from engine.checkpoint.committed import read_manifest
from engine.checkpoint.files import Files
from engine.checkpointing import Checkpoints, Run
from engine.config import Config
from engine.errors import CheckpointError, EngineError
from engine.parallel.comm import Comm
from engine.parallel.host import TorchHostGroup
from engine.parallel.world import timeout_seconds
from engine.resuming import Resume, find_checkpoint, raise_together, start_weights
from engine.stopping import EXIT_CODE, StopSignal
from engine.update import Update

logger = logging.getLogger("trine")


@runtime_checkable
class Stateful(Protocol):
    """What can be registered for checkpointing; its state is JSON, the same on every rank."""

    def state_dict(self) -> Mapping[str, Any]:
        """What ``load_state_dict`` takes."""

    def load_state_dict(self, state: Any) -> Any:
        """Go on from there."""


@dataclass(frozen=True, slots=True)
class _Wish:
    """A load that waits for the model to be built."""

    step: Path
    module_only: bool
    optimizer_states: bool


class Durable:
    """What of an engine lasts."""

    def __init__(
        self, model: nn.Module, config: Config, comm: Comm, device: torch.device, model_files: Mapping[str, bytes]
    ) -> None:
        self._model, self._config, self._comm, self.device = model, config, comm, device
        self._model_files = model_files
        self._tracked: dict[str, Stateful] = {}
        self._files = Files()
        self._host: TorchHostGroup | None = None
        self._run: Run | None = None
        self._checkpoints: Checkpoints | None = None
        self._wish: _Wish | None = None
        self._spoiled = False
        self._saved_at = -1
        self._signal = StopSignal() if config.checkpoint.folder is not None else None

    @property
    def stop_asked(self) -> bool:
        """This rank was asked to stop."""
        return self._signal is not None and self._signal.asked

    def built(self, parts: Parts, update: Update) -> None:
        """The model is on the grid: read the weights it starts from, and what was to be loaded. Collective."""
        self._run = Run(
            self._model, self._config, self._comm, self.device, update, parts, self._tracked, self._model_files,
            self._files,
        )  # fmt: skip
        wish, self._wish = self._wish, None
        if self._config.checkpoint.init_from is not None and wish is None:
            start_weights(self._run, self._group(), Path(self._config.checkpoint.init_from))
        if wish is not None:
            self._resume(wish)

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
        given = folder if folder is not None else self._config.checkpoint.folder
        if given is None:
            raise EngineError("save_checkpoint() without a folder, and checkpoint.folder is null; give one of the two.")
        self.refuse_spoiled()
        checkpoints, run = self._writer("save_checkpoint")
        self._saved_at = run.update.made
        return checkpoints.save(Path(given), client_state)

    def load(self, folder: str | os.PathLike[str] | None, module_only: bool, optimizer_states: bool) -> Any:
        """See :meth:`engine.Engine.load_checkpoint`."""
        given = folder if folder is not None else self._config.checkpoint.folder
        if given is None:
            raise EngineError("load_checkpoint() without a folder, and checkpoint.folder is null; give one of the two.")
        self.drain()
        step = find_checkpoint(Path(given), self._group(), self._files)
        if step is None:
            return None
        wish = _Wish(step, module_only, optimizer_states)
        if self._run is None:
            self._wish = wish
            return self._user_part(step)
        return self._resume(wish)

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """See :meth:`engine.Engine.save_pretrained`."""
        self.refuse_spoiled()
        checkpoints, _ = self._writer("save_pretrained")
        checkpoints.export(Path(folder))

    def problem(self) -> CheckpointError | None:
        """Why the run has to stop: a checkpoint that was not written, where the configuration says so."""
        return self._checkpoints.problem if self._checkpoints is not None else None

    def after_step(self, made: bool, stops: bool) -> None:
        """Save if it is time; end the run if any rank was asked to. The same on all ranks.

        Raises:
            SystemExit: status 143, after a committed checkpoint.
        """
        settings, run = self._config.checkpoint, self._run
        assert run is not None, "a step needs a built model"
        due = made and settings.every > 0 and run.update.made % settings.every == 0
        if (due or stops) and settings.folder is not None and run.update.made != self._saved_at:
            self.save(None, {})
        if stops:
            self.drain()
            if run.comm.grid.rank == 0:
                logger.warning("stopped by SIGTERM after update %d; the next run goes on from there", run.update.made)
            raise SystemExit(EXIT_CODE)

    def refuse_spoiled(self) -> None:
        """Refuse to go on with weights of which a failed load has replaced a part."""
        if self._spoiled:
            raise CheckpointError(
                "the last load_checkpoint failed in the middle, so the weights are part old and part new; load another "
                "checkpoint first."
            )

    def drain(self) -> None:
        """Wait for the save under way."""
        if self._checkpoints is not None:
            self._checkpoints.drain()

    def close(self) -> None:
        """Wait for the save under way, let go of signals and groups."""
        if self._signal is not None:
            self._signal.remove()
        self.drain()
        if self._host is not None:
            self._host.close()

    def _resume(self, wish: _Wish) -> Any:
        assert self._run is not None, "the caller has looked"
        resume = Resume(self._run, self._group(), wish.step, wish.module_only, wish.optimizer_states)
        try:
            user = resume.load()
        except BaseException:
            self._spoiled = self._spoiled or resume.touched
            raise
        self._spoiled = False
        self._saved_at = self._run.update.made
        if self._comm.grid.rank == 0:
            logger.info("checkpoint loaded: %s, %d updates made", wish.step, self._run.update.made)
        return user

    def _user_part(self, step: Path) -> Any:
        problem, user = "", None
        try:
            user = read_manifest(self._files, step).user
        except CheckpointError as error:
            problem = str(error)
        raise_together(self._group(), problem, str)
        return user

    def _writer(self, call: str) -> tuple[Checkpoints, Run]:
        if self._run is None:
            raise EngineError(
                f"{call} before the model is cut, which needs a batch; pass example_batch=... to engine.initialize, or "
                "train a batch first."
            )
        if self._run.parts.bench.gathering is not None:
            self._run.parts.bench.gathering.refuse_opened(call)
        if self._checkpoints is None:
            self._checkpoints = Checkpoints(self._run, self._group())
        return self._checkpoints, self._run

    def _group(self) -> TorchHostGroup:
        if self._host is None:
            grid = self._comm.grid
            self._host = TorchHostGroup(grid.rank, grid.world_size, timeout_seconds())
        return self._host
