"""Trial of a sweep on this rank: values for the configuration, reports of its engine, and its end.

update 1  2  3  4          report_every 3
             |  all ranks: the control all-reduce of update 4 carries rank 0's bit; a checkpoint; the trial ends
             rank 0: mean of updates 1 to 3 to the journal; the pruner stops the trial
"""

import json
import math
from collections.abc import Callable, Mapping
from inspect import signature
from pathlib import Path
from typing import Any

from engine.api import initialize
from engine.checkpoint.format.filesystem import Files
from engine.checkpoint.format.step_folders import committed, step_of
from engine.config import Config, load_raw
from engine.engine import Engine
from engine.errors import ConfigError, EngineError
from engine.reporting.step_report import StepReport
from engine.sweep.settings import SweepConfig
from engine.sweep.study import Assignment

CHECKPOINTS = "checkpoints"
"""Folder of a trial's checkpoints, in that of the trial."""
_FILES = ("jsonl", "csv", "tensorboard", "report")
"""Outputs of ``monitor`` that each trial has in its own folder."""


class TrialEnd(SystemExit):
    """Exception by which a pruned trial leaves a script that ``trine sweep`` runs, on all ranks after the same step.

    It is a ``SystemExit`` with status 0: ``finally`` and ``with`` run, and ``except Exception`` does not catch it.
    """


class SweepTrial:
    """Trial of a sweep, made by :meth:`engine.Sweep.ask`; equal on all ranks.

    Args:
        report: on rank 0, passes a value and its update to the journal; returns True if the pruner stops the trial.
        leaves: the end of the trial raises ``TrialEnd``, as in a script; otherwise ``should_prune`` becomes True.
    """

    def __init__(
        self,
        settings: SweepConfig,
        assignment: Assignment,
        report: Callable[[float, int], bool] | None,
        leaves: bool = False,
    ) -> None:
        self.number, self.values, self.folder = assignment.number, assignment.values, assignment.folder
        self.engine: Engine | None = None
        """Engine that the trial trains; None before ``initialize``."""
        self.asked = False
        """True on rank 0 if the trial has to end after the next step."""
        self._settings, self._tell, self._leaves = settings, report, leaves
        self.reported = assignment.reported
        """Update of the last report; 0: none."""
        self.diverged = False
        """True after a report that is not finite."""
        self._pruned, self._updates = False, 0
        self._sum, self._count = 0.0, 0

    @property
    def updates(self) -> int:
        """Updates that the trial's engine has made, over all starts."""
        return self.engine.step_count if self.engine is not None else self._updates

    def release(self) -> None:
        """Closes the trial's engine, and drops it, so that the next trial has its memory."""
        self._updates = self.updates
        if self.engine is not None:
            self.engine.close()
        self.engine = None

    def configuration(self, config: Mapping[str, Any] | str | Any) -> Mapping[str, Any]:
        """Returns a configuration with the values of this trial, and its own folder for checkpoints and logs.

        Raises:
            ConfigError: the configuration cannot be read, or its metrics lack the one of the sweep.
        """
        words = [f"{path}={json.dumps(value)}" for path, value in self.values.items()]
        raw = load_raw(config.to_json() if isinstance(config, Config) else config, words)
        monitor = raw.get("monitor", {})
        given = monitor if isinstance(monitor, Mapping) else {}
        name = self._settings.metric or ""
        if name.startswith("metrics/") and name.removeprefix("metrics/") not in given.get("metrics", ()):
            raise ConfigError(
                f"metric {name} never comes, because monitor.metrics of the configuration is "
                f"{json.dumps(list(given.get('metrics', ())))}; add the name there, and return it from loss_fn."
            )
        moved = {key: str(self.folder / Path(given[key]).name) for key in _FILES if isinstance(given.get(key), str)}
        own = [f"monitor.{key}={json.dumps(value)}" for key, value in moved.items()]
        return load_raw(raw, [f"checkpoint.folder={json.dumps(str(self.folder / CHECKPOINTS))}", *own])

    def initialize(self, model: Any, config: Any, *args: Any, **kwargs: Any) -> Engine:
        """Returns ``engine.initialize`` of the model with the trial's configuration; its steps report. Collective.

        The arguments are those of :func:`engine.initialize`.

        Raises:
            EngineError: the trial has an engine already.
        """
        if self.engine is not None:
            raise EngineError(
                f"trial {self.number} of the sweep initializes a second engine that trains, but follows one; give the "
                "other one optimizer null, or write a loop over engine.Sweep."
            )
        plain: Callable[..., Engine] = initialize.__wrapped__  # type: ignore[attr-defined]
        given = signature(plain).bind(model, config, *args, **kwargs).arguments
        for section, argument in (("optimizer", "optimizer"), ("scheduler", "lr_scheduler")):
            if given.get(argument) is not None and (path := self._below(section)) is not None:
                raise ConfigError(
                    f"{path} of the sweep changes nothing, because {argument}=... of engine.initialize replaces "
                    f"{section} of the configuration; leave {argument} out."
                )
        eng = plain(model, self.configuration(config), *args, **kwargs)
        self.engine = eng
        eng._parts.checkpoints.control.trial = self
        eng.add_callback(self._see)
        return eng

    def report(self, value: float, update: int) -> None:
        """Reports a value to the pruner, for loops with their own metric; all ranks call it, and rank 0's value counts.

        A report of an update that an earlier start has reported is left out. A value that is not finite prunes.
        """
        if update <= self.reported:
            return
        self.reported, self.diverged = update, not math.isfinite(value)
        if self._tell is not None and (self.diverged or self._tell(float(value), update)):
            self.asked = True

    def should_prune(self) -> bool:
        """Returns True once the pruner has stopped the trial: on all ranks after the same step."""
        return self._pruned

    def end(self) -> None:
        """Ends the trial, whose checkpoint is written.

        Raises:
            TrialEnd: the trial runs in a script.
        """
        self.asked, self._pruned = False, True
        if self._leaves:
            raise TrialEnd(0)

    def save_folder(self, folder: Path) -> Path:
        """Returns the folder of the same name in the trial's, in place of one into which all trials would save."""
        return folder if folder.is_relative_to(self.folder) else self.folder / folder.name

    def load_folder(self, folder: Path) -> Path:
        """Returns the trial's own folder in place of ``folder``, if it has checkpoints.

        Before the first update, that is where the trial continues: the newest of all that it has saved. Later it is the
        folder of the same name.
        """
        if folder.is_relative_to(self.folder) and self.updates:
            return folder
        names = [self.save_folder(folder)] + [self.folder / CHECKPOINTS] * (not self.updates)
        found = [steps[-1] for each in names if (steps := committed(Files(), each))]
        return max(found, key=lambda step: step_of(step.name) or (0, 0)).parent if found else folder

    def _below(self, section: str) -> str | None:
        """Returns the first key of the sweep in a section of the configuration."""
        return next((path for path in self.values if path.split(".")[0] == section), None)

    def _see(self, report: StepReport) -> None:
        """Adds the metric of a step, and reports the mean when it is due."""
        if self._settings.metric is None:
            return
        value = _number(report, self._settings.metric)
        if report.skipped and math.isfinite(report.loss):
            return  # the loss scale falls
        self._sum, self._count = self._sum + value, self._count + 1
        due = report.step % self._settings.report_every == 0
        if due or not math.isfinite(value):
            self.report(self._sum / self._count, report.step + report.skipped)
            self._sum, self._count = 0.0, 0


def _number(report: StepReport, metric: str) -> float:
    """Returns the metric of a step.

    Raises:
        ConfigError: the report has no such number, as ``mfu`` on a CPU.
    """
    name = metric.removeprefix("metrics/")
    found = report.metrics.get(name) if name != metric else getattr(report, metric)
    if found is None:
        raise ConfigError(f"metric {metric} never comes: the report of update {report.step} has none; name another.")
    return float(found)
