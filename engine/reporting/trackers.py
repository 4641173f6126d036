"""Sinks of a service or its folder: Weights & Biases, MLflow. A package is imported when it is asked for."""

import os
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

        self._client: Any = MlflowClient()
        known = self._client.get_experiment_by_name(experiment)
        number = self._client.create_experiment(experiment) if known is None else known.experiment_id
        resumed = os.environ.get("MLFLOW_RUN_ID")
        self._run: str = resumed or self._client.create_run(number).info.run_id
        if not resumed:
            for key, value in flat(config).items():
                self._client.log_param(self._run, key, str(value)[:_LONGEST])

    def write(self, report: StepReport) -> None:
        """Log every number of the report."""
        for name, value in report.numbers().items():
            self._client.log_metric(self._run, name, value, step=report.step)

    def close(self) -> None:
        """Finish the run."""
        self._client.set_terminated(self._run)


_LONGEST = 500
"""Characters of a parameter's value that every MLflow server takes."""


def flat(config: dict[str, Any], above: str = "") -> dict[str, Any]:
    """The settings by their dotted keys."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        path = f"{above}.{key}" if above else key
        found |= flat(value, path) if isinstance(value, dict) else {path: value}
    return found
