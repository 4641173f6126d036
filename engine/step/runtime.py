"""The live parts of this rank that run a step."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from engine.kernels.dispatch import Kernels
from engine.optim.lr_schedules import LearningRate
from engine.parallel.comm.comm import Comm
from engine.parallel.model.forward_patch import ForwardPatches
from engine.parallel.model.rng_streams import RandomStreams
from engine.parallel.pipeline.runtime.executor import Executor, RankSchedule
from engine.parallel.pipeline.runtime.split_backward import DeferredWeightGrads, SplitBackward
from engine.parallel.pipeline.runtime.stage import Stage
from engine.parallel.tensor.layers.parameter_use import FirstUse
from engine.planning.plan import Plan
from engine.program.program import Program
from engine.step.buffer_rollback import WrittenBuffers
from engine.step.trace_cache import TraceCache
from engine.zero.flat_buckets import FlatBucket
from engine.zero.gather.gatherer import ParameterGatherer
from engine.zero.optim.sharded_optimizer import ShardedOptimizer
from engine.zero.reduce.reducer import Backward, Reducer
from engine.zero.reduce.replica_check import NonFinite, ReplicaCheck


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRuntime:
    """Everything that lives on this rank once the model is placed; made by :func:`engine.build.assemble.build`."""

    plan: Plan
    comm: Comm
    program: Program
    """The user's model and loss as one function of a microbatch."""
    patches: ForwardPatches
    """Everything that was put on the user's model."""
    streams: RandomStreams
    traces: TraceCache
    first_use: FirstUse
    stage: Stage | None
    """None without a pipeline."""
    split_backward: SplitBackward | None
    """None where no backward is split."""
    executor: Executor
    training: RankSchedule
    """The actions of a training step on this rank."""
    evaluation: RankSchedule
    """The actions of an evaluation: forwards alone."""
    buckets: Sequence[FlatBucket]
    frozen: Sequence[FlatBucket]
    """Buckets of parameters that are sharded and not trained."""
    gatherer: ParameterGatherer | None
    """None where parameters are not sharded."""
    reducer: Reducer
    optimizer: ShardedOptimizer
    learning_rate: LearningRate
    kernels: Kernels
    replica_check: ReplicaCheck
    nonfinite: NonFinite
    buffers: WrittenBuffers

    @contextmanager
    def forward(self, *key: int, random: bool = True) -> Iterator[None]:
        """Around the forward of a microbatch; ``key`` of its random numbers, if it draws any."""
        streams = self.streams.forward(*key) if random else nullcontext()
        with streams, self.gatherer.forward() if self.gatherer else nullcontext():
            cached = torch.is_autocast_cache_enabled()
            # casts that autocast keeps would be whole weights, and their gradients come when the weights have gone
            torch.set_autocast_cache_enabled(cached and self.gatherer is None)
            try:
                yield
            finally:
                torch.set_autocast_cache_enabled(cached)

    @contextmanager
    def backward(self, which: Backward, deferred: DeferredWeightGrads | None = None) -> Iterator[None]:
        """Around a backward; with ``deferred``, weight gradients that can wait are left there."""
        waits = self.split_backward.leaving(deferred) if self.split_backward and deferred else nullcontext()
        gathers = self.gatherer.backward(which.last) if self.gatherer else nullcontext()
        with self.reducer.backward(which), gathers, waits:
            yield

    def weights(self, which: Backward, deferred: DeferredWeightGrads) -> None:
        """The weight gradients that a backward has left; they need no parameters."""
        with self.reducer.backward(which):
            deferred.compute(self.reducer.take)

    @contextmanager
    def passes(self, row: RankSchedule) -> Iterator[None]:
        """Around the actions of a whole step."""
        if self.gatherer is None:
            yield
            return
        self.gatherer.start(row.passes)
        try:
            yield
        finally:
            self.gatherer.end()

    def finish(self) -> None:
        """After the last backward: gradients are reduced, parameters may change."""
        self.reducer.finish()
        if self.gatherer is not None:
            self.gatherer.end()

    def close(self) -> None:
        """Take every patch off the model; nothing is gathered any more."""
        self.patches.remove()
        if self.gatherer is not None:
            self.gatherer.retire()

    def own(self, tree: Any) -> Any:
        """Tensors that outlive a forward; those that lie in gathered parameters are copied."""
        return tree if self.gatherer is None else pytree.tree_map_only(Tensor, self.gatherer.own, tree)

    def without_content(self) -> AbstractContextManager[None]:
        """Around code that looks at the shapes of parameters."""
        return self.gatherer.without_content() if self.gatherer else nullcontext()
