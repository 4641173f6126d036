"""The microbatches of one step on this rank: what the executor calls for every forward and backward."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal

from torch import Tensor

from engine.parallel.pipeline.partition.stage_plan import StagePlan
from engine.parallel.pipeline.runtime.executor import StageMicrobatch, StageOutput
from engine.parallel.pipeline.runtime.outputs import Carrier, bring_outputs
from engine.parallel.pipeline.runtime.split_backward import DeferredWeightGrads
from engine.parallel.pipeline.schedule.actions import Action, Op
from engine.parallel.tensor.logits.sharded_logits import gather_logits
from engine.program.batch import Batch
from engine.program.loss import WeightedLoss, check_trainable
from engine.program.program import evaluating
from engine.step.runtime import RankRuntime
from engine.step.state import StepState
from engine.step.trace_cache import TracedForward
from engine.zero.reduce.reducer import Backward, BackwardPart

StepKind = Literal["train", "evaluate", "output"]
"""``output`` evaluates, and keeps what the model returns too."""


class StepMicrobatches:
    """Runs forwards and backwards of one step; the :class:`Executor` says when."""

    def __init__(
        self, runtime: RankRuntime, step: StepState, microbatches: Sequence[Batch],
        random_key: Callable[[int], tuple[int, ...]], kind: StepKind,
    ) -> None:  # fmt: skip
        self._runtime, self._step, self._random_key, self._kind = runtime, step, random_key, kind
        self._microbatches = microbatches
        self._backwards: Counter[int] = Counter()
        """Backwards that each stage has begun; one in two parts counts with the first."""
        self._deferred: dict[tuple[int, int], DeferredWeightGrads] = {}
        """What the I of a (stage, microbatch) has left to its W."""
        self._results: list[Any] = []
        self._traced: dict[int, TracedForward] = {}
        if runtime.stage is not None:
            step.look_again = self.trace_again

    def part(self, stage: int, microbatch: int) -> StageMicrobatch:
        """What a stage exchanges for a microbatch."""
        if self._runtime.stage is None:
            return _ALONE
        traced = self._trace(microbatch)
        return StageMicrobatch(traced.partition.stages[stage], traced.trace.values)

    def trace_all(self) -> None:
        """Trace every microbatch before anything is sent: a forward that cannot be cut then leaves no rank waiting.

        Raises:
            PlanError, or the model's own error.
        """
        if self._runtime.stage is not None:
            self._runtime.traces.refresh()
            for index in range(len(self._microbatches)):
                self._trace(index)

    def trace_again(self) -> None:
        """After a step whose loss is not a number: trace one microbatch of each traced forward once more.

        Raises:
            EngineError: the forward has changed since it was traced.
        """
        one_of_each = {id(traced): index for index, traced in self._traced.items()}
        alike = nullcontext() if self._kind == "train" else evaluating(self._runtime.program.model)
        with alike, self._runtime.without_content():
            for index in one_of_each.values():
                again = partial(self._run, index)
                self._runtime.traces.look_again(self._microbatches[index], self._kind, again)

    def bring_outputs(self, carrier: Carrier) -> None:
        """With "output": what the model returned goes to rank 0, which may have another stage than the last."""
        if self._kind != "output":
            return
        if self._runtime.stage is not None:
            traces = [self._trace(index).trace for index in range(len(self._microbatches))]
            self._results = bring_outputs(self._results, traces, self._runtime.program.model, carrier)
        self._step.outputs = [result[0] for result in self._results]

    def forward(self, stage: int, microbatch: int, received: Mapping[int, Tensor]) -> StageOutput:
        """Run the program as far as this stage goes; the last stage counts loss, weight and tokens."""
        runtime, run = self._runtime, partial(self._run, microbatch)
        if runtime.stage is None:
            with runtime.forward(*self._random_key(microbatch)):
                return StageOutput({}, self._count(run(), microbatch))
        trace, partition = self._trace(microbatch)
        plan = partition.stages[stage]
        with runtime.forward(*self._random_key(microbatch), random=trace.random):
            done = runtime.stage.forward(trace, plan, run, received)
            return StageOutput(runtime.own(done.sent), self._count(done.result, microbatch) if plan.last else None)

    def backward(self, action: Action) -> AbstractContextManager[None]:
        """Collect gradients; the last backward of each stage reduces them."""
        if action.op is not Op.BACKWARD_INPUT:
            return self._runtime.backward(self._which(action.stage, action.microbatch, "whole"))
        deferred = self._deferred[action.stage, action.microbatch] = DeferredWeightGrads()
        return self._runtime.backward(self._which(action.stage, action.microbatch, "input"), deferred)

    def weights(self, stage: int, microbatch: int) -> None:
        """Compute the weight gradients that the backward of the inputs has deferred."""
        deferred = self._deferred.pop((stage, microbatch))
        self._runtime.weights(self._which(stage, microbatch, "weight"), deferred)

    def _which(self, stage: int, microbatch: int, part: BackwardPart) -> Backward:
        if part != "weight":
            self._backwards[stage] += 1
        last = self._backwards[stage] == len(self._microbatches)
        if part != "input":  # an input part gives what is not deferred, of which no more is to come
            last = last and all(deferred != stage for deferred, _ in self._deferred)
        return Backward(last, part, stage, microbatch)

    def _trace(self, microbatch: int) -> TracedForward:
        if microbatch not in self._traced:
            given, run = self._microbatches[microbatch], partial(self._run, microbatch)
            with self._runtime.without_content():
                self._traced[microbatch] = self._runtime.traces.of(given, self._kind, run)
        return self._traced[microbatch]

    def _run(self, microbatch: int) -> Any:
        """(sum, weight), and with "output" what the model returned before them."""
        runtime, given = self._runtime, self._microbatches[microbatch]
        done = runtime.first_use.watch(given, lambda: runtime.program.forward(given))
        return (runtime.own(gather_logits(done.output)), *done.loss) if self._kind == "output" else tuple(done.loss)

    def _count(self, result: Any, microbatch: int) -> Tensor | None:
        """Add the loss to the step; what backward starts from, in training."""
        if self._kind == "output":
            self._results.append(result)
        loss = WeightedLoss(*result[-2:])
        if self._kind != "train":
            self._step.count(loss, self._microbatches[microbatch])
            return None
        check_trainable(loss.sum)
        self._step.count(loss, self._microbatches[microbatch])
        return self._step.root(loss.sum)


_ALONE = StageMicrobatch(
    StagePlan(
        stage=0, last=True, calls=frozenset(), receives={}, sends={}, glue=frozenset(), parameters=frozenset(),
        tier=1, last_event=-1,
    ),
    (),
)  # fmt: skip
"""Without a pipeline nothing is received and nothing sent."""
