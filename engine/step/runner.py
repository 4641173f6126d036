"""Runs the microbatches of a step, and holds back what goes wrong until all ranks can hear of it.

One step of this rank's stages: what the executor calls for every forward and backward.

program     the user's model and loss, which every stage runs as far as it goes
sight       timeline and cut of one input signature; others are looked at when they first come
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor

from engine.parallel.pipeline.partition.stage_plan import StagePlan
from engine.parallel.pipeline.runtime.executor import RankSchedule, StageMicrobatch, StageOutput
from engine.parallel.pipeline.runtime.outputs import Carrier, bring_outputs
from engine.parallel.pipeline.runtime.split_backward import DeferredWeightGrads
from engine.parallel.pipeline.schedule.actions import Action, Op
from engine.parallel.tensor.logits.sharded_logits import gather_logits
from engine.program.batch import Batch
from engine.program.loss import WeightedLoss, check_trainable
from engine.program.program import evaluating
from engine.step.runtime import Parts, RankRuntime
from engine.step.state import StepState
from engine.step.trace_cache import TracedForward
from engine.zero.reduce.reducer import Backward, BackwardPart


class StepRunner:
    """The microbatches of one step on this rank. ``kind``: "train", "evaluate", or "output" to keep outputs too."""

    def __init__(
        self, bench: RankRuntime, step: StepState, microbatches: Sequence[Batch],
        random_key: Callable[[int], tuple[int, ...]], kind: str = "train",
    ) -> None:  # fmt: skip
        self._bench, self._step, self._random_key, self._kind = bench, step, random_key, kind
        self._microbatches = microbatches
        self._backwards: Counter[int] = Counter()
        """By stage; of those in two parts the first counts."""
        self._left: dict[tuple[int, int], DeferredWeightGrads] = {}
        self._results: list[Any] = []
        self._sights: dict[int, TracedForward] = {}
        if bench.stage is not None:
            step.look_again = self.look_again

    def part(self, stage: int, microbatch: int) -> StageMicrobatch:
        """What a stage exchanges for a microbatch."""
        if self._bench.stage is None:
            return _ALONE
        sight = self._sight(microbatch)
        return StageMicrobatch(sight.cut.stages[stage], sight.timeline.values)

    def look(self) -> None:
        """See every microbatch before anything is sent, so that what a model cannot do leaves no rank waiting.

        Raises:
            PlanError, or the model's own error.
        """
        if self._bench.stage is not None:
            self._bench.sights.refresh()
            for index in range(len(self._microbatches)):
                self._sight(index)

    def look_again(self) -> None:
        """After a step whose loss is not a number: see once more one microbatch of each sight.

        Raises:
            EngineError: the forward has changed since it was seen.
        """
        one_of_each = {id(sight): index for index, sight in self._sights.items()}
        alike = nullcontext() if self._kind == "train" else evaluating(self._bench.program.model)
        with alike, self._bench.without_content():
            for index in one_of_each.values():
                again = partial(self._run, index)
                self._bench.sights.look_again(self._microbatches[index], self._kind, again)

    def bring_outputs(self, carrier: Carrier) -> None:
        """With "output": what the model returned to rank 0, which may have another stage than the last."""
        if self._kind != "output":
            return
        if self._bench.stage is not None:
            timelines = [self._sight(index).timeline for index in range(len(self._microbatches))]
            self._results = bring_outputs(self._results, timelines, self._bench.program.model, carrier)
        self._step.outputs = [result[0] for result in self._results]

    def forward(self, stage: int, microbatch: int, received: Mapping[int, Tensor]) -> StageOutput:
        """Run the program as far as this stage goes; the last one counts loss, weight and tokens."""
        sight = self._sight(microbatch) if self._bench.stage is not None else None
        random = sight is None or sight.timeline.random
        with self._bench.forward(*self._random_key(microbatch), random=random):
            if self._bench.stage is None or sight is None:
                return StageOutput({}, self._count(self._run(microbatch), microbatch))
            run = lambda: self._run(microbatch)  # noqa: E731
            plan = sight.cut.stages[stage]
            outcome = self._bench.stage.forward(sight.timeline, plan, run, received)
            return StageOutput(
                self._bench.own(outcome.sent), self._count(outcome.result, microbatch) if plan.last else None
            )

    def backward(self, action: Action) -> AbstractContextManager[None]:
        """Collect gradients; the last backward of each stage reduces them."""
        if action.op is not Op.BACKWARD_INPUT:
            return self._bench.backward(self._which(action.stage, action.microbatch, "whole"))
        leftover = self._left[action.stage, action.microbatch] = DeferredWeightGrads()
        return self._bench.backward(self._which(action.stage, action.microbatch, "input"), leftover)

    def weights(self, stage: int, microbatch: int) -> None:
        """Compute what the backward of the inputs has left."""
        leftover = self._left.pop((stage, microbatch))
        self._bench.weights(self._which(stage, microbatch, "weight"), leftover)

    def _which(self, stage: int, microbatch: int, part: BackwardPart) -> Backward:
        self._backwards[stage] += part != "weight"
        last = self._backwards[stage] == len(self._microbatches)
        if part != "input":  # else: it gives what does not wait, of which no more is to come
            last = last and all(waiting != stage for waiting, _ in self._left)
        return Backward(last, part, stage, microbatch)

    def _sight(self, microbatch: int) -> TracedForward:
        if microbatch not in self._sights:
            batch = self._microbatches[microbatch]
            with self._bench.without_content():
                self._sights[microbatch] = self._bench.sights.of(batch, self._kind, lambda: self._run(microbatch))
        return self._sights[microbatch]

    def _run(self, microbatch: int) -> Any:
        """(sum, weight), and with "output" what the model returned before them."""
        given = self._microbatches[microbatch]
        done = self._bench.first_use.watch(given, lambda: self._bench.program.forward(given))
        return (self._bench.own(gather_logits(done.output)), *done.loss) if self._kind == "output" else tuple(done.loss)

    def _count(self, result: Any, microbatch: int) -> Tensor | None:
        if self._kind == "output":
            self._results.append(result)
        loss = WeightedLoss(*result[-2:])
        if self._kind == "train":
            check_trainable(loss.sum)
        self._step.count(loss, self._microbatches[microbatch])
        return self._step.root(loss.sum) if self._kind == "train" else None


def run_schedule(parts: Parts, carrier: Carrier, step: StepState, work: StepRunner, row: RankSchedule) -> None:
    """Look at all microbatches, then run them; an error waits in ``step`` until all ranks meet, if they can.

    In a look nothing is sent, and what is wrong is wrong on the whole replica. In the middle of a pipeline or
    between tensor ranks the others wait for what this rank will never send, so an error goes out at once.
    """
    try:
        if step.problem is None:
            work.look()
    except Exception as problem:
        step.problem = problem
    if step.problem is not None:
        return
    try:
        with parts.bench.passes(row.actions):
            parts.executor.run(row, work)
            work.bring_outputs(carrier)
    except Exception as problem:
        if carrier.comm.grid.size("replica") > 1 or parts.bench.gathering is not None:
            raise
        step.problem = problem


_ALONE = StageMicrobatch(
    StagePlan(
        stage=0, last=True, calls=frozenset(), receives={}, sends={}, glue=frozenset(), parameters=frozenset(),
        tier=1, last_event=-1,
    ),
    (),
)  # fmt: skip
"""Without a pipeline nothing is received and nothing sent."""
