"""What a step tells: a report with the same values on every rank, and the logs that rank 0 writes."""

import math

import torch

from engine.config import Config
from engine.metrics import StepReport, make_sinks, peak_memory, utilisation
from engine.parallel.comm import Comm
from engine.parallel.traffic import Tally
from engine.plan import Plan
from engine.step import Step
from engine.update import Outcome


class Reports:
    """The reports of one engine."""

    def __init__(self, config: Config, comm: Comm, device: torch.device) -> None:
        self._every, self._comm, self._device = config.monitor.every, comm, device
        self._sinks = make_sinks(config.monitor) if comm.grid.rank == 0 else ()
        self.trained = Tally()
        """What training steps have sent."""
        self.attempts = 0
        """Training steps, skipped ones among them."""

    def make(self, step: Step, outcome: Outcome, plan: Plan, made: int) -> StepReport:
        """The report of a step after ``made`` updates."""
        control, world = outcome.control, self._comm.grid.world_size
        parameter_tokens = plan.table.elements * control.tokens / world if step.text else None
        tflops, mfu = utilisation(parameter_tokens, step.seconds, self._device)
        return StepReport(
            step=made,
            loss=control.loss / control.weight if control.weight else math.nan,
            weight=control.weight,
            grad_norm=outcome.norm,
            lr=outcome.lr,
            tokens=int(control.tokens),
            seconds=step.seconds,
            tflops=tflops,
            mfu=mfu,
            peak_bytes=peak_memory(self._device),
            bytes_sent=self._comm.tally.since(step.sent).bytes(),
            skipped=outcome.skipped,
            nonfinite=outcome.nonfinite,
            loss_scale=outcome.scale,
        )

    def record(self, step: Step, outcome: Outcome, plan: Plan, made: int) -> StepReport:
        """The report of a training step, which is counted, and logged if it is its turn.

        Whose turn it is does not depend on where this start of the run began.
        """
        report = self.make(step, outcome, plan, made)
        self.attempts += 1
        for row in self._comm.tally.since(step.sent).rows():
            self.trained.add(row)
        if report.step % self._every == 0 or report.skipped or self.attempts == 1:
            for sink in self._sinks:
                sink.write(report)
        return report

    def close(self) -> None:
        """Close the logs."""
        for sink in self._sinks:
            sink.close()
        self._sinks = ()
