"""Load of a checkpoint: choice, comparison with the model, reads, and restoring of counters and generators.

choose (rank 0) -> open, compare -> read -> share over dp -> counters, registered objects, generators

At each arrow all ranks agree that the previous phase succeeded; otherwise all raise the same sentence.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from engine.checkpoint.contents.optimizer_state import (
    Families,
    Moments,
    check_schedule,
    check_type,
    make_moments,
    restore,
    restore_schedule,
    updated_parameters,
)
from engine.checkpoint.contents.trainer_state import RATES, TRAINING, changed_settings, joined, kept_options, own_states
from engine.checkpoint.foreign import foreign_folder, open_checkpoint
from engine.checkpoint.format.filesystem import Files, resolved
from engine.checkpoint.format.step_folders import committed, steps_of
from engine.checkpoint.format.step_reader import OpenCheckpoint, StepReader
from engine.checkpoint.format.strict_json import dump, parse
from engine.checkpoint.huggingface import PretrainedFolder
from engine.checkpoint.load import Loader, TensorSource, share_moments, share_weights
from engine.checkpoint.published_keys import published_parts
from engine.checkpoint.run_state import RunState
from engine.errors import CheckpointError, EngineError
from engine.optim.lr_schedules import UpdateScheduler
from engine.parallel.comm.agreement import raise_together
from engine.parallel.comm.host_group import HostGroup, announce, collect
from engine.parallel.grid import saved_grid
from engine.parallel.model.adapters import adapter_names, base_name, is_peft_model
from engine.step.parts import StepPart
from engine.zero.optim.flat_optimizers import FlatOptimizer
from engine.zero.optim.optimizer_tensors import families_of
from engine.zero.optim.rules.element_state import keep_state

logger = logging.getLogger("trine")


class ClientState(dict[str, Any]):
    """Dict that ``load_checkpoint`` returns. Iteration over it raises EngineError; ``items``, ``keys`` and ``values``
    work.

    The error catches ``path, state = eng.load_checkpoint(...)``, which is right only with DeepSpeed.
    """

    def __iter__(self) -> Iterator[str]:
        raise EngineError(
            "the result of load_checkpoint was unpacked or iterated over, but it is the client state alone, not "
            "(path, client_state); write `state = eng.load_checkpoint(...)`, and state.items() for a loop over it."
        )


def find_checkpoint(folder: Path, host: HostGroup, files: Files, missing_ok: bool = False) -> Path | None:
    """Finds the checkpoint to load: ``folder`` itself, or the newest checkpoint in it. Rank 0 searches for all ranks.

    Returns None if there is none and ``missing_ok`` is True.

    Raises:
        CheckpointError: ranks passed different folders; there is no checkpoint, and ``missing_ok`` is False.
    """
    given = collect(host, str(folder).encode(errors="backslashreplace"))
    found: Path | None = None
    problem = ""
    if given is not None:
        try:
            problem = _different(given)
            path = resolved(folder)
            found = None if problem else next(reversed(steps_of(files, path)), None) or foreign_folder(files, path)
        except OSError as error:
            problem = f"{folder}: {error.strerror or error}"
        if found is None and not problem and not missing_ok:
            problem = _missing(files, folder)
    answer = parse(announce(host, dump({"found": str(found or ""), "problem": problem})), "rank 0's message")
    if answer["problem"]:
        raise CheckpointError(answer["problem"])
    return Path(answer["found"]) if answer["found"] else None


def _different(given: list[bytes]) -> str:
    """Returns the problem of folders that differ among the ranks, or an empty text."""
    for rank, other in enumerate(given):
        if other != given[0]:
            return (
                f"load_checkpoint was given {other.decode()!r} on rank {rank} and {given[0].decode()!r} on rank 0, but "
                "one checkpoint is loaded for all ranks; pass the same folder on every rank."
            )
    return ""


def _missing(files: Files, folder: Path) -> str:
    there = "has no checkpoint" if files.is_folder(folder) else "is not a folder"
    return (
        f"load_checkpoint: {folder} {there}; pass the folder of a run or one of its step-N folders, or "
        "missing_ok=True at the first start of a run."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """Options that select which parts of a checkpoint are loaded."""

    module_only: bool
    """Load only weights and buffers."""
    optimizer_states: bool
    """Load moments and counters of the optimizer too; False: the optimizer starts fresh."""
    strict: bool
    """Raise if the checkpoint has other parameters, buffers or moments than this model."""
    scheduler_states: bool = True
    """Load the position of a torch scheduler too."""

    @property
    def moments(self) -> bool:
        """True if optimizer state is loaded: ``optimizer_states`` is True and ``module_only`` is False."""
        return self.optimizer_states and not self.module_only


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """Checkpoint folder, options and file operations of one load."""

    step: Path
    """Folder of the checkpoint."""
    options: LoadOptions
    files: Files
    """File operations that read the checkpoint, from disk or host memory."""
    begun: bool = False
    """True if counters, registered objects and generators are restored already."""


class Resume:
    """Loader of one checkpoint into an engine with a sharded model.

    Args:
        run: model, optimizer and counters of the engine.
        host: process group of CPU tensors.
        request: folder of the checkpoint, and the parts of it to load.
    """

    def __init__(self, run: RunState, host: HostGroup, request: LoadRequest) -> None:
        self._run, self._host, self._step, self._request = run, host, request.step, request
        self._options, self._states = request.options, request.options.moments
        self.touched = False
        """True while weights are being overwritten: a failure then leaves a mixture of old and new values."""

    def load(self) -> Any:
        """Restores the run from the checkpoint; returns the saved ``client_state``. Collective.

        Raises:
            CheckpointError: the checkpoint is damaged (names file, tensor and the last good checkpoint) or of another
                model (names the first difference). All ranks raise the same error.
        """
        run = self._run
        with loading(self._host, self._step, self._advice):
            reader = self._open()
        loader = Loader(reader, run.local_tensors, run.buffers, self._options.strict, self._left_out(reader))
        with loading(self._host, self._step):  # a failure here means another model, not damage
            self._check(reader, loader)
        self.touched = True
        with loading(self._host, self._step, self._advice):
            made = self._read(reader, loader)
            beside = self._read_companions(reader, loader)
        share_weights(run.runtime.buckets, run.comm)
        for tensors in beside:
            share_moments(run.local_tensors, tensors, run.comm)
        run.runtime.weights_written()
        if self._states:
            share_moments(run.local_tensors, made, run.comm)
            keep_state(run.runtime.optimizer, made)
        with loading(self._host, self._step, self._advice):
            self._restore(reader)
        self.touched = False
        return reader.manifest.user

    def _open(self) -> OpenCheckpoint:
        reader = open_checkpoint(self._request.files, self._step, self._states)
        if self._host.rank == 0:
            for file in reader.manifest.files:
                if not file.endswith(".safetensors"):
                    reader.check_file(file)
        return reader

    def _left_out(self, reader: OpenCheckpoint) -> frozenset[str]:
        """Returns the frozen parameters of this model, if it borrows them or the checkpoint was written without any."""
        written = reader.manifest.info.get("config", {}).get("checkpoint", {})
        if not self._run.comm.borrows and written.get("frozen", True):
            return frozenset()
        return frozenset(f"param/{row.name}" for row in self._run.runtime.plan.table if not row.trainable)

    def _check(self, reader: OpenCheckpoint, loader: Loader) -> None:
        runtime, manifest = self._run.runtime, reader.manifest
        loader.check()
        if self._host.rank == 0:
            loader.tell_differences()
        if self._states:
            check_type(runtime.optimizer, manifest.optimizer, self._step)
            families = self._families(reader)
            loader.check_apart(runtime.optimizer.whole, updated_parameters(manifest.optimizer))
            loader.check_moments(families)
            if not families.kinds and "origin" in manifest.info and self._host.rank == 0:
                logger.warning("%s has no optimizer state, so the optimizer starts afresh", self._step)
        if self._options.module_only:
            return
        if self._takes_rates(reader):
            check_schedule(runtime.optimizer, runtime.plan.table, manifest.optimizer)
        self._refuse_new_start(manifest.step)
        self._warn_of_new_schedule(reader)
        if self._host.rank == 0:
            self._tell_new_sizes(reader)
            if changes := self._changes(reader):
                logger.info("settings changed since step %d: %s", manifest.step, ", ".join(changes))
        if not self._request.begun:
            self._run.trainer_state.check(reader)

    def _changes(self, reader: OpenCheckpoint, among: Sequence[str] = TRAINING) -> list[str]:
        """Returns training settings that differ from the saved run's; another engine's settings are unknown."""
        own, before = self._run.runtime.plan.moments is None, reader.manifest.info.get("config", {})
        return changed_settings(before, self._run.config.to_json(), own, among)

    def _takes_rates(self, reader: OpenCheckpoint) -> bool:
        """Returns True if the next update has the saved rates, which this run's scheduler does not compute."""
        given, stored = self._run.runtime.learning_rate.scheduler, reader.manifest.progress["scheduler"]
        placed = isinstance(given, UpdateScheduler) and self._options.scheduler_states
        return given is not None and stored is not None and not placed

    def _refuse_new_start(self, done: int) -> None:
        rate = self._run.runtime.learning_rate
        if not self._options.scheduler_states and rate.schedules and done:
            raise EngineError(
                "load_lr_scheduler_states=False was given, but each learning rate follows from the number of the "
                "update, so there is no scheduler state to skip; leave the argument out, or initialize the engine with "
                "lr_scheduler=..., a function that takes the optimizer and returns a torch LRScheduler."
            )

    def _warn_of_new_schedule(self, reader: OpenCheckpoint) -> None:
        rate, done = self._run.runtime.learning_rate, reader.manifest.step
        given = rate.scheduler
        if rate.remake is not None or isinstance(given, UpdateScheduler):
            return
        if given is not None and reader.manifest.progress["scheduler"] is None and done and not self._host.rank:
            logger.warning(
                "%s has no scheduler state, so the given %s starts at its first step; pass lr_scheduler as a function "
                "of the update to start it at update %d",
                self._step,
                type(given).__name__,
                done,
            )

    def _tell_new_sizes(self, reader: OpenCheckpoint) -> None:
        """Logs changes of grid and batch since the checkpoint; another engine's checkpoint does not have them."""
        config, info, grid = self._run.config, reader.manifest.info, self._run.comm.grid
        before, now = info.get("config", {}).get("train_batch_size"), config.train_batch_size
        there = grid if "origin" in info else saved_grid(info["grid"])
        if str(there) != str(grid):
            rows = f"; a batch still has {now} rows, {config.accumulation} microbatches a data rank" * (before == now)
            logger.info("the grid was %s until step %d, and is %s%s", there, reader.manifest.step, grid, rows)
        if before is not None and before != now:
            logger.warning(
                "a batch had %s rows until step %d and has %s now, so the updates are no longer those of one run; set "
                "train_batch_size, from which the microbatches of a rank follow",
                before, reader.manifest.step, now,
            )  # fmt: skip

    def _read(self, reader: OpenCheckpoint, loader: Loader) -> Moments:
        loader.read_weights()
        made: Moments = {}
        if self._states:
            runtime, families = self._run.runtime, self._families(reader)
            made = make_moments(runtime.optimizer, families, runtime.plan.table)
            loader.read_moments(made)
            loader.read_apart(runtime.optimizer.whole)
        return made

    def _read_companions(
        self, reader: OpenCheckpoint, loader: Loader
    ) -> list[Mapping[nn.Parameter, Mapping[str, Tensor]]]:
        """Reads the averages and anchors; what the checkpoint lacks of them stays as it was prepared."""
        stored = reader.kinds if self._states else {}
        made = [companion.prepare(stored) for companion in self._run.runtime.inventory.companions]
        for tensors in made:
            replace(loader, strict=False).read_moments(tensors)
        return made

    def _families(self, reader: OpenCheckpoint) -> Families:
        apart = families_of(self._run.runtime.optimizer.whole)
        return Families(reader.kinds, reader.manifest.optimizer, apart)

    def _restore(self, reader: OpenCheckpoint) -> None:
        run, manifest = self._run, reader.manifest
        if self._options.module_only:
            return
        if self._states:
            runtime = run.runtime
            before = [dict(group) for group in runtime.optimizer.inner.param_groups]
            restore(runtime.optimizer, runtime.plan.table, manifest.optimizer, runtime.learning_rate.governs)
            self._tell_kept_options(before)
        else:
            run.runtime.optimizer.forget()
        self._restore_schedule(reader)
        states = own_states(reader, run.comm.grid) if self._request.begun else run.trainer_state.restore(reader)
        if self._request.begun:
            run.trainer_state.restore_late(reader)
        self._restore_residuals(states)
        # with another placement of stages, another rank now runs the modules with these buffers
        if manifest.info.get("places") == run.runtime.plan.places:
            for part in run.runtime.parts.having(StepPart.restore):
                part.restore(states)

    def _restore_schedule(self, reader: OpenCheckpoint) -> None:
        """Restores the state of a torch scheduler; places a scheduler with rates by update at the current one."""
        rate, done = self._run.runtime.learning_rate, reader.manifest.step
        stored = reader.manifest.progress["scheduler"]
        given: Any = rate.scheduler
        if given is None:
            return
        if self._options.scheduler_states:
            if isinstance(given, UpdateScheduler):
                given.load_state_dict(stored or {"last_epoch": done})
            elif rate.remake is not None and (stored is None or self._changes(reader, RATES)):
                rate.begin_at(done)  # saved rates of other settings would override the configured ones
                return
            elif stored is not None:
                given.load_state_dict(joined(given.state_dict(), stored))
        if self._takes_rates(reader):
            restore_schedule(self._run.runtime.optimizer, reader.manifest.optimizer)

    def _tell_kept_options(self, before: Sequence[Mapping[str, Any]]) -> None:
        """Logs the options of an optimizer from code that the checkpoint has replaced; others are configured."""
        inner, scheduled = self._run.runtime.optimizer.inner, self._run.runtime.learning_rate.governs
        kept = [] if isinstance(inner, FlatOptimizer) else kept_options(inner.param_groups, before, scheduled)
        if kept and self._host.rank == 0:
            logger.info("the optimizer continues with options of the checkpoint: %s", ", ".join(kept))

    def _restore_residuals(self, states: Mapping[str, Tensor]) -> None:
        """Restores the residuals of error feedback; drops those of another grid or layout."""
        residuals = self._run.residuals
        fits = all(name in states and states[name].shape == own.shape for name, own in residuals.items())
        for name, own in residuals.items():
            own.copy_(states[name]) if fits else own.zero_()
        if residuals and not fits and self._host.rank == 0:
            logger.info("%s has no residuals for this grid and layout; error feedback starts at zero", self._step)

    def _advice(self) -> str:
        """Returns words about the newest other sound checkpoint of the run; reads and verifies it in full."""
        files = self._run.files
        for other in reversed(committed(files, self._step.parent)):
            try:
                if other != self._step:
                    StepReader(files, other).verify()
                    return f" The last good checkpoint is {other}: load_checkpoint({str(other)!r})."
            except (EngineError, OSError):
                continue
        return " There is no other good checkpoint in its folder."


def loading(host: HostGroup, step: Path, advice: Callable[[], str] = str) -> AbstractContextManager[None]:
    """Returns a context for a part of a load; all ranks enter it. If a rank fails in it, all ranks raise its error,
    with the text of ``advice()`` appended.

    Raises:
        CheckpointError: a rank has failed; names the checkpoint ``step``.
    """

    def describe(error: Exception) -> str:
        if not isinstance(error, EngineError):
            return f"{step} cannot be loaded: {type(error).__name__}, {error}."
        return str(error) if str(step) in str(error) else f"{step}: {error}"

    return raise_together(host, describe, advice)


def start_weights(run: RunState, host: HostGroup, folder: Path) -> None:
    """Loads initial weights from ``folder`` (``checkpoint.init_from``), a Hugging Face folder or a checkpoint.
    Collective.
    """

    def describe(error: Exception) -> str:
        if isinstance(error, EngineError):
            return f"checkpoint.init_from: {error}"
        return f"checkpoint.init_from {folder}: {type(error).__name__}, {error}."

    with raise_together(host, describe):
        source = _weights_of(run, folder)
        kinds = source.kinds
        known = {name.partition("/")[2] for name in kinds}
        buffers = {name: buffer for name, buffer in run.buffers.items() if name.partition("/")[2] in known}
        adapters = adapter_names(run.model, [name.partition("/")[2] for name in run.keys])
        drawn = frozenset(f"param/{name}" for name in adapters if f"param/{name}" not in kinds)
        loader = Loader(source, run.local_tensors, buffers, left_out=drawn)
        loader.check()
        loader.read_weights()
    share_weights(run.runtime.buckets, run.comm)
    run.runtime.weights_written()


def _weights_of(run: RunState, folder: Path) -> TensorSource:
    steps = steps_of(run.files, folder)
    if found := steps[-1] if steps else foreign_folder(run.files, folder):
        return open_checkpoint(run.files, found, optimizer=False)
    return _pretrained(run, folder)


def _pretrained(run: RunState, folder: Path) -> PretrainedFolder:
    """Returns a Hugging Face folder as a source of this model's tensors; of a model with adapters, of its base's."""
    model: Any = run.model
    keys, shapes = run.keys, {tensor.name: tensor.kind.shape for tensor in run.tensors}
    parts = {tensor.name: tensor.parts for tensor in run.tensors if tensor.parts}
    if is_peft_model(model):  # the folder has the base alone
        adapters = {f"param/{name}" for name in adapter_names(model, [name.partition("/")[2] for name in keys])}
        keys = {name: [*map(base_name, given)] for name, given in keys.items() if name not in adapters}
        model = model.get_base_model()
        found = published_parts(model, {given[0]: shapes[name] for name, given in keys.items()})
        parts = {name: found[given[0]] for name, given in keys.items() if given[0] in found}
    prefix = str(getattr(model, "base_model_prefix", ""))
    return PretrainedFolder(
        run.files, folder, keys, prefix, {name: (shapes[name], each) for name, each in parts.items()}
    )
