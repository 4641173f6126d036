"""The live parts of this rank that run a step."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from engine.checkpoint.full_state import FullState
from engine.kernels.dispatch import Kernels
from engine.optim.lr_schedules import LearningRate
from engine.parallel.comm.comm import Comm
from engine.parallel.model.rng_streams import RandomStreams
from engine.parallel.pipeline.runtime.executor import Executor, RankSchedule
from engine.parallel.pipeline.runtime.split_backward import DeferredWeightGrads, SplitBackward
from engine.parallel.pipeline.runtime.stage import Stage
from engine.parallel.pipeline.schedule.actions import Action
from engine.parallel.tensor.layers.parameter_use import FirstUse
from engine.planning.plan import Plan
from engine.program.program import Program
from engine.step.buffer_rollback import WrittenBuffers
from engine.step.trace_cache import TraceCache
from engine.zero.flat_buckets import FlatBucket
from engine.zero.gather.gather_schedule import passes_of
from engine.zero.gather.gatherer import ParameterGatherer
from engine.zero.optim.sharded_optimizer import ShardedOptimizer
from engine.zero.reduce.reducer import Backward, Reducer
from engine.zero.reduce.replica_check import NonFinite, ReplicaCheck


@dataclass(frozen=True, slots=True)
class RankRuntime:
    """The live parts that work needs."""

    program: Program
    streams: RandomStreams
    sights: TraceCache
    stage: Stage | None
    """None without a pipeline."""
    reducer: Reducer
    first_use: FirstUse
    gathering: ParameterGatherer | None = None
    """None where parameters are whole."""
    waiting: SplitBackward | None = None
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
    def backward(self, which: Backward, leftover: DeferredWeightGrads | None = None) -> Iterator[None]:
        """Around a backward; with ``leftover``, weight gradients that can wait are left there."""
        waits = self.waiting.leaving(leftover) if self.waiting and leftover else nullcontext()
        gathers = self.gathering.backward(which.last) if self.gathering else nullcontext()
        with self.reducer.backward(which), gathers, waits:
            yield

    def weights(self, which: Backward, leftover: DeferredWeightGrads) -> None:
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


@dataclass(frozen=True, slots=True)
class Parts:
    """Everything an engine needs, built and placed."""

    plan: Plan
    comm: Comm
    bench: RankRuntime
    executor: Executor
    training: RankSchedule
    """What this rank does in a step."""
    evaluation: RankSchedule
    buckets: Sequence[FlatBucket]
    frozen: Sequence[FlatBucket]
    """Of parameters that are sharded and not trained."""
    optimizer: ShardedOptimizer
    learning_rate: LearningRate
    full_state: FullState
    copies: ReplicaCheck
    nonfinite: NonFinite
    written: WrittenBuffers
    removals: Sequence[Callable[[], None]]
    """Take off what was put on the user's model, in this order."""
    kernels: Kernels
