"""Sweep over trials of one process after another: rank 0 asks Optuna, and all ranks run the trial that it sends.

for trial in engine.Sweep("sweep.json"):
    with trial.initialize(model(), "config.json") as eng:
        eng.load_checkpoint(missing_ok=True)
        while eng.step_count < 100 and not trial.should_prune():
            eng.train_batch(next(batches))
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, fields
from datetime import timedelta
from pathlib import Path
from typing import Any

from engine.errors import ConfigError, EngineError, GridError, first_line
from engine.parallel.comm.rendezvous import KeyStore, Rendezvous
from engine.parallel.comm.world import meeting_point, open_store, prefixed, read_world, timeout_seconds
from engine.sweep.settings import SweepSource, read_sweep
from engine.sweep.study import Assignment, SweepStudy, TrialRow, make_component
from engine.sweep.trial import SweepTrial


class Sweep:
    """Sweep in which Optuna chooses values of configuration keys; iteration yields each :class:`SweepTrial`.

    Optuna also prunes trials: it ends a trial early if its metric is worse than in other trials. Processes and jobs
    with the same journal file share the trials. The trial of a killed process is continued by the
    next process, or the restarted job, that asks for a trial.

    Args:
        settings: path of ``sweep.json``, or a dict with its keys.
        promote: number of pruned trials, the best first, that continue from their checkpoints without pruning.

    Raises:
        ConfigError: the settings have mistakes, Optuna is not installed, or the journal belongs to another sweep.
    """

    def __init__(self, settings: SweepSource, promote: int = 0) -> None:
        self.settings = read_sweep(settings)
        make_component("pruners", self.settings.pruner)
        make_component("samplers", self.settings.sampler)
        if promote < 0:
            raise ConfigError(f"promote {promote} is not a number of trials; give a whole number of at least 0.")
        self.trial: SweepTrial | None = None
        """Trial that runs; None before ``ask`` and after ``tell``."""
        self._world = read_world()
        self._store: KeyStore | None = None
        self._sent = 0
        """Messages of rank 0 so far."""
        self._study: SweepStudy | None = None
        self._promote = promote

    def ask(self, leaves: bool = False) -> SweepTrial | None:
        """Starts the next trial and returns it on all ranks; returns None at the end of the sweep. All ranks call it.

        ``tell`` must have ended the previous trial. Needs no process group.

        Args:
            leaves: True if pruning raises ``TrialEnd`` to end a script; False if it only makes ``should_prune`` return
                True.

        Raises:
            ConfigError: the journal cannot be used; on all ranks.
            EngineError: ``tell`` has not ended the previous trial.
        """
        if self.trial is not None:
            raise EngineError(f"ask() inside trial {self.trial.number}; call tell() first, or iterate over the sweep.")
        found = self._told()
        if found is None:
            return None
        assignment = Assignment(**{**found, "folder": Path(found["folder"])})
        report = self._study.report if self._study is not None else None
        self.trial = SweepTrial(self.settings, assignment, report, leaves)
        return self.trial

    def tell(self, failed: bool = False) -> TrialRow | None:
        """Ends the current trial as failed if ``failed``, else as pruned or complete.

        Returns the trial's row of results on rank 0, and None on other ranks.

        Raises:
            ConfigError: the trial has reported no metric; on all ranks. The trial counts as failed.
        """
        if self.trial is None:
            raise EngineError("tell() before ask(): there is no trial; call ask() first.")
        trial, self.trial = self.trial, None
        pruned, silent = trial.should_prune() or trial.diverged, not trial.reported
        state = "pruned" if pruned and not failed else "fail" if failed or silent else "complete"
        row = self._study.finish(trial.updates, state) if self._study is not None else None
        if silent and not failed and not pruned:
            raise ConfigError(
                f"metric {self.settings.metric}: trial {trial.number} has ended after {trial.updates} updates without "
                f"a report, and report_every is {self.settings.report_every}; lower it, or train longer."
            )
        return row

    def __iter__(self) -> Iterator[SweepTrial]:
        """Yields each trial, and tells it when the body of the loop ends. Collective."""
        while (trial := self.ask()) is not None:
            yield trial
            self.tell()

    def rows(self) -> list[TrialRow]:
        """Returns, on rank 0, one row for each trial of the sweep.

        Returns an empty list on other ranks, and before the first :meth:`ask`.
        """
        return self._study.rows() if self._study is not None else []

    def best(self) -> TrialRow | None:
        """Returns, on rank 0, the row of the complete trial with the best metric.

        Returns None on other ranks, before the first :meth:`ask`, and if no trial is complete.
        """
        return self._study.best() if self._study is not None else None

    def _told(self) -> dict[str, Any] | None:
        """Returns on every rank the trial that rank 0 has started, as JSON, through the store of the job. Collective.

        Raises:
            ConfigError: rank 0 has raised one; the same sentence on every rank.
            GridError: rank 0 does not answer in time.
        """
        if self._world.size == 1:
            return self._next()
        if self._store is None:
            self._store = self._meet()
        key = str(self._sent)
        self._sent += 1
        if self._world.rank == 0:
            try:
                value = self._next()
            except ConfigError as error:
                self._store.set(key, json.dumps({"problem": str(error)}))
                raise
            self._store.set(key, json.dumps({"value": value}))
            return value
        try:
            self._store.wait([key], timedelta(seconds=timeout_seconds()))
        except RuntimeError as error:
            raise GridError(
                f"rank {self._world.rank} got no trial of the sweep from rank 0 ({first_line(error)}); look for the "
                "first error of the job."
            ) from error
        found: dict[str, Any] = json.loads(self._store.get(key))
        if "problem" in found:
            raise ConfigError(found["problem"])
        return found["value"]  # type: ignore[no-any-return]

    def _next(self) -> dict[str, Any] | None:
        """Returns the next trial as JSON; the first call opens the journal. Runs on rank 0."""
        if self._study is None:
            self._study = SweepStudy(self.settings)
            self._study.promote(self._promote)
        found = self._study.next()
        return None if found is None else {**asdict(found), "folder": str(found.folder)}

    def _meet(self) -> KeyStore:
        """Opens the store of the job, where all ranks compare their settings."""
        world, store = self._world, open_store(self._world)
        meeting = Rendezvous(store, world.rank, world.size, meeting_point(world), timeout_seconds())
        given = {each.name: repr(getattr(self.settings, each.name)) for each in fields(self.settings)}
        if (difference := meeting.meet(given | {"promote": str(self._promote)})) is not None:
            raise ConfigError(f"ranks were given different sweeps: {difference}; start all with the same file.")
        return prefixed(store, f"{meeting.name}/sweep")
