"""End of a step: all ranks compute one gradient norm and one decision, then update the weights or skip.

finish reductions -> control sum -> finite?  yes: clip, update, gather
                                         no:  restore buffers, name the parameter, lower the loss scale

If optimizer kernels read the decision on the device, the host does not wait between sum and update:

finish reductions -> control sum -> decide, update, gather on the device -> the host reads the decision
"""

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from engine.config import Config
from engine.errors import EngineError
from engine.kernels.device import record_event
from engine.kernels.ops.adamw import DeviceDecision
from engine.optim.lr_schedules import LearningRate
from engine.parallel.comm.agreement import all_or_none
from engine.parallel.comm.comm import Comm
from engine.precision.loss_scaler import make_loss_scale
from engine.step.batch_check import SAMPLER_ADVICE
from engine.step.failed_ranks import failure_of_step
from engine.step.parts import StepPart
from engine.step.runtime import RankRuntime
from engine.step.state import StepState, StepTotals
from engine.zero.flat_buckets import FlatBucket
from engine.zero.optim.flat_optimizers import Bookkeeping
from engine.zero.optim.master_weights import clip_factor, factor_on_device, gradient_norm
from engine.zero.optim.sharded_optimizer import ShardedOptimizer
from engine.zero.reduce.replica_check import NonFinite, NonFiniteSource

logger = logging.getLogger("trine")


@dataclass(frozen=True, slots=True)
class UpdateOutcome:
    """Totals and outcome of a training step or evaluation. Every rank has the same values."""

    totals: StepTotals[float]
    norm: float
    lr: float
    scale: float
    """Loss scale that this step used."""
    nonfinite: NonFiniteSource | None
    """Non-finite values of a skipped step and their ranks; None in any other step."""

    @property
    def skipped(self) -> bool:
        """True if the step made no update because its gradient norm was not finite."""
        return self.nonfinite is not None


@dataclass(frozen=True, slots=True)
class Condition:
    """Conditions under which the device itself decides to make an update.

    No rank may have failed, the sum of loss weights must not be 0, and on each rank exactly the parameters that had
    gradients on any rank in the previous step must have gradients.
    """

    scale: float
    """Loss scale, divided by the number of data ranks whose gradients are summed; gradients are divided by weight x
    scale.
    """
    max_norm: float
    """L2 norm to which gradients are clipped; 0: no clipping."""
    finite: bool
    """True if the gradient norm must be finite."""
    loss: bool
    """True if the loss must not be NaN, because the host first checks whether the forward has changed."""

    def decide(self, values: Tensor) -> DeviceDecision:
        """Returns the device's decision to update or not, with the factor that averages and clips gradients.

        ``values``: all-reduced step totals (fp64, on the device). No host synchronization.
        """
        totals = StepTotals.on_device(values)
        divisor = totals.weight * self.scale
        norm, factor = factor_on_device(totals.squared_norm, divisor, self.max_norm)
        go = (totals.problems == 0) & (divisor != 0) & (totals.unused == 0)
        if self.finite:
            go = go & norm.isfinite()
        if self.loss:
            go = go & totals.loss.isnan().logical_not()
        return DeviceDecision(factor, go.to(values.dtype))


class DeviceDecidedUpdate:
    """Optimizer update of one step that the host launches; the device decides to make or to skip it."""

    def __init__(self, values: Tensor, condition: Condition, optimizer: ShardedOptimizer) -> None:
        self._optimizer, self._before = optimizer, Bookkeeping.of(optimizer.inner)
        self._decision = condition.decide(values)
        self._host = torch.cat([values, self._decision.go.view(1)]).to("cpu", non_blocking=True)
        self._copied = record_event(values.device)

    def launch(self, rate: LearningRate, update: int) -> None:
        """Launches the optimizer update and the all-gathers of parameters over dp (traffic label "parameters").

        ``update``: number of earlier updates, from which ``rate`` computes the learning rate.
        """
        rate.prepare(update)
        self._optimizer.launch(self._decision)

    def read(self) -> tuple[list[float], bool]:
        """Waits for totals and decision, not for the update itself.

        Returns (totals in the order of ``StepTotals.pack``, True if the device decided to make the update).
        """
        if self._copied is not None:
            self._copied.synchronize()
        *values, go = self._host.tolist()
        return values, bool(go)

    def put_back(self) -> None:
        """Restores the optimizer's step counters after the device skipped the launched update."""
        self._before.put_back(self._optimizer.inner)


class Update:
    """Object that ends each training step: it sums totals over ranks, makes or skips the update, and changes the loss
    scale and counters.
    """

    def __init__(self, config: Config, comm: Comm, device: torch.device) -> None:
        self._config, self._comm, self._device = config, comm, device
        self._checks = config.bf16.check_grad_overflow or not config.bf16.enabled
        self._updates_unused = config.optimizer is not None and config.optimizer.update_unused
        self._seconds = 0.0
        self._in_a_row = 0
        self._told = False
        self._made_told = False
        self._alike = 0
        self.made = 0
        """Number of updates."""
        self.skipped = 0
        """Number of skipped steps."""
        self.tokens = 0
        """Tokens of all steps."""
        self.samples = 0
        """Rows of all steps."""
        self.used_factor: Callable[[FlatBucket], float] | None = None
        """Factor from the gradients in a bucket to the gradients of the last update; None while a step runs."""
        self.used_clipping = 1.0
        """The factor of clipping in ``used_factor``."""
        self.scale = make_loss_scale(config.fp16)
        """Loss scale of the next step."""

    def run(self, step: StepState, runtime: RankRuntime, stops: float = 0.0) -> UpdateOutcome:
        """Reduces gradients, sums loss, tokens and flags over all ranks, then makes or skips the update. Collective.

        If any rank has failed, all ranks raise. ``stops``: this rank's ``RunControl.stops``, a number for its reasons
        to stop.
        """
        runtime.finish(step.reduced)  # the norm in the control sum is that of complete gradients
        for part in runtime.parts.having(StepPart.before_update):  # some are collective, so also in a failed step
            step.problem = part.before_update(step)
        idle = runtime.reducer.frozen if self._updates_unused else runtime.reducer.unused - step.used
        totals, made = self._decide(step, runtime, stops, idle)
        for part in runtime.parts.having(StepPart.agreed):
            part.agreed(step, totals)
        self._tell_same_batch(totals, step)
        if totals.unused:  # a sum, so that all ranks make the all-reduce of names, or none does
            runtime.optimizer.unused = self._find_unused(idle, runtime)
        agreed = time.perf_counter()
        step.seconds = agreed - step.started + self._seconds
        outcome = self._end(totals, step, made, runtime)
        self._change_scale(outcome, runtime)
        self._seconds = time.perf_counter() - agreed
        return outcome

    def _decide(
        self, step: StepState, runtime: RankRuntime, stops: float, idle: frozenset[str]
    ) -> tuple[StepTotals[float], bool]:
        """Agrees with all ranks; returns the totals, and True if the device has made the update by its own decision.

        The control sum comes before the decision: clipping and finiteness need the norm over all shards, and a rank
        that decided from its own values could skip where others update, or raise where others wait for it.
        """
        squared_norm = runtime.optimizer.gradient_squared_norm()
        # a parameter whose use has changed on one rank is one more summand, so that all ranks learn of it here
        surprises = runtime.optimizer.unexpected(idle, runtime.reducer.names)
        packed = self._sum(step, squared_norm, runtime.plan.last_rank, stops, surprises)
        # launched before the host reads the sums, so that the device does not wait for the host
        launched = self._launch(packed, step, runtime) if runtime.optimizer.decides_on_device else None
        sums, made = launched.read() if launched is not None else (packed.tolist(), False)
        self._comm.check_kernels()
        if launched is not None and not made:
            launched.put_back()
        return self._check(StepTotals.unpack(sums, step.counted), step), made

    def _end(self, totals: StepTotals[float], step: StepState, made: bool, runtime: RankRuntime) -> UpdateOutcome:
        """Makes the update, unless it is ``made``, or skips the step; counts it."""
        divisor = totals.weight * step.divides
        norm = gradient_norm(totals.squared_norm, divisor)
        lr = runtime.learning_rate.at(self.made)
        nonfinite = None
        if self._checks and not math.isfinite(norm):
            nonfinite = self._skip(totals, step, runtime)
            self.used_factor, self.used_clipping = lambda flat: 1.0 / divisor, 1.0
        else:
            self._make(self._clipping(norm, step) / divisor, made, runtime)
            self._tell_made(totals, norm, step.unseen)
        self.tokens += int(totals.tokens)
        self.samples += step.rows if step.rows is not None else self._config.train_batch_size or 0
        return UpdateOutcome(totals=totals, norm=norm, lr=lr, scale=step.scale, nonfinite=nonfinite)

    def _change_scale(self, outcome: UpdateOutcome, runtime: RankRuntime) -> None:
        """Chooses the loss scale of the next step, and scales the gradients that wait for an update."""
        if self.scale.dynamic:
            self.scale = self.scale.after(overflow=outcome.skipped)
        for part in runtime.parts.having(StepPart.scaled) if self.scale.value != outcome.scale else ():
            part.scaled(self.scale.value / outcome.scale)

    def _tell_same_batch(self, totals: StepTotals[float], step: StepState) -> None:
        """Logs once that data ranks receive equal batches."""
        if step.copies is not None:  # the digest of a batch has left its place in the sum to that of the weights
            return
        self._alike += totals.same_batch(self._comm.grid.row_ranks)
        if self._alike == 2 and totals.digest and self._comm.grid.rank == 0:
            logger.warning(
                "all %d data ranks were given the same batch in each of the first two steps, so they compute what one "
                "would; give each its own rows: %s.",
                self._comm.grid.row_ranks,
                SAMPLER_ADVICE,
            )

    def _clipping(self, norm: float, step: StepState) -> float:
        self.used_clipping = clip_factor(norm, self._max_norm(step))
        return self.used_clipping

    def _skip(self, totals: StepTotals[float], step: StepState, runtime: RankRuntime) -> NonFiniteSource:
        """Skips the step: restores the buffers, and returns the source of the non-finite number. The first time it is
        logged.

        A sum over data ranks hides on which of them a gradient was not finite. From here on to the next update every
        gradient is looked at before the sum, so that a second skipped step can name the rank.
        """
        own = runtime.reducer.found_nonfinite()
        finder = NonFinite(runtime.plan.table, runtime.buckets, self._comm, self._device)
        nonfinite = finder.find(step.loss, totals.weight, own, step.sent)
        runtime.reducer.watch(True)
        for part in runtime.parts.having(StepPart.after_skip):
            part.after_skip()
        self.skipped += 1
        self._in_a_row += 1
        if not self._told and self._comm.grid.rank == 0:
            scale = f"; the loss scale is {step.scale:g} and will fall" * self.scale.dynamic
            logger.warning(
                "the step after update %d is skipped, because %s was not finite%s. Further skipped steps are counted "
                "in eng.skipped_steps and are not logged.",
                self.made,
                nonfinite.subject,
                scale,
            )
        self._told = True
        return nonfinite

    def _tell_made(self, totals: StepTotals[float], norm: float, unseen: bool) -> None:
        """Logs once that an update was made although a number was not finite.

        ``unseen``: there were losses that the engine was not given, so that the total is nan.
        """
        finite = math.isfinite(norm)
        if self._made_told or self._comm.grid.rank or (finite and (unseen or math.isfinite(totals.loss))):
            return
        self._made_told = True
        what, remedy = (
            ("the loss", "a mean over labels that are all ignored (-100) is nan; a loss_fn that returns (sum, weight) "
             "counts such rows as nothing")
            if finite
            else ("the gradient norm", "set bf16.check_grad_overflow to true, which skips such steps")
        )  # fmt: skip
        logger.warning(
            "update %d was made although %s was not finite, as one process makes it: %s. Further ones are in the "
            "reports and are not logged.", self.made, what, remedy,
        )  # fmt: skip

    def _make(self, factor: float, launched: bool, runtime: RankRuntime) -> None:
        """Updates with gradients times ``factor``, unless the device has already made the update (``launched``)."""
        if launched:
            runtime.optimizer.settle()
        else:
            runtime.learning_rate.prepare(self.made)
            try:
                runtime.optimizer.step(factor)
            except EngineError:  # a disk has failed on some rank: the step is none on all of them
                runtime.parts.undo_step()
                raise
        for part in runtime.parts.having(StepPart.after_update):
            part.after_update()
        scaled = runtime.optimizer.scales_in_place
        self.used_factor = lambda flat: 1.0 if scaled(flat) and not launched else factor
        runtime.learning_rate.done()
        self.made += 1
        if self._in_a_row:
            runtime.reducer.watch(False)
        self._in_a_row = 0

    def agree(self, step: StepState, last_rank: int) -> StepTotals[float]:
        """Returns the totals of an evaluation, summed over the world by one all-reduce (traffic label "control").

        ``last_rank``: the pipeline rank of the last stage, which computes the loss.
        """
        sums = self._sum(step, 0.0, last_rank, 0.0).tolist()
        return self._check(StepTotals.unpack(sums, step.counted), step)

    def _find_unused(self, idle: frozenset[str], runtime: RankRuntime) -> frozenset[str]:
        """Returns the parameters that are ``idle`` on every rank, by one small all-reduce over the world, label "used".

        Needed only in steps that use other parameters than the step before, or where ranks use different ones.

        Raises:
            EngineError: some of the ranks that hold a parameter have frozen it, and others have not; on all ranks.
        """
        names = [row.name for row in runtime.plan.table if row.trainable]
        own, frozen = runtime.reducer.names, runtime.reducer.frozen
        counts = torch.tensor(
            [[name in own - idle, name in frozen, name in own - frozen] for name in names],
            dtype=torch.float32,
            device=self._device,
        )
        self._comm.all_reduce(counts, "world", "used").wait()
        found = dict(zip(names, counts.tolist(), strict=True))
        for name, (_, without, others) in found.items():
            if without and others:
                raise EngineError(
                    f"parameter {name!r} is frozen on {without:.0f} rank(s) and trained on {others:.0f}, so no rank "
                    "makes this step; make the same requires_grad_ calls on every rank."
                )
        return frozenset(name for name, (used, _, _) in found.items() if not used)

    def _sum(
        self, step: StepState, squared_norm: Tensor | float, last_rank: int, stops: float, unused: int = 0
    ) -> Tensor:
        """Returns the packed totals, summed over the world by one all-reduce, label "control"."""
        grid, metrics = self._comm.grid, len(self._config.monitor.metrics)
        speaks = grid.coord().pp == last_rank and grid.is_first("stage_replica")
        packed = StepTotals.pack(step, squared_norm, speaks, stops, unused, metrics)
        self._comm.all_reduce(packed, "world", "control").wait()
        return packed

    def _launch(self, packed: Tensor, step: StepState, runtime: RankRuntime) -> DeviceDecidedUpdate:
        """Launches an update on which the device decides; after a NaN loss of a pipeline, the host checks the trace
        first."""
        looks = step.check_trace is not None
        condition = Condition(scale=step.divides, max_norm=self._max_norm(step), finite=self._checks, loss=looks)
        self._comm.bring_status()  # before the event that the host waits for, and before the update
        launched = DeviceDecidedUpdate(packed, condition, runtime.optimizer)
        launched.launch(runtime.learning_rate, self.made)
        return launched

    def _max_norm(self, step: StepState) -> float:
        return self._config.gradient_clipping if step.max_norm is None else step.max_norm

    def _check(self, totals: StepTotals[float], step: StepState) -> StepTotals[float]:
        """Raises if a step has failed on any rank; after a NaN loss of a pipeline, all ranks trace again together."""
        if totals.problems:
            raise failure_of_step(step.problem, self._comm, self._device)
        if math.isnan(totals.loss) and step.check_trace is not None:
            with all_or_none(self._comm, self._device, "has changed its forward, so no rank makes this step"):
                step.check_trace()
        return totals

    def state_dict(self) -> dict[str, Any]:
        """Returns the counters of updates, skipped steps, tokens and samples, and the loss scale, as JSON values."""
        return {
            "made": self.made, "skipped": self.skipped, "in_a_row": self._in_a_row, "tokens": self.tokens,
            "samples": self.samples, "scale": asdict(self.scale) if self._config.fp16.enabled else None,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the counters and a dynamic loss scale from ``state``, which ``state_dict`` returned. A fixed loss
        scale stays as configured.
        """
        self.made, self.skipped, self._in_a_row = state["made"], state["skipped"], state["in_a_row"]
        self.tokens, self.samples = state["tokens"], state["samples"]
        if state["scale"] is not None and self.scale.dynamic:
            scale = state["scale"]
            self.scale = replace(self.scale, **{name: scale[name] for name in ("value", "forgiven", "good")})

    def check(self, outcome: UpdateOutcome) -> None:
        """Raises after too many skipped steps in a row; ``outcome`` is the newest step's.

        Raises:
            EngineError: ``max_skipped_steps`` steps in a row were skipped; all ranks raise.
        """
        allowed = self._config.max_skipped_steps
        if outcome.nonfinite is None or not allowed or self._in_a_row < allowed:
            return
        scale = ""
        if self._config.fp16.enabled:
            lowest = "" if self.scale.can_fall else ", which cannot fall further"
            scale = f" with the loss scale at {outcome.scale:g}{lowest}"
        raise EngineError(
            f"{self._in_a_row} steps in a row were skipped{scale}, because {outcome.nonfinite.subject} was not "
            f"finite after update {self.made}: lower the learning rate or check data and loss, and resume from "
            "the last checkpoint; max_skipped_steps sets how many may be skipped (0: any number)."
        )
