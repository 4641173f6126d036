"""What follows the backwards of a step: one norm and one decision for all ranks, then the update, or none.

reduce what is left -> agree -> finite?  yes: clip, update, gather
                                         no:  put buffers back, name the parameter, lower the loss scale

Where the optimizer's kernels take the decision from the device, the host does not stop between the two:

reduce what is left -> sum -> decide, update, gather on the device -> the host reads what was decided

An update that is launched before the host knows whether it is made: the device decides, from what all ranks sum.
"""

import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from engine.checkpoint.format.strict_json import Fields
from engine.config import Config
from engine.errors import EngineError
from engine.kernels.optim.adamw import DeviceDecision
from engine.optim.lr_schedules import LearningRate
from engine.parallel.comm.agreement import all_or_none
from engine.parallel.comm.comm import Comm
from engine.planning.budgets import CONTROL_SCALARS
from engine.precision.loss_scaler import make_loss_scale
from engine.step.runtime import Parts
from engine.step.state import StepState, StepTotals
from engine.zero.flat_buckets import gradient_squared_norm
from engine.zero.optim.flat_optimizers import Bookkeeping
from engine.zero.optim.master_weights import clip_factor, factor_on_device, gradient_norm
from engine.zero.optim.sharded_optimizer import ShardedOptimizer


@dataclass(frozen=True, slots=True)
class UpdateOutcome:
    """What became of a step; the same on every rank."""

    control: StepTotals
    norm: float
    lr: float
    scale: float
    """The loss scale of this step."""
    nonfinite: str | None
    """What was not finite in a skipped step."""

    @property
    def skipped(self) -> bool:
        """Nothing was updated."""
        return self.nonfinite is not None


@dataclass(frozen=True, slots=True)
class Condition:
    """When a step is made, beside that no rank has a problem and that it has a weight."""

    scale: float
    """Loss scale: what summed gradients are divided by, with the weight."""
    max_norm: float
    """0: no clipping."""
    finite: bool
    """Its gradient norm has to be."""
    loss: bool
    """Its loss must be a number, or else the host looks first whether the forward has changed."""

    def decide(self, values: Tensor) -> DeviceDecision:
        """From the control sums, fp64 on the device, by the formulas of the host. No host synchronization."""
        loss, weight, squared_norm, _, problems, _ = values.unbind()
        divisor = weight * self.scale
        norm, factor = factor_on_device(squared_norm, divisor, self.max_norm)
        go = (problems == 0) & (divisor != 0)
        if self.finite:
            go = go & norm.isfinite()
        if self.loss:
            go = go & loss.isnan().logical_not()
        return DeviceDecision(factor, go.to(values.dtype))


class DeviceDecidedUpdate:
    """Launched when it is made; ``read`` waits for the control sums only, not for the update."""

    def __init__(self, values: Tensor, condition: Condition, optimizer: ShardedOptimizer) -> None:
        self._optimizer, self._before = optimizer, Bookkeeping.of(optimizer.inner)
        self._decision = condition.decide(values)
        self._host = torch.cat([values, self._decision.go.view(1)]).to("cpu", non_blocking=True)
        self._copied = torch.cuda.Event() if values.is_cuda else None  # type: ignore[no-untyped-call]
        if self._copied is not None:
            self._copied.record()

    def launch(self, rate: LearningRate, update: int) -> None:
        """Update number ``update`` and its gathers over dp, label "parameters"."""
        rate.prepare(update)
        self._optimizer.launch(self._decision)

    def read(self) -> tuple[list[float], bool]:
        """(control sums, whether the update was made)."""
        if self._copied is not None:
            self._copied.synchronize()
        *values, go = self._host.tolist()
        return values, bool(go)

    def put_back(self) -> None:
        """It was not made: nothing tells of it any more."""
        self._before.put_back(self._optimizer.inner)


class Update:
    """Ends the steps of one engine, and counts them."""

    def __init__(self, config: Config, comm: Comm, device: torch.device) -> None:
        self._config, self._comm, self._device = config, comm, device
        self._checks = config.bf16.check_grad_overflow or not config.bf16.enabled
        self._seconds = 0.0
        self._in_a_row = 0
        self.made = 0
        """Updates."""
        self.skipped = 0
        """Steps that were none."""
        self.tokens = 0
        """Of all steps."""
        self.samples = 0
        """Rows of all steps."""
        self.scale = make_loss_scale(config.fp16)
        """Of the next step."""

    def run(self, step: StepState, parts: Parts, stop: bool = False) -> UpdateOutcome:
        """Reduce, agree, update or skip. Collective; a step that has failed on any rank raises on all.

        Where the device decides, a skipped or failed step sends what one with an update sends: parameters are gathered
        before the host knows.

        ``stop``: this rank was asked to stop after this step.
        """
        parts.bench.finish()
        step.problem = parts.copies.run(step.sent) or step.problem  # collective: also where a step has failed
        values = self._sum(step, gradient_squared_norm(parts.buckets, parts.kernels), parts.plan.last_rank, stop)
        trial = self._launch(values, step, parts) if parts.optimizer.decides_on_device else None
        sums, made = trial.read() if trial is not None else (values.tolist(), False)
        if trial is not None and not made:
            trial.put_back()
        control = self._check(StepTotals(*sums), step)
        agreed = time.perf_counter()
        step.seconds = agreed - step.started + self._seconds
        divisor = control.weight * step.scale
        norm = gradient_norm(control.squared_norm, divisor)
        lr, nonfinite = parts.learning_rate.at(self.made), None
        if self._checks and not math.isfinite(norm):
            nonfinite = parts.nonfinite.find(control, step.sent)
            parts.written.put_back()
            self.skipped += 1
            self._in_a_row += 1
        else:
            parts.written.forget()
            if made:
                parts.optimizer.settle()
            else:
                parts.learning_rate.prepare(self.made)
                parts.optimizer.step(clip_factor(norm, self._config.gradient_clipping) / divisor)
            parts.learning_rate.done()
            self.made += 1
            self._in_a_row = 0
        self.tokens += int(control.tokens)
        self.samples += self._config.train_batch_size or 0
        self.scale = self.scale.after(overflow=nonfinite is not None)
        self._seconds = time.perf_counter() - agreed
        return UpdateOutcome(control, norm, lr, step.scale, nonfinite)

    def agree(self, step: StepState, norm: Tensor | float, last_rank: int, stop: bool = False) -> StepTotals:
        """Sum the control values over the world: the one point where all ranks meet.

        ``last_rank``: the pipeline rank that has the loss.
        """
        return self._check(StepTotals(*self._sum(step, norm, last_rank, stop).tolist()), step)

    def _sum(self, step: StepState, norm: Tensor | float, last_rank: int, stop: bool) -> Tensor:
        """The sums of the control values, on the device."""
        coord = self._comm.grid.coord()
        speaks = coord.tp == 0 and coord.pp == last_rank  # one rank of each data coordinate
        values = torch.zeros(CONTROL_SCALARS, dtype=torch.float64, device=self._device)
        if speaks:
            values[0], values[1], values[3] = step.loss, step.weight, step.tokens
        values[2] = norm
        values[4] = step.problem is not None
        values[5] = stop
        self._comm.all_reduce(values, "world", "control").wait()
        return values

    def _launch(self, values: Tensor, step: StepState, parts: Parts) -> DeviceDecidedUpdate:
        """Update as the device decides. A NaN of a pipeline's loss waits for the host, which looks at it first."""
        clipping, looks = self._config.gradient_clipping, step.look_again is not None
        trial = DeviceDecidedUpdate(values, Condition(step.scale, clipping, self._checks, looks), parts.optimizer)
        trial.launch(parts.learning_rate, self.made)
        return trial

    def _check(self, control: StepTotals, step: StepState) -> StepTotals:
        """Raise what has gone wrong on any rank; a NaN of a pipeline is looked at by all ranks together."""
        if step.problem is not None:
            raise step.problem
        if control.problems:
            raise EngineError(
                f"{control.problems:.0f} other rank(s) failed in this step, so no rank makes it; "
                "their message tells why."
            )
        if math.isnan(control.loss) and step.look_again is not None:
            with all_or_none(self._comm, self._device, "has changed its forward, so no rank makes this step"):
                step.look_again()
        return control

    def state_dict(self) -> dict[str, Any]:
        """All counters and the loss scale; JSON."""
        return {
            "made": self.made, "skipped": self.skipped, "in_a_row": self._in_a_row, "tokens": self.tokens,
            "samples": self.samples, "scale": asdict(self.scale) if self._config.fp16.enabled else None,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there; a fixed loss scale stays what the configuration says.

        Raises:
            CheckpointError: that is no such state.
        """
        fields = Fields(state, "the counters of the run")
        self.made, self.skipped, self._in_a_row = (fields.count(name) for name in ("made", "skipped", "in_a_row"))
        self.tokens, self.samples = fields.count("tokens"), fields.count("samples")
        if fields.any("scale") is not None and self.scale.dynamic:
            scale = Fields(fields.any("scale"), "the loss scale")
            forgiven, good = scale.count("forgiven"), scale.count("good")
            self.scale = replace(self.scale, value=scale.positive("value"), forgiven=forgiven, good=good)

    def check(self, outcome: UpdateOutcome) -> None:
        """Stop a run whose steps are all skipped.

        Raises:
            EngineError: ``watchdog.max_skipped_steps`` steps in a row were skipped; the same on every rank.
        """
        allowed = self._config.watchdog.max_skipped_steps
        if not outcome.skipped or not allowed or self._in_a_row < allowed:
            return
        scale = ""
        if self._config.fp16.enabled:
            lowest = "" if self.scale.can_fall else ", which does not fall any more"
            scale = f" with the loss scale at {outcome.scale:g}{lowest}"
        raise EngineError(
            f"{self._in_a_row} steps in a row were skipped{scale}, because {_subject(outcome.nonfinite)} was not "
            f"finite after update {self.made}: lower the learning rate or look at data and loss, and go on from "
            "the last checkpoint; watchdog.max_skipped_steps sets how many may be skipped, 0 any number."
        )


def _subject(nonfinite: str | None) -> str:
    return str(nonfinite) if str(nonfinite).startswith("the ") else f"the gradient of {nonfinite!r}"
