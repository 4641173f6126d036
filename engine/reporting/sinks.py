"""Reporter, which makes step reports on every rank, and sinks of rank 0, which write them."""

import csv
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import torch

from engine.config import Config
from engine.errors import ConfigError
from engine.parallel.comm.comm import Comm
from engine.parallel.comm.traffic import Tally
from engine.planning.plan import Plan
from engine.program.expert_load import ExpertStack
from engine.reporting.run_record import RunRecord, StepProfile, ends_line, profiled_steps
from engine.reporting.step_report import ProgressSink, StepReport, metric_key, peak_memory, utilisation
from engine.step.runtime import RankRuntime
from engine.step.state import StepState, metric_averages
from engine.step.update import UpdateOutcome


class Sink(Protocol):
    """Destination of step reports, such as a log file or an experiment tracker. Only rank 0 has sinks."""

    def write(self, report: StepReport) -> None:
        """Writes one step report."""

    def close(self) -> None:
        """Writes buffered reports and closes the file or connection."""


class AppendedFile:
    """Base class of sinks that write to a text file. The file is opened to append, so a resumed run continues it."""

    def __init__(self, path: str) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "a+", encoding="utf-8", newline="")  # noqa: SIM115 - lives as long as the run
        if self._file.tell() and not ends_line(path):
            self._file.write("\n")

    def close(self) -> None:
        """Closes the log file."""
        self._file.close()


class JsonLines(AppendedFile):
    """Sink that appends each step report to a file as one line of JSON."""

    def write(self, report: StepReport) -> None:
        """Appends a step report as one line of JSON, and flushes the file."""
        self._file.write(json.dumps(report.as_dict()) + "\n")
        self._file.flush()


class CommaSeparated(AppendedFile):
    """Sink that appends each step report to a CSV file as one line; the first line names the columns.

    Raises:
        ConfigError: the file exists with other columns.
    """

    def __init__(self, path: str, metrics: Sequence[str], experts: bool = False) -> None:
        super().__init__(path)
        skipped = ("metrics", "nonfinite_ranks", "expert_load")
        self._columns = [name for name in StepReport.__dataclass_fields__ if name not in skipped]
        self._columns += ["tokens_per_second", *map(metric_key, metrics), *["expert_imbalance"] * experts]
        self._file.seek(0)
        known = next(csv.reader(self._file), None)
        if known and known != self._columns:
            self._file.close()
            raise ConfigError(
                f"monitor.csv: {path} has other columns than this run would write ({','.join(known)[:60]}...); set "
                "another file."
            )
        self._writer = csv.DictWriter(self._file, self._columns, extrasaction="ignore", lineterminator="\n")
        if not known:
            self._writer.writeheader()

    def write(self, report: StepReport) -> None:
        """Appends a step report as one CSV line, and flushes the file."""
        self._writer.writerow(report.flat())
        self._file.flush()


class TensorBoard:
    """Sink that writes step reports as TensorBoard scalars; needs the optional dependencies ``ui``."""

    def __init__(self, folder: str) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(folder)

    def write(self, report: StepReport) -> None:
        """Writes every finite number of ``report`` as a TensorBoard scalar at the report's step."""
        for name, value in report.numbers().items():
            self._writer.add_scalar(name, value, report.step)

    def close(self) -> None:
        """Flushes and closes the TensorBoard writer."""
        self._writer.close()


def make_sinks(config: Config) -> Sequence[Sink]:
    """Returns the destinations of step reports that ``monitor`` enables, such as CSV or TensorBoard.

    Imports optional packages and opens files.
    """
    asked, sinks = config.monitor, list[Sink]()
    if asked.jsonl:
        sinks.append(JsonLines(asked.jsonl))
    if asked.csv:
        sinks.append(CommaSeparated(asked.csv, asked.metrics, asked.expert_load))
    if asked.tensorboard:
        sinks.append(TensorBoard(asked.tensorboard))
    if asked.wandb:
        sinks.append(WeightsAndBiases(asked.wandb, config.to_json()))
    if asked.mlflow:
        sinks.append(MLflow(asked.mlflow, config.to_json()))
    return [*sinks, ProgressSink()] if asked.progress else sinks


def _by_layer(stacks: Sequence[ExpertStack], counts: Sequence[float]) -> dict[str, tuple[int, ...]]:
    """Returns the rows of each expert by the name of its layer."""
    rest = iter(map(int, counts))
    return {stack.name: tuple(islice(rest, stack.experts)) for stack in stacks}


class StepReporter:
    """Reporter of training steps on every rank; rank 0 also writes the reports to its sinks."""

    def __init__(self, config: Config, comm: Comm, device: torch.device) -> None:
        self._every, self._comm, self._device = config.monitor.every, comm, device
        self._names, self._monitor = config.monitor.metrics, config.monitor
        self._callbacks: list[Callable[[StepReport], object]] = []
        self._sinks = make_sinks(config) if comm.grid.rank == 0 else ()
        self.trained = Tally()
        """Traffic of all training steps."""
        self.attempts = 0
        """Number of training steps, including skipped ones."""
        self._run_record: RunRecord | None = None
        self._profile: StepProfile | None = None
        self._elements = 0
        """Parameters of the full model."""

    def make(self, step: StepState, outcome: UpdateOutcome, plan: Plan, made: int) -> StepReport:
        """Returns this rank's report of a training or evaluation step, without writing it.

        Args:
            step: state of the step on this rank.
            outcome: result of the step, equal on every rank.
            plan: plan of the run.
            made: number of optimizer updates so far, for the field ``step`` of the report.
        """
        totals, world = outcome.totals, self._comm.grid.world_size
        self._elements = self._elements or plan.table.elements
        parameter_tokens = self._elements * totals.tokens / world if step.text else None
        tflops, mfu = utilisation(parameter_tokens, step.seconds, self._device)
        return StepReport(
            step=made,
            loss=totals.loss / totals.weight if totals.weight else math.nan,
            weight=totals.weight,
            grad_norm=outcome.norm,
            lr=outcome.lr,
            tokens=int(totals.tokens),
            seconds=step.seconds,
            tflops=tflops,
            mfu=mfu,
            peak_bytes=peak_memory(self._device),
            bytes_sent=self._comm.tally.since(step.sent).bytes(),
            skipped=outcome.skipped,
            nonfinite=outcome.nonfinite.name if outcome.nonfinite else None,
            nonfinite_ranks=outcome.nonfinite.ranks if outcome.nonfinite else (),
            loss_scale=outcome.scale,
            grid=str(self._comm.grid),
            metrics=metric_averages(totals, self._names),
            expert_load=_by_layer(plan.experts, totals.experts),
            figures=step.figures,
        )

    def record(self, step: StepState, outcome: UpdateOutcome, plan: Plan, made: int) -> StepReport:
        """Reports a training step to sinks, callbacks, and the recorders of ``monitor.report`` and ``monitor.profile``;
        returns the report.

        Sinks receive every ``monitor.every``-th step, this reporter's first step, and each step without an update of
        weights (``report.skipped``).

        Args:
            step: state of the step on this rank.
            outcome: result of the step, equal on every rank.
            plan: plan of the run.
            made: number of optimizer updates so far; a resumed run continues this count.
        """
        report = self.make(step, outcome, plan, made)
        self.attempts += 1
        sent = self._comm.tally.since(step.sent)
        for row in sent.rows():
            self.trained.add(row)
        due = report.step % self._every == 0 or report.skipped or self.attempts == 1
        for sink in self._sinks if due else ():
            sink.write(report)
        if self._run_record is not None:
            self._run_record.take(report, sent, due)
        if self._profile is not None:
            self._profile.take(report.step)
        for callback in self._callbacks:
            callback(report)
        return report

    def built(self, runtime: RankRuntime) -> None:
        """Starts the recorders of ``monitor.report`` and ``monitor.profile``, which need a built engine.

        Args:
            runtime: objects that run steps on this rank.
        """
        if self._monitor.report is None:
            return
        folder = Path(self._monitor.report)
        self._run_record = RunRecord(folder, runtime, self._device)
        if self._monitor.profile is not None:
            steps = profiled_steps(self._monitor.profile)
            self._profile = StepProfile(folder, steps, runtime, self._device)

    def tell(self, callback: Callable[[StepReport], object]) -> None:
        """Registers ``callback`` for this rank's reports of later training steps."""
        self._callbacks.append(callback)

    def close(self) -> None:
        """Closes all sinks (log files and connections) and the step profile. An error of one does not keep others open;
        it is raised at the end.
        """
        with ExitStack() as closing:
            if self._profile is not None:
                closing.callback(self._profile.close)
            for sink in reversed(self._sinks):
                closing.callback(sink.close)
            self._sinks = ()


class WeightsAndBiases:
    """Sink that logs step reports to a Weights & Biases project; with ``WANDB_MODE=offline``, to a local folder."""

    def __init__(self, project: str, config: dict[str, Any]) -> None:
        import wandb

        self._run: Any = wandb.init(project=project, config=config, resume="allow")

    def write(self, report: StepReport) -> None:
        """Logs every finite number of ``report`` to the run at the report's step."""
        self._run.log(report.numbers(), step=report.step)

    def close(self) -> None:
        """Finishes the Weights & Biases run."""
        self._run.finish()


class MLflow:
    """Sink that logs step reports to an MLflow experiment at ``MLFLOW_TRACKING_URI``; ``MLFLOW_RUN_ID`` continues a
    run.
    """

    def __init__(self, experiment: str, config: dict[str, Any]) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client: Any = MlflowClient()
        known = self._client.get_experiment_by_name(experiment)
        number = self._client.create_experiment(experiment) if known is None else known.experiment_id
        resumed = os.environ.get("MLFLOW_RUN_ID")
        self._run: str = resumed or self._client.create_run(number).info.run_id
        if not resumed:
            settings = [Param(key, str(value)[:_LONGEST]) for key, value in _flat(config).items()]
            for start in range(0, len(settings), _MOST):
                self._client.log_batch(self._run, params=settings[start : start + _MOST])

    def write(self, report: StepReport) -> None:
        """Logs every finite number of a step report in one request."""
        from mlflow.entities import Metric

        now = round(1e3 * time.time())
        metrics = [Metric(name, value, now, report.step) for name, value in report.numbers().items()]
        self._client.log_batch(self._run, metrics=metrics)

    def close(self) -> None:
        """Marks the MLflow run as finished."""
        self._client.set_terminated(self._run)


_LONGEST, _MOST = 500, 100
"""Characters of a parameter's value, and parameters of a request, that every MLflow server accepts."""


def _flat(config: dict[str, Any], above: str = "") -> dict[str, Any]:
    """Returns the settings by their dotted keys."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        path = f"{above}.{key}" if above else key
        found |= _flat(value, path) if isinstance(value, dict) else {path: value}
    return found
