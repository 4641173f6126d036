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
from engine.sweep.settings import METRICS, SweepConfig
from engine.sweep.study import Assignment

CHECKPOINTS = "checkpoints"
"""Folder of a trial's checkpoints, in that of the trial."""
_FILES = ("jsonl", "csv", "tensorboard", "report")
"""Outputs of ``monitor`` that each trial has in its own folder."""


class TrialEnd(SystemExit):
    """Exception that ends a script under ``trine sweep`` when its trial is pruned.

    All ranks raise it after the same step. It is a ``SystemExit`` with status 0, so ``except Exception`` does not catch
    it.
    """


class SweepTrial:
    """One trial of a sweep: a training run with its own configuration values, which pruning may end early.

    Args:
        settings: settings of the sweep.
        assignment: number, values and folder of the trial.
        report: callback on rank 0 that stores (value, update) and returns True to stop the trial; None on other ranks.
        leaves: True if pruning raises ``TrialEnd``; False if it makes ``should_prune`` return True.
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
        """Number of the trial's weight updates so far, including updates before a restart."""
        return self.engine.step_count if self.engine is not None else self._updates

    def release(self) -> None:
        """Closes the trial's engine and frees its memory for the next trial."""
        self._updates = self.updates
        if self.engine is not None:
            self.engine.close()
        self.engine = None

    def configuration(self, config: Mapping[str, Any] | str | Any) -> Mapping[str, Any]:
        """Returns ``config`` with this trial's values, and with the trial's folders for checkpoints and logs.

        Args:
            config: path of a configuration file, a dict or a ``Config``.

        Raises:
            ConfigError: the configuration cannot be read, or lacks the metric of the sweep in ``monitor.metrics``.
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
        """Calls :func:`engine.initialize` with the trial's configuration, and returns the engine.

        The engine reports the sweep's metric to the pruner. All ranks call it, with the arguments of
        :func:`engine.initialize`.

        Raises:
            EngineError: the trial has an engine already.
        """
        if self.engine is not None:
            raise EngineError(
                f"trial {self.number} of the sweep initializes a second engine with an optimizer, but a trial has one "
                "such engine; set optimizer to null for the other engine, or initialize it by engine.initialize in "
                "your own loop over engine.Sweep."
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
        """Reports to the pruner the ``value`` after ``update`` updates, for training loops with their own metric.

        All ranks call it; rank 0's value counts. A non-finite value prunes the trial. Ignores an ``update`` that is not
        later than the last report.
        """
        if update <= self.reported:
            return
        self.reported, self.diverged = update, not math.isfinite(value)
        if self._tell is not None and (self.diverged or self._tell(float(value), update)):
            self.asked = True

    def should_prune(self) -> bool:
        """Returns True once the trial is pruned; the result changes on all ranks after the same step."""
        return self._pruned

    def end(self) -> None:
        """Marks the trial as pruned, for ``should_prune``; the engine calls it after writing the trial's checkpoint.

        Raises:
            TrialEnd: this trial was made with ``leaves`` True; the exception ends the script.
        """
        self.asked, self._pruned = False, True
        if self._leaves:
            raise TrialEnd(0)

    def save_folder(self, folder: Path) -> Path:
        """Returns the folder for a save to ``folder``, always inside the trial's folder.

        If ``folder`` is outside, returns a folder of the same name inside the trial's folder.
        """
        return folder if folder.is_relative_to(self.folder) else self.folder / folder.name

    def load_folder(self, folder: Path) -> Path:
        """Returns the folder with this trial's newest checkpoint, or ``folder`` if the trial has none.

        Looks in ``save_folder(folder)`` and, before the trial's first update, also in the folder of the trial's
        automatic checkpoints.
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
        present = [one for one in METRICS if getattr(report, one) is not None]
        present += [f"metrics/{one}" for one in report.metrics]
        raise ConfigError(
            f"metric {metric} has no value in the step report of update {report.step}; set the sweep's metric to one "
            f"that has a value: {', '.join(present)}."
        )
    return float(found)
