"""One step of this rank's stages: what the executor calls for every forward and backward.

program     the user's model and loss, which every stage runs as far as it goes
sight       timeline and cut of one input signature; others are looked at when they first come
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from engine.batch import Batch
from engine.errors import EngineError
from engine.first_use import FirstUse
from engine.loss import WeightedLoss, check_trainable
from engine.modes import evaluating
from engine.outputs import Carrier, bring_outputs
from engine.parallel.pipeline.cut import Cut, recut
from engine.parallel.pipeline.difference import difference
from engine.parallel.pipeline.executor import Forward, Part
from engine.parallel.pipeline.probe import probe
from engine.parallel.pipeline.schedule import Action, Op
from engine.parallel.pipeline.stage import Stage
from engine.parallel.pipeline.stageplan import StagePlan
from engine.parallel.pipeline.switches import State, Switches
from engine.parallel.pipeline.timeline import Timeline
from engine.parallel.pipeline.weights import Leftover, WaitingWeights
from engine.parallel.tensor.axis import TensorAxis
from engine.parallel.tensor.sharded_logits import whole
from engine.plan import Plan
from engine.program import Program
from engine.randomness import Streams
from engine.step import Step
from engine.zero.gather import Gathering
from engine.zero.gather_order import passes_of
from engine.zero.reduce import Backward, BackwardPart, Reducer

_ALONE = Part(
    StagePlan(
        stage=0, last=True, calls=frozenset(), receives={}, sends={}, glue=frozenset(), parameters=frozenset(),
        tier=1, last_event=-1,
    ),
    (),
)  # fmt: skip
"""Without a pipeline nothing is received and nothing sent."""

Run = Callable[[], Any]

_SIGHTS = 64
"""Input signatures that are remembered; with more, the oldest is looked at anew."""
_STATES = 8
"""The same for the states of the model's attributes, for each signature."""


class Sight(NamedTuple):
    """A forward as it was seen, and how it is cut."""

    timeline: Timeline
    cut: Cut


class Sights:
    """Timelines and cuts by input signature and by what the model's attributes say; the first comes from the plan."""

    def __init__(self, plan: Plan, program: Program, axis: TensorAxis, example: Batch) -> None:
        self._plan, self._program, self._axis = plan, program, axis
        ranks = plan.schedule.rank_of_stage
        self._held = [{row.name for row in plan.table.held_by(rank)} for rank in ranks]
        """By stage."""
        self._learnt = [
            {row.name for row in plan.table.held_by(rank) if not row.trainable or row.name in stage.parameters}
            for rank, stage in zip(ranks, plan.cut.stages if plan.cut else (), strict=False)
        ]
        """The same without what only other stages of the rank train: a gradient would come when its bucket has left."""
        self._seen: dict[object, list[tuple[State, Sight]]] = {}
        self._switches = Switches(program.model)
        self._state: State = {}
        views = plan.tensor is not None and plan.tensor.follows_activations  # the plan's are not those of the run
        if plan.timeline is not None and plan.cut is not None and not views:
            self.refresh()
            with torch.enable_grad():
                self._seen[self._key(example, "train")] = [(self._state, Sight(plan.timeline, plan.cut))]

    def refresh(self) -> None:
        """Before each step: read the attributes that may turn the forward another way."""
        self._state = self._switches.read()

    def of(self, microbatch: Batch, kind: str, run: Run) -> Sight:
        """The sight of a microbatch; looks at it if there is none like it. Nothing is communicated.

        Raises:
            PlanError: the model does something else with this input, which the cut does not allow.
        """
        key = self._key(microbatch, kind)
        known = self._seen.get(key, [])
        for state, sight in known:
            if self._switches.same(state, self._state):
                return sight
        found = self._look(run)
        for state, sight in known:
            if difference(sight.timeline, found.timeline) is None:
                self._switches.settle(state, self._state)
                found = sight
        if len(self._seen) >= _SIGHTS and key not in self._seen:
            del self._seen[next(iter(self._seen))]
        self._seen[key] = [*known[1 - _STATES :], (self._state, found)]
        return found

    def look_again(self, microbatch: Batch, kind: str, run: Run) -> None:
        """Whether a microbatch whose loss is not a number still takes the path that was seen. Nothing is communicated.

        Raises:
            EngineError: it does not; names the first event that differs. The next step looks at it anew.
        """
        found = self.of(microbatch, kind, run)
        what = difference(found.timeline, self._probe(run))
        if what is not None:
            del self._seen[self._key(microbatch, kind)]
            raise EngineError(
                f"the loss is not a number, because the forward is another than the one that was cut: it {what}; let "
                "only shapes of the input and attributes of modules, set between steps, choose its path."
            )

    def _look(self, run: Run) -> Sight:
        assert self._plan.cut is not None
        timeline = self._probe(run)
        held = self._learnt if torch.is_grad_enabled() else self._held
        return Sight(timeline, recut(timeline, self._plan.cut.boundaries, held))

    def _probe(self, run: Run) -> Timeline:
        with self._axis.dry_run():
            return probe(self._program.model, run, stages=self._plan.schedule.stages)

    def _key(self, microbatch: Batch, kind: str) -> object:
        leaves, spec = pytree.tree_flatten(microbatch)
        shapes = tuple((tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves)
        return kind, torch.is_grad_enabled(), str(spec), shapes


@dataclass(frozen=True, slots=True)
class Bench:
    """The live parts that work needs."""

    program: Program
    streams: Streams
    sights: Sights
    stage: Stage | None
    """None without a pipeline."""
    reducer: Reducer
    first_use: FirstUse
    gathering: Gathering | None = None
    """None where parameters are whole."""
    waiting: WaitingWeights | None = None
    """None where no backward is split."""

    @contextmanager
    def forward(self, *key: int, random: bool = True) -> Iterator[None]:
        """Around the forward of a microbatch; ``key`` of its random numbers, if it draws any."""
        streams = self.streams.forward(*key) if random else nullcontext()
        with streams, self.gathering.forward() if self.gathering else nullcontext():
            cached = torch.is_autocast_cache_enabled()
            # casts that autocast keeps would be whole weights, and their gradients come when the weights have gone
            torch.set_autocast_cache_enabled(cached and self.gathering is None)
            try:
                yield
            finally:
                torch.set_autocast_cache_enabled(cached)

    @contextmanager
    def backward(self, which: Backward, leftover: Leftover | None = None) -> Iterator[None]:
        """Around a backward; with ``leftover``, weight gradients that can wait are left there."""
        waits = self.waiting.leaving(leftover) if self.waiting and leftover else nullcontext()
        gathers = self.gathering.backward(which.last) if self.gathering else nullcontext()
        with self.reducer.backward(which), gathers, waits:
            yield

    def weights(self, which: Backward, leftover: Leftover) -> None:
        """The weight gradients that a backward has left; they need no parameters."""
        with self.reducer.backward(which):
            leftover.compute(self.reducer.take)

    @contextmanager
    def passes(self, row: Sequence[Action]) -> Iterator[None]:
        """Around the actions of a whole step."""
        if self.gathering is None:
            yield
            return
        self.gathering.start(passes_of(row))
        try:
            yield
        finally:
            self.gathering.end()

    def finish(self) -> None:
        """After the last backward: gradients are reduced, parameters may change."""
        self.reducer.finish()
        if self.gathering is not None:
            self.gathering.end()

    def own(self, tree: Any) -> Any:
        """Tensors that outlive a forward; those that lie in gathered parameters are copied."""
        return tree if self.gathering is None else pytree.tree_map_only(Tensor, self.gathering.own, tree)

    def without_content(self) -> AbstractContextManager[None]:
        """Around code that looks at the shapes of parameters."""
        return self.gathering.without_content() if self.gathering else nullcontext()


class Work:
    """The microbatches of one step on this rank. ``kind``: "train", "evaluate", or "output" to keep outputs too."""

    def __init__(
        self, bench: Bench, step: Step, microbatches: Sequence[Batch], random_key: Callable[[int], tuple[int, ...]],
        kind: str = "train",
    ) -> None:  # fmt: skip
        self._bench, self._step, self._random_key, self._kind = bench, step, random_key, kind
        self._microbatches = microbatches
        self._backwards: Counter[int] = Counter()
        """By stage; of those in two parts the first counts."""
        self._left: dict[tuple[int, int], Leftover] = {}
        self._results: list[Any] = []
        self._sights: dict[int, Sight] = {}
        if bench.stage is not None:
            step.look_again = self.look_again

    def part(self, stage: int, microbatch: int) -> Part:
        """What a stage exchanges for a microbatch."""
        if self._bench.stage is None:
            return _ALONE
        sight = self._sight(microbatch)
        return Part(sight.cut.stages[stage], sight.timeline.values)

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

    def forward(self, stage: int, microbatch: int, received: Mapping[int, Tensor]) -> Forward:
        """Run the program as far as this stage goes; the last one counts loss, weight and tokens."""
        sight = self._sight(microbatch) if self._bench.stage is not None else None
        random = sight is None or sight.timeline.random
        with self._bench.forward(*self._random_key(microbatch), random=random):
            if self._bench.stage is None or sight is None:
                return Forward({}, self._count(self._run(microbatch), microbatch))
            run = lambda: self._run(microbatch)  # noqa: E731
            plan = sight.cut.stages[stage]
            outcome = self._bench.stage.forward(sight.timeline, plan, run, received)
            return Forward(
                self._bench.own(outcome.sent), self._count(outcome.result, microbatch) if plan.last else None
            )

    def backward(self, action: Action) -> AbstractContextManager[None]:
        """Collect gradients; the last backward of each stage reduces them."""
        if action.op is not Op.BACKWARD_INPUT:
            return self._bench.backward(self._which(action.stage, action.microbatch, "whole"))
        leftover = self._left[action.stage, action.microbatch] = Leftover()
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

    def _sight(self, microbatch: int) -> Sight:
        if microbatch not in self._sights:
            batch = self._microbatches[microbatch]
            with self._bench.without_content():
                self._sights[microbatch] = self._bench.sights.of(batch, self._kind, lambda: self._run(microbatch))
        return self._sights[microbatch]

    def _run(self, microbatch: int) -> Any:
        """(sum, weight), and with "output" what the model returned before them."""
        given = self._microbatches[microbatch]
        done = self._bench.first_use.watch(given, lambda: self._bench.program.forward(given))
        return (self._bench.own(whole(done.output)), *done.loss) if self._kind == "output" else tuple(done.loss)

    def _count(self, result: Any, microbatch: int) -> Tensor | None:
        if self._kind == "output":
            self._results.append(result)
        loss = WeightedLoss(*result[-2:])
        if self._kind == "train":
            check_trainable(loss.sum)
        self._step.count(loss, self._microbatches[microbatch])
        return self._step.root(loss.sum) if self._kind == "train" else None
