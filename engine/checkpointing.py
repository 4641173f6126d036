"""What of an engine goes into a checkpoint, and when one is written.

previous save ended? -> snapshot of this rank's share -> in the background: write, commit, keep the newest
"""

import json
import logging
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from engine.build import Parts
from engine.checkpoint.background import PendingSave
from engine.checkpoint.files import Files
from engine.checkpoint.held import Holdings
from engine.checkpoint.huggingface import with_dtype
from engine.checkpoint.image import kind_of
from engine.checkpoint.optimizer_state import describe, moments, numbers
from engine.checkpoint.random_state import random_states
from engine.checkpoint.save import Saver
from engine.checkpoint.schedule_state import schedule_state
from engine.checkpoint.shares import ModelTensor, Shares, model_tensors
from engine.checkpoint.snapshot import Contents, Ours, Snapshot
from engine.checkpoint.tensor_file import DTYPES
from engine.config import Config
from engine.errors import CheckpointError
from engine.parallel.comm import Comm
from engine.parallel.host import HostGroup
from engine.progress import Progress
from engine.zero.edits import carry_over

logger = logging.getLogger("trine")

WORTH_A_LINE = 0.1
"""Seconds of waiting for a save that are told."""


@dataclass(frozen=True)
class Run:
    """What a checkpoint is of: one engine, as one rank sees it."""

    model: nn.Module
    config: Config
    comm: Comm
    device: torch.device
    progress: Progress
    parts: Parts
    model_files: Mapping[str, bytes]
    """What belongs into the model folder beside tensors."""
    files: Files = field(default_factory=Files)

    @cached_property
    def shares(self) -> Shares:
        """Who stores what."""
        return Shares(self.parts.plan)

    @cached_property
    def keys(self) -> dict[str, list[str]]:
        """ "param/..." and "buffer/..." -> its keys in ``model.state_dict()``, the first of which files have."""
        keys: dict[str, list[str]] = {f"param/{row.name}": [] for row in self.parts.plan.table}
        for key, entry in self.parts.full_state.entries.items():
            if entry.kind in ("parameter", "buffer"):
                folder = "param" if entry.kind == "parameter" else "buffer"
                keys.setdefault(f"{folder}/{entry.name}", []).append(key)
        return {name: given or [name.partition("/")[2]] for name, given in keys.items()}

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The persistent ones, by "buffer/..."."""
        live = dict(self.model.named_buffers())
        return {name: live[name.partition("/")[2]] for name in self.keys if name.startswith("buffer/")}

    @cached_property
    def tensors(self) -> tuple[ModelTensor, ...]:
        """The model folder."""
        parameters = {n.partition("/")[2]: given[0] for n, given in self.keys.items() if n.startswith("param/")}
        kinds = {name: (self.keys[name][0], kind_of(buffer)) for name, buffer in self.buffers.items()}
        return model_tensors(self.shares, parameters, {n.partition("/")[2]: kind for n, kind in kinds.items()})

    @property
    def holdings(self) -> Holdings:
        """What this rank has."""
        parts = self.parts
        buckets = (*parts.buckets, *parts.frozen)
        return Holdings(self.shares, self.comm.grid.coord(), self.model, buckets, parts.optimizer.places)

    def own_state(self) -> dict[str, Tensor]:
        """What is this rank's alone: random generators, as bytes, and buffers that its forwards write."""
        written = {f"buffer/{name}": buffer.detach() for name, buffer in self.parts.written.written()}
        return random_states(self.device) | written

    def ours(self, weights_only: bool = False) -> Ours:
        """All that this rank stores."""
        for flat in self.parts.buckets:
            carry_over(flat)
        holdings = self.holdings
        weights = [*holdings.weights(), *holdings.whole()]
        if weights_only:
            return Ours(weights, self.buffers, pieces=(), state={}, numbers={})
        pieces = [*holdings.masters(), *holdings.state(moments(self.parts.optimizer))]
        return Ours(weights, self.buffers, pieces, self.own_state(), numbers(self.parts.optimizer))

    def contents(self, user: Any) -> Contents:
        """The manifest, but for tensors."""
        scheduler = self.parts.learning_rate.scheduler
        progress = {
            "update": self.progress.update.state_dict(),
            "scheduler": schedule_state(scheduler.state_dict()) if scheduler is not None else None,
            "tracked": {
                name: _json(f"state of {name!r}", thing.state_dict()) for name, thing in self.progress.tracked.items()
            },
        }
        names = {name: given for name, given in self.keys.items() if len(given) > 1}
        return Contents(
            step=self.progress.update.made,
            aliases={other: given[0] for given in names.values() for other in given[1:]},
            info=self._info(),
            progress=progress,
            optimizer=describe(self.parts.optimizer, self.parts.plan.table),
            user=_json("client_state", user),
            model_files=with_dtype(self.model_files, self._dtype()),
        )

    def _info(self) -> dict[str, Any]:
        grid = self.comm.grid
        return {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": {"python": platform.python_version(), "torch": str(torch.__version__)},
            "grid": {"dp": grid.dp, "tp": grid.tp, "pp": grid.pp, "zero": self.config.zero_optimization.stage},
            "places": self.parts.plan.places,
            "config": self.config.to_json(),
        }

    def _dtype(self) -> str:
        """Of most of the weights."""
        sizes: dict[str, int] = {}
        for tensor in self.tensors:
            sizes[tensor.kind.dtype] = sizes.get(tensor.kind.dtype, 0) + tensor.kind.bytes
        return DTYPES[max(sizes, key=lambda code: sizes[code])] if sizes else "float32"


class Checkpoints:
    """Writes the checkpoints of one run, one at a time."""

    def __init__(self, run: Run, host: HostGroup) -> None:
        self._run, self._config = run, run.config.checkpoint
        self._saver = Saver(run.shares, run.tensors, host, run.files)
        self._pending: PendingSave | None = None
        others = [key for key, entry in run.parts.full_state.entries.items() if entry.kind == "other"]
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

    def drain(self) -> None:
        """Wait for the save under way; how it went is told elsewhere."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        started = time.perf_counter()
        pending.join()
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


def _json(what: str, value: Any) -> Any:
    """A copy, which nobody changes while it is written.

    Raises:
        CheckpointError: it is no JSON.
    """
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"the {what} cannot be saved: {error}; give dicts, lists, texts and finite numbers."
        ) from error
