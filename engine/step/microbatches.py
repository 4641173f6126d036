"""The microbatches of one step on this rank: the forwards and backwards that the executor calls."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from engine.parallel.pipeline.partition.stage_plan import StagePlan
from engine.parallel.pipeline.runtime.executor import StageMicrobatch, StageOutput
from engine.parallel.pipeline.runtime.outputs import Carrier, bring_outputs
from engine.parallel.pipeline.runtime.split_backward import DeferredWeightGrads
from engine.parallel.pipeline.schedule.actions import Action, Op
from engine.parallel.tensor.logits.sharded_logits import gather_logits
from engine.program.batch import Batch, map_tensors
from engine.program.loss import WeightedLoss, check_trainable
from engine.program.program import evaluating
from engine.step.runtime import PipelineRuntime, RankRuntime
from engine.step.state import StepState
from engine.step.trace_cache import TracedForward
from engine.zero.reduce.reducer import Backward, BackwardPart

StepKind = Literal["train", "evaluate", "output", "predict"]
"""Purpose of a step. "output" returns loss and model outputs; "predict" returns outputs and computes no loss."""


class MicrobatchRunner:
    """Runner of the forwards and backwards of one step's microbatches, called by the pipeline executor."""

    def __init__(
        self, runtime: RankRuntime, step: StepState, microbatches: Sequence[Batch],
        random_key: Callable[[int], tuple[int, ...]], kind: StepKind, scheduled: int | None = None,
    ) -> None:  # fmt: skip
        """Takes ``scheduled``, the microbatches of the schedule: in those that this rank lacks it only takes part in
        the collectives of its data ranks; None: it has all of them.
        """
        self._runtime, self._step, self._random_key, self.kind = runtime, step, random_key, kind
        self._microbatches = microbatches
        self.scheduled = len(microbatches) if scheduled is None else scheduled
        self._backwards: Counter[int] = Counter()
        """Backwards that each stage has begun; a split backward counts with its first part."""
        self._deferred: dict[tuple[int, int], DeferredWeightGrads] = {}
        """Weight gradients that the action I of a (stage, microbatch) has deferred to its W."""
        self._results: list[Any] = []
        self._traced: dict[int, TracedForward] = {}
        if runtime.pipeline is not None:
            step.check_trace = self.trace_again

    def again(self, step: StepState) -> "MicrobatchRunner":
        """Returns a runner for a second run of the same step, on copies of the microbatches.

        ``step``: new state, to which the second run adds its loss and counts.
        """
        copies = [map_tensors(microbatch, torch.clone) for microbatch in self._microbatches]
        return MicrobatchRunner(self._runtime, step, copies, self._random_key, self.kind, self.scheduled)

    def _lacks(self, microbatch: int) -> bool:
        """Returns True for a microbatch that only other data ranks have."""
        return microbatch >= len(self._microbatches)

    def part(self, stage: int, microbatch: int) -> StageMicrobatch:
        """Returns the plan of ``stage`` and the traced tensors of ``microbatch``, which give the shapes of messages."""
        if self._runtime.pipeline is None or self._lacks(microbatch):
            return _ALONE
        traced = self._trace(microbatch)
        return StageMicrobatch(traced.partition.stages[stage], traced.trace.values)

    def trace_all(self) -> None:
        """Traces the forward of every microbatch, without communication; does nothing without a pipeline.

        Raises:
            PlanError: a forward does not fit the stages.
            Exception: error of the model's forward.
        """
        if self._runtime.pipeline is not None:
            for index in range(len(self._microbatches)):
                self._trace(index)

    @property
    def _pipeline(self) -> PipelineRuntime:
        assert self._runtime.pipeline is not None, "only pipelines trace microbatches"
        return self._runtime.pipeline

    @property
    def traced(self) -> list[TracedForward]:
        """Traces of this step's forwards so far, in order."""
        return list(self._traced.values())

    def trace_again(self) -> None:
        """Traces each distinct forward of the step again, and compares the new trace with the old one.

        Runs after a NaN loss on a pipeline.

        Raises:
            EngineError: the forward has changed since it was traced.
        """
        one_of_each = {id(traced): index for index, traced in self._traced.items()}
        alike = nullcontext() if self.kind == "train" else evaluating(self._runtime.program.model)
        with alike, self._runtime.without_content():
            for index in one_of_each.values():
                again = partial(self._run, microbatch_copy(self._microbatches[index], self._runtime.program.device))
                self._pipeline.traces.check_trace(self._microbatches[index], self.kind, again)

    def bring_outputs(self, carrier: Carrier) -> None:
        """Sends the model's outputs over pp from the last stage to the ranks that return them to the user.

        Stores them in the step's ``outputs``. Does nothing in steps of the kinds "train" and "evaluate".
        """
        if self.kind not in ("output", "predict"):
            return
        if self._runtime.pipeline is not None:
            traces = [self._trace(index).trace for index in range(len(self._microbatches))]
            self._results = bring_outputs(self._results, traces, self._runtime.program.model, carrier)
        self._step.outputs = [result[0] for result in self._results]

    def forward(self, stage: int, microbatch: int, received: Mapping[int, Tensor]) -> StageOutput:
        """Runs the forward of one stage on one microbatch; returns the tensors to send to other stages.

        The last stage adds loss, loss weight and tokens to the step's sums, and in training returns the scaled loss; in
        a step of the kind "predict" it does neither.
        ``received``: tensors from other stages, by their number in the trace.
        """
        if self._lacks(microbatch):
            with self._runtime.joining_forward():
                return StageOutput({}, None)
        runtime, given = self._runtime, self._microbatches[microbatch]
        if (pipeline := runtime.pipeline) is None:
            with runtime.forward(*self._random_key(microbatch)), runtime.counting(self._step.experts):
                return StageOutput({}, self._count(self._run(given), microbatch))
        trace, partition = self._trace(microbatch)
        run = partial(self._run, microbatch_copy(given, self._runtime.program.device))
        plan = partition.stages[stage]
        forward = runtime.forward(*self._random_key(microbatch), trace=trace)
        with forward, runtime.counting(self._step.experts):
            done = pipeline.stage.forward(trace, plan, run, received)
            return StageOutput(runtime.own(done.sent), self._count(done.result, microbatch) if plan.last else None)

    def backward(self, action: Action) -> AbstractContextManager[None]:
        """Returns the context for the backward of ``action``, a stage and a microbatch.

        Gradients accumulate inside; the stage's last backward of the step reduces them over dp.
        """
        if not self._lacks(action.microbatch):
            self._runtime.begin_backward(self._microbatches[action.microbatch])
        if action.op is not Op.BACKWARD_INPUT:
            return self._runtime.backward(self._which(action.stage, action.microbatch, "whole"))
        deferred = self._deferred[action.stage, action.microbatch] = DeferredWeightGrads()
        return self._runtime.backward(self._which(action.stage, action.microbatch, "input"), deferred)

    def weights(self, stage: int, microbatch: int) -> None:
        """Computes the weight gradients that the backward of ``stage`` and ``microbatch`` has deferred."""
        deferred = self._deferred.pop((stage, microbatch))
        self._runtime.weights(self._which(stage, microbatch, "weight"), deferred)

    def beside(self, stage: int, microbatch: int) -> AbstractContextManager[None]:
        """Returns a context in which this rank computes deferred weight gradients during its waits for tp collectives.

        They are the weight gradients that the backward of ``stage`` and ``microbatch`` has deferred.
        """
        runtime = self._runtime
        return runtime.axis.filling_waits(self._deferred[stage, microbatch].ahead, runtime.program.device)

    def _which(self, stage: int, microbatch: int, part: BackwardPart) -> Backward:
        if part != "weight":
            self._backwards[stage] += 1
        last = self._backwards[stage] == self.scheduled
        if part != "input":  # an input part is last for the gradients that are never deferred
            last = last and all(deferred != stage for deferred, _ in self._deferred)
        return Backward(last, part, stage, microbatch)

    def _trace(self, microbatch: int) -> TracedForward:
        if microbatch not in self._traced:
            given = self._microbatches[microbatch]
            with self._runtime.without_content():
                run = partial(self._run, microbatch_copy(given, self._runtime.program.device))
                self._traced[microbatch] = self._pipeline.traces.of(given, self.kind, run)
        return self._traced[microbatch]

    def _run(self, given: Batch) -> Any:
        """Returns (sum, weight, metrics) of the loss of a microbatch; "output" puts the model's output first, "predict"
        returns it alone."""
        runtime = self._runtime
        if self.kind == "predict":
            output = runtime.watched(given, lambda: runtime.program.output(given))
            return (runtime.own(gather_logits(output)),)
        done = runtime.watched(given, lambda: runtime.program.forward(given))
        return (runtime.own(gather_logits(done.output)), *done.loss) if self.kind == "output" else tuple(done.loss)

    def _count(self, result: Any, microbatch: int) -> Tensor | None:
        """Adds the loss to the step; returns the root of the backward in training, None otherwise."""
        if self.kind in ("output", "predict"):
            self._results.append(result)
        if self.kind == "predict":
            return None
        loss = WeightedLoss(*result[-3:])
        if self.kind != "train":
            self._step.count(loss, self._microbatches[microbatch])
            return None
        check_trainable(loss.sum)
        self._step.count(loss, self._microbatches[microbatch])
        return self._step.root(loss.sum)


def microbatch_copy(microbatch: Batch, device: torch.device) -> Batch:
    """Returns a copy of a microbatch, so that a forward on a pipeline may write into its input.

    Tensors not on ``device`` are not copied.
    """
    return map_tensors(microbatch, lambda tensor: tensor.clone() if tensor.device == device else tensor)


_ALONE = StageMicrobatch(
    StagePlan(
        stage=0, last=True, calls=frozenset(), receives={}, sends={}, glue=frozenset(), parameters=frozenset(),
        tier=1, last_event=-1,
    ),
    (),
)  # fmt: skip
"""The one stage of a run without a pipeline, which receives and sends nothing."""
