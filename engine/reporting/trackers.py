"""Sinks of a service or its folder: Weights & Biases, MLflow. A package is imported when it is asked for."""

import os
import time
from typing import Any

from engine.reporting.step_report import StepReport


class WeightsAndBiases:
    """A run of a Weights & Biases project, with the configuration; ``WANDB_MODE=offline`` keeps it in a folder."""

    def __init__(self, project: str, config: dict[str, Any]) -> None:
        import wandb

        self._run: Any = wandb.init(project=project, config=config, resume="allow")

    def write(self, report: StepReport) -> None:
        """Log every number of the report."""
        self._run.log(report.numbers(), step=report.step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class MLflow:
    """A run of an MLflow experiment; ``MLFLOW_TRACKING_URI`` says where, a resumed job goes on with MLFLOW_RUN_ID."""

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
        """Log every number of the report, in one request."""
        from mlflow.entities import Metric

        now = round(1e3 * time.time())
        metrics = [Metric(name, value, now, report.step) for name, value in report.numbers().items()]
        self._client.log_batch(self._run, metrics=metrics)

    def close(self) -> None:
        """Finish the run."""
        self._client.set_terminated(self._run)


_LONGEST, _MOST = 500, 100
"""Characters of a parameter's value, and parameters of a request, that every MLflow server takes."""


def _flat(config: dict[str, Any], above: str = "") -> dict[str, Any]:
    """The settings by their dotted keys."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        path = f"{above}.{key}" if above else key
        found |= _flat(value, path) if isinstance(value, dict) else {path: value}
    return found
