"""Study of a sweep on rank 0: Optuna's sampler and pruner over one journal, which processes share.

    journal             all trials, their values and reports, as Optuna writes them
    journal.lock        held while a line is appended            | flock, which the kernel releases
    journal.trials/ask  held while a trial is chosen             | when its process ends
    journal.trials/7/   held while trial 7 runs; its checkpoints |

A trial that runs in the journal while nobody holds its folder was left by a killed process, and is taken up.
"""

import fcntl
import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

from engine.checkpoint.format.step_folders import FolderLocks
from engine.config.wording import shown_value
from engine.errors import CheckpointError, ConfigError, first_line
from engine.sweep.settings import Component, Dimension, SweepConfig

logger = logging.getLogger("trine")

MOST_STARTS = 3
"""Starts of one trial without a new report; a trial whose processes have died so often fails."""
_FIRST_STEPS = 3
"""Updates after which different values have different effects; a warmup may begin with a rate of 0."""
_STARTS, _FOLDER, _UPDATES, _PROMOTED = "starts", "folder", "updates", "promoted"
_WITHOUT = {"pruners": ("Base", "Patient"), "samplers": ("Base", "BaseGA", "Grid", "PartialFixed")}


@dataclass(frozen=True, slots=True)
class Assignment:
    """Trial that this process has to run: its number, its values of configuration keys, and its folder."""

    number: int
    values: Mapping[str, Any]
    """Value of each key, as JSON."""
    folder: Path
    """Folder of the trial; its checkpoints are in ``checkpoints``."""
    reported: int
    """Update of the last report of an earlier start; 0: none."""


@dataclass(frozen=True, slots=True)
class TrialRow:
    """One trial in a sweep's table of results: values of configuration keys, metric and state."""

    number: int
    values: Mapping[str, Any]
    updates: int
    """Updates that the trial has made, over all starts."""
    value: float | None
    state: str
    """One of "running", "complete", "pruned", "fail" and "waiting"."""
    continues: int | None = None
    """Pruned trial from which this one goes on, with its updates; None: it has begun by itself."""


def make_component(kind: str, given: Component, seed: int = 0) -> Any:
    """Returns an instance of the Optuna pruner or sampler that ``given`` names.

    Args:
        kind: "pruners" or "samplers".
        given: name of the component, and the arguments of its class.
        seed: number added to a ``seed`` argument, so that samplers of different trials draw different values.

    Raises:
        ConfigError: Optuna is not installed, or has no such class or argument; the same on every rank.
    """
    if find_spec("optuna") is None:
        raise ConfigError("a sweep needs Optuna, which is not installed; install it with pip install 'trine[sweep]'.")
    import optuna

    suffix = kind.title()[:-1]
    module = getattr(optuna, kind)
    plain = [name.removesuffix(suffix) for name in module.__all__ if name.endswith(suffix)]
    names = {_snake(name): f"{name}{suffix}" for name in plain if name not in _WITHOUT[kind]}
    if given.type not in names:
        raise ConfigError(f"{kind[:-1]}: {shown_value(given.type)} is none of Optuna's; give {', '.join(names)}.")
    params = dict(given.params)
    if isinstance(params.get("seed"), int) and given.type != "qmc":
        params["seed"] += seed
    try:
        return getattr(module, names[given.type])(**params)
    except (TypeError, ValueError, ImportError) as error:
        raise ConfigError(f"{kind[:-1]}.params: {first_line(error)}; see {names[given.type]} of Optuna.") from error


def _snake(name: str) -> str:
    """Returns the name of a class in a file: "SuccessiveHalving" is "successive_halving", "TPE" is "tpe"."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().replace("cma_es", "cmaes")


class FileLock:
    """Lock between processes by ``flock`` on a file; the kernel releases the lock if the locking process ends."""

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, -1

    def acquire(self) -> bool:
        """Waits for the lock and takes it; returns True, as Optuna expects."""
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        fcntl.flock(self._file, fcntl.LOCK_EX)
        return True

    def release(self) -> None:
        """Releases the lock."""
        os.close(self._file)


class SweepStudy:
    """Optuna study of a sweep in a journal file, which several jobs may share.

    In each job, only rank 0 has a study. The study also stores the trial that the job runs.

    Raises:
        ConfigError: the journal cannot be written, or belongs to another sweep.
    """

    def __init__(self, settings: SweepConfig) -> None:
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        self._settings, self._states = settings, optuna.trial.TrialState
        self._ask, self._locks = FileLock(settings.folder / "ask"), FolderLocks()
        self._trial: Any = None
        self._told = False
        """True once trials with the same reports were logged."""
        self._folder: Path | None = None
        verbosity = optuna.logging.get_verbosity()
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        journal = Path(settings.journal).absolute()
        try:
            settings.folder.mkdir(parents=True, exist_ok=True)
            lock = FileLock(journal.with_name(f"{journal.name}.lock"))
            with _held(lock):
                _cut_torn_line(journal)
            backend = JournalFileBackend(str(journal), lock)  # type: ignore[arg-type]
            with _held(self._ask):
                pruner = make_component("pruners", settings.pruner)
                self._study = optuna.create_study(
                    storage=JournalStorage(backend),
                    study_name="sweep",
                    direction=settings.direction,
                    pruner=pruner,
                    load_if_exists=True,
                )
                self._begin()
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(
                f"journal: {settings.journal} cannot be used ({first_line(error)}); name a file of a sweep, or a new "
                "one in a folder that this process may write."
            ) from error
        finally:
            optuna.logging.set_verbosity(verbosity)

    def _begin(self) -> None:
        """Writes the settings into a new journal, or compares them with those of an old one; queues a grid.

        The grid is shuffled: asynchronous halving prunes few trials if each is better than the one before.
        """
        known = self._study.user_attrs.get("sweep")
        if known is None:
            self._study.set_user_attr("sweep", known := self._settings.identity)
        for key, value in self._settings.identity.items():
            if known.get(key) != value:
                raise ConfigError(
                    f"{key}: {shown_value(value)} was given, but the sweep in journal {self._settings.journal} has "
                    f"{shown_value(known.get(key))}; give the value of the journal, or set journal to another file."
                )
        names = [each.path for each in self._settings.space]
        grid = list(product(*(each.listed or () for each in self._settings.space))) * self._settings.grid
        Random(0).shuffle(grid)
        # a process that was killed while it queued the grid has queued a beginning of it
        queued = sum(_PROMOTED not in each.user_attrs for each in self._study.get_trials(deepcopy=False))
        for values in grid[queued:]:
            self._study.enqueue_trial(dict(zip(names, values, strict=True)))

    # ------------------------------------------------------------------ trials

    def next(self) -> Assignment | None:
        """Starts a trial in this process and returns it; returns None if all trials have been started.

        Continues an unfinished trial of an ended process before it starts a new trial.
        """
        with _held(self._ask):
            for frozen in self._study.get_trials(deepcopy=False, states=(self._states.RUNNING,)):
                if (found := self._take_up(frozen)) is not None:
                    return found
            trials = self._study.get_trials(deepcopy=False)
            waiting = any(each.state == self._states.WAITING for each in trials)
            if not waiting and sum(_PROMOTED not in each.user_attrs for each in trials) >= self._settings.count:
                return None
            self._study.sampler = make_component("samplers", self._settings.sampler, seed=len(trials))
            trial = self._study.ask()
            return self._start(trial, 0)

    def _take_up(self, frozen: Any) -> Assignment | None:
        """Returns a trial that runs in the journal, if its process is dead; one that has died too often fails."""
        import optuna

        folder = self._folder_of(frozen)
        if not self._hold(folder):
            return None
        # its process may have told the trial and released the folder after the list of trials was read
        if self._study.get_trials(deepcopy=False)[frozen.number].state != self._states.RUNNING:
            self._release()
            return None
        trial = optuna.trial.Trial(self._study, frozen._trial_id)
        if frozen.user_attrs.get(_STARTS, {}).get(_updates_of(frozen), 0) >= MOST_STARTS:
            self._study.tell(trial, state=self._states.FAIL)
            self._release()
            return None
        return self._start(trial, int(_updates_of(frozen)))

    def _start(self, trial: Any, reported: int) -> Assignment:
        folder = self._folder_of(trial)
        starts = trial.user_attrs.get(_STARTS, {}).get(str(reported), 0)
        trial.set_user_attr(_STARTS, {str(reported): starts + 1})
        if self._folder is None:
            self._hold(folder)
        self._trial = trial
        values = {each.path: each.decode(_suggest(trial, each)) for each in self._settings.space}
        return Assignment(trial.number, values, folder, reported)

    def _folder_of(self, trial: Any) -> Path:
        return self._settings.folder / str(trial.user_attrs.get(_FOLDER, trial.number))

    def _hold(self, folder: Path) -> bool:
        """Locks the folder of a trial until ``finish``; returns False if a live process holds it."""
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._locks.hold(folder)
        except CheckpointError:
            return False
        self._folder = folder
        return True

    def _release(self) -> None:
        self._locks.close()
        self._locks, self._folder, self._trial = FolderLocks(), None, None

    # ------------------------------------------------------------------ the trial that runs

    def report(self, value: float, update: int) -> bool:
        """Stores the metric's ``value`` after ``update`` updates of the running trial.

        Returns True if the pruner stops the trial; it never stops a trial that ``promote`` has queued.
        """
        self._trial.report(value, update)
        return _PROMOTED not in self._trial.user_attrs and bool(self._trial.should_prune())

    def finish(self, updates: int, state: str) -> TrialRow:
        """Ends the running trial with ``state`` "complete", "pruned" or "fail"; returns its row of results.

        A complete trial gets the last reported value.

        Args:
            updates: number of updates that the trial has made.
        """
        trial = self._trial
        trial.set_user_attr(_UPDATES, updates)
        trials = self._study.get_trials(deepcopy=False)
        reports = trials[trial.number].intermediate_values
        self._tell_alike(trials[trial.number], trials)
        value = reports[max(reports)] if state == "complete" else None
        self._study.tell(trial, value, state=self._states[state.upper()])
        self._release()
        return self._row(self._study.get_trials(deepcopy=False)[trial.number])

    def _tell_alike(self, ended: Any, trials: list[Any]) -> None:
        """Logs once that two trials with different values have made the same reports, so that a key has no effect."""
        reports = ended.intermediate_values
        if self._told or max(reports, default=0) < _FIRST_STEPS:
            return
        for other in trials:
            keys = [path for path, value in ended.params.items() if other.params.get(path, value) != value]
            if keys and other.intermediate_values == reports:
                self._told = True
                logger.warning(
                    "trials %d and %d of the sweep differ in %s and have made the same reports, so the values have no "
                    "effect: another key of the configuration replaces them, as warmup_max_lr of a scheduler does lr.",
                    other.number, ended.number, " and ".join(keys),
                )  # fmt: skip
                return

    def promote(self, count: int) -> None:
        """Queues the ``count`` best pruned trials, to continue from their checkpoints without pruning.

        Skips trials that are queued already.
        """
        with _held(self._ask):
            trials = self._study.get_trials(deepcopy=False)
            again = {each.user_attrs.get(_PROMOTED) for each in trials}
            pruned = [each for each in trials if each.state == self._states.PRUNED and each.number not in again]
            worst = float("inf") if self._settings.direction == "minimize" else float("-inf")
            pruned.sort(
                key=lambda each: worst if each.value is None else each.value,
                reverse=self._settings.direction == "maximize",
            )
            for each in pruned[:count]:
                folder = self._folder_of(each).name
                attributes = {_PROMOTED: each.number, _FOLDER: folder}
                self._study.enqueue_trial(each.params, user_attrs=attributes)

    # ------------------------------------------------------------------ results

    def rows(self) -> list[TrialRow]:
        """Returns one row for each trial of the sweep, in the order of the trials' numbers."""
        return [self._row(each) for each in self._study.get_trials(deepcopy=False)]

    def best(self) -> TrialRow | None:
        """Returns the row of the complete trial with the best metric; None if no trial is complete."""
        complete = [row for row in self.rows() if row.state == "complete" and row.value is not None]
        sign = 1 if self._settings.direction == "minimize" else -1
        return min(complete, key=lambda row: sign * (row.value or 0.0), default=None)

    def _row(self, trial: Any) -> TrialRow:
        values = {each.path: each.decode(trial.params[each.path]) for each in self._settings.space
                  if each.path in trial.params}  # fmt: skip
        updates = trial.user_attrs.get(_UPDATES, max(trial.intermediate_values, default=0))
        state, continues = trial.state.name.lower(), trial.user_attrs.get(_PROMOTED)
        return TrialRow(trial.number, values, updates, trial.value, state, continues)


def _updates_of(frozen: Any) -> str:
    """Returns the update of a trial's last report, as a key of JSON; "0": none."""
    return str(max(frozen.intermediate_values, default=0))


def _suggest(trial: Any, dimension: Dimension) -> Any:
    if dimension.form == "choices":
        return trial.suggest_categorical(dimension.path, list(dimension.values))
    low, high = dimension.values
    if dimension.form == "int":
        return trial.suggest_int(dimension.path, low, high)
    return trial.suggest_float(dimension.path, low, high, log=dimension.form == "log")


@contextmanager
def _held(lock: FileLock) -> Iterator[None]:
    lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _cut_torn_line(journal: Path) -> None:
    """Removes the last line of a journal if a process was killed while it wrote it: Optuna would not read on."""
    with suppress(FileNotFoundError), journal.open("r+b") as file:
        text = file.read()
        if text and not text.endswith(b"\n"):
            file.truncate(text.rfind(b"\n") + 1)
