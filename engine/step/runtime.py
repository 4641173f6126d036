"""Runtime of this rank: sharded model, communication, executor and optimizer of its steps."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from engine.optim.lr_schedules import LearningRate
from engine.parallel.activation_checkpointing.host_activations import HostActivations
from engine.parallel.comm.agreement import all_or_none
from engine.parallel.comm.comm import Comm
from engine.parallel.model.forward_patch import ForwardPatches
from engine.parallel.model.rng_streams import RandomStreams
from engine.parallel.pipeline.runtime.executor import Executor, RankSchedule
from engine.parallel.pipeline.runtime.split_backward import DeferredWeightGrads, SplitBackward
from engine.parallel.pipeline.runtime.stage import AbsentParameters, Stage
from engine.parallel.tensor.layers.parameter_use import ParameterUseCheck
from engine.parallel.tensor.tp_axis import TensorAxis
from engine.parallel.trace.model_trace import ModelTrace
from engine.planning.plan import Plan
from engine.program.batch import Batch
from engine.program.program import Program, outside_inference_mode
from engine.step.parts import StepPart, StepParts
from engine.step.rank_parts import AverageOfWeights, BackgroundReads, DelayedUpdates, StatesOnHost
from engine.step.trace_cache import TraceCache
from engine.zero.flat_buckets import FlatBucket, leave
from engine.zero.gather.gatherer import ParameterGatherer
from engine.zero.gather.left_shards import leave_shards
from engine.zero.optim.averaged_weights import AveragedWeights, WeightAverage
from engine.zero.optim.sharded_optimizer import ShardedOptimizer
from engine.zero.reduce.gradient_guard import GradientGuard, UserBackward
from engine.zero.reduce.reducer import Backward, Reducer
from engine.zero.state.offloaded_states import OffloadedStates
from engine.zero.state.state_inventory import StateInventory


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineRuntime:
    """Objects of a pipeline rank: the runner of its stages, traced forwards, and placeholders for other stages'
    parameters.
    """

    stage: Stage
    traces: TraceCache
    absent: AbsentParameters


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRuntime:
    """All objects that run steps on this rank; made by :func:`engine.build.assemble.build`."""

    plan: Plan
    comm: Comm
    axis: TensorAxis
    """Tensor-parallel collectives for the sharded layers."""
    program: Program
    """User's model and loss as one function of a microbatch."""
    patches: ForwardPatches
    """Changes that the engine has made to the user's modules."""
    streams: RandomStreams
    first_use: ParameterUseCheck | None
    """Check that the first forward uses parameters as planned; None without tensor parallelism."""
    pipeline: PipelineRuntime | None
    """Pipeline objects; None for one stage."""
    split_backward: SplitBackward | None
    """Deferral of weight gradients; None if the schedule splits no backward."""
    executor: Executor
    inventory: StateInventory
    """All tensors of model and optimizer that this rank stores between steps."""
    gatherer: ParameterGatherer | None
    """All-gathers of sharded parameters (ZeRO 3); None if parameters are not sharded."""
    reducer: Reducer
    user_backward: UserBackward
    """Observer of a backward that the user's loop calls without the engine (``loss.backward()``)."""
    gradient_guard: GradientGuard
    """Guard that makes reads of ``p.grad`` raise between a backward of the user's loop and its step."""
    optimizer: ShardedOptimizer
    learning_rate: LearningRate
    parts: StepParts
    """Step parts of the features that are on."""
    on_host: HostActivations
    """Activations that are offloaded to host memory."""

    @property
    def offloaded(self) -> OffloadedStates:
        """State that ``offload_states`` has moved to host memory."""
        part = self.parts.find(StatesOnHost)
        assert part is not None, "every engine can move its state"
        return part.states

    @property
    def averaged(self) -> AveragedWeights | None:
        """Switch between the training weights and their moving average; None if the run has no average."""
        part = self.parts.find(AverageOfWeights)
        return part.weights if part is not None else None

    @property
    def average(self) -> WeightAverage | None:
        """Exponential moving average of the weights; None without ``"ema"`` in the configuration."""
        return self.averaged.moving if self.averaged is not None else None

    @property
    def buckets(self) -> Sequence[FlatBucket]:
        """Flat buffers (buckets) with the trained parameters of this rank."""
        return self.inventory.trained

    @property
    def frozen(self) -> Sequence[FlatBucket]:
        """Flat buffers with the frozen parameters of this rank if ZeRO 3 shards them; else ()."""
        return self.inventory.frozen

    @property
    def communicates(self) -> bool:
        """True if forwards communicate with other ranks."""
        grid = self.comm.grid
        gathers = self.gatherer is not None and grid.size(grid.sharding) > 1
        return grid.size("replica") > 1 or gathers or grid.experts > 1

    @property
    def data_ranks_meet(self) -> bool:
        """True if data ranks communicate in forwards, for sharded parameters or for experts on other ranks."""
        return self.gatherer is not None or self.comm.grid.experts > 1

    @contextmanager
    def forward(self, *key: int, trace: ModelTrace | None = None) -> Iterator[None]:
        """Opens a context for the forward of one microbatch, with random number generators seeded by ``key``.

        Without ``key``, or if ``trace`` has no random numbers, the generators are not changed.
        """
        draws = key and (trace is None or trace.random or trace.host_random)
        host = trace.host_random if trace is not None else None
        streams = self.streams.forward(*key, host=host) if draws else nullcontext()
        with streams, self.gatherer.forward() if self.gatherer else nullcontext():
            cached = torch.is_autocast_cache_enabled()
            # autocast would cache casts of full weights, whose gradients come after the weights are freed
            torch.set_autocast_cache_enabled(cached and self.gatherer is None)
            precision = self.program.precision
            casts = precision.operands is not None or precision.autocast is not None
            try:
                with precision.forward(self.program.device, self.pipeline is None) if casts else nullcontext():
                    yield
            finally:
                torch.set_autocast_cache_enabled(cached)

    def joining_forward(self) -> AbstractContextManager[None]:
        """Returns a context in which this rank joins the parameter gathers of other data ranks' forwards."""
        return self.gatherer.forward() if self.gatherer is not None else nullcontext()

    @contextmanager
    def counting(self, into: Tensor | None) -> Iterator[None]:
        """Opens a context for a forward that adds counts to ``into``, such as the tokens of each expert; None: no
        counts.
        """
        with ExitStack() as stack:
            for part in self.parts.having(StepPart.forward):
                stack.enter_context(part.forward(into))
            yield

    def uncounted(self) -> Tensor | None:
        """Returns zeros to which a new step's forwards add counts, such as tokens of each expert; None: no counts."""
        return next((part.counts() for part in self.parts.having(StepPart.counts)), None)

    def watched(self, given: Any, run: Callable[[], Any]) -> Any:
        """Returns ``run()``, a forward on the inputs ``given``.

        In the first forward, raises if a parameter is not used as the tensor-parallel plan assumes.
        """
        first_use = self.first_use
        return first_use.watch(given, run) if first_use is not None and first_use.needed else run()

    @contextmanager
    def backward(self, which: Backward, deferred: DeferredWeightGrads | None = None) -> Iterator[None]:
        """Opens a context for the backward of the stage and microbatch in ``which``.

        ``deferred``: collector of weight gradients for a later call of ``weights``; None: the backward computes them.
        """
        waits = self.split_backward.leaving(deferred) if self.split_backward and deferred else nullcontext()
        gathers = self.gatherer.backward(which.last) if self.gatherer else nullcontext()
        with self.reducer.backward(self._compared(which)), gathers, waits:
            try:
                yield
            finally:
                self.streams.end_backward()
                for part in self.parts.having(StepPart.end_backward):
                    part.end_backward()

    def begin_backward(self, microbatch: Batch) -> None:
        """Calls the hooks of optional features before the backward of ``microbatch``."""
        for part in self.parts.having(StepPart.begin_backward):
            part.begin_backward(microbatch)

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """Opens a context in which ZeRO 3 gathers sharded parameters for a backward without weight gradients.

        Call it under ZeRO 3 only.
        """
        assert self.gatherer is not None, "others need no context"
        with self.gatherer.backward(last=False):
            try:
                yield
            finally:
                self.streams.end_backward()

    @property
    def parameters(self) -> Iterator[Tensor]:
        """Trained parameters of this rank."""
        return (parameter for flat in self.buckets for parameter in flat.parameters if parameter.requires_grad)

    def _compared(self, which: Backward) -> Backward:
        unequal = self.gatherer is not None and self.gatherer.unequal(which.stage, which.microbatch)
        return which._replace(unequal=True) if unequal else which

    def weights(self, which: Backward, deferred: DeferredWeightGrads) -> None:
        """Computes the weight gradients collected in ``deferred``, and passes them to the reducer.

        ``which``: stage and microbatch of the :meth:`backward` call that has collected them.
        """
        with self.reducer.backward(self._compared(which)):
            deferred.compute(self.reducer.take)

    @contextmanager
    def passes(self, row: RankSchedule) -> Iterator[None]:
        """Opens a context in which this rank runs its forwards and backwards of a step in the order of ``row``.

        Between two passes (forwards or backwards), ZeRO 3 leaves parameters gathered if the second pass starts with
        these parameters.
        """
        if self.gatherer is None or self.gatherer.holds:
            yield
            return
        self.gatherer.start(row.passes)
        try:
            yield
        finally:
            self.gatherer.end()

    def running(self) -> AbstractContextManager[None]:
        """Returns a context for the engine's forwards and backwards on a pipeline.

        Outside of it, a read of another stage's parameter raises.
        """
        return self.pipeline.absent.running() if self.pipeline is not None else nullcontext()

    def finish(self, reduced: bool = False) -> None:
        """Completes gradient reductions and parameter gathers after the last backward of a step.

        ``reduced``: True if the gradients are reduced already; only gathers are then completed.
        """
        if reduced:
            self.optimizer.copies.forget()  # the user may have written what lies reduced in the buckets
        else:
            self.reducer.finish()
        if self.gatherer is not None:
            self.gatherer.end()

    def forget_step(self) -> None:
        """Drops the gradients of a failed step, and restores the buffers that its forwards have written."""
        self.reducer.reset()
        if self.gatherer is not None:
            self.gatherer.end()
        self.parts.undo_step()

    def close(self) -> None:
        """Closes the optional features, removes the engine's patches from the model, and stops ZeRO 3's gathers.

        An error of one of these does not stop the others; it is raised at the end. Sharded parameters stay sharded.
        """
        with ExitStack() as closing:
            closing.callback(self._leave)
            closing.callback(self.patches.remove)
            for part in reversed(self.parts.having(StepPart.close)):
                closing.callback(part.close)

    def _leave(self) -> None:
        if self.pipeline is not None:
            self.pipeline.absent.retire()
        if self.gatherer is not None:
            self.gatherer.retire()
            leave_shards(self.inventory.buckets, self.comm.grid)
        for flat in self.inventory.buckets:
            leave(flat)

    def weights_written(self) -> None:
        """Drops outdated gathered copies of parameters after weights were loaded or written. Collective."""
        if self.gatherer is not None:
            self.gatherer.forget()

    def settle(self) -> None:
        """Completes work that runs after a step: an optimizer update on the host, and copies of parameters to the host.

        Collective if an update runs on the host. If that update failed on one rank, all ranks raise.
        """
        delayed = self.parts.find(DelayedUpdates)
        if delayed is not None and delayed.pending:
            with all_or_none(self.comm, self.program.device, "has an update that cannot be brought"):
                if (problem := delayed.problem()) is not None:
                    raise problem
            delayed.bring()
        if self.gatherer is not None:
            self.gatherer.settle()

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Opens a context for reads or writes of weights or optimizer state between steps, outside of inference mode;
        first completes all updates.
        """
        with outside_inference_mode(), self.parts.entering(StepPart.changing):
            self.settle()
            yield

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Opens a context for reads of weights between steps; first completes all updates. The next publication does
        not count frozen weights as changed, as it does after :meth:`changing`.
        """
        reads = self.parts.find(BackgroundReads)
        changed = reads is not None and reads.changed
        with self.changing():
            if reads is not None:
                reads.changed = changed
            yield

    @contextmanager
    def averaging(self) -> Iterator[None]:
        """Opens a context in which the model has its averaged weights; there must be an average. Collective."""
        assert self.averaged is not None, "the caller has asked"
        if self.gatherer is not None:
            self.gatherer.refuse_opened("averaged_weights")
        try:
            with self.changing():
                self.averaged.enter()
                self.weights_written()
            yield
        finally:
            with self.changing():
                self.averaged.leave()
                self.weights_written()

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Opens a context for a save of weights or optimizer state; raises if some of the state was lost."""
        with self.parts.entering(StepPart.saving):
            self.settle()
            yield

    def own(self, tree: Any) -> Any:
        """Returns ``tree`` (nested lists, tuples and dicts), with a copy in place of each tensor that shares memory
        with parameters gathered by ZeRO 3.
        """
        return tree if self.gatherer is None else pytree.tree_map_only(Tensor, self.gatherer.own, tree)

    @contextmanager
    def without_content(self) -> Iterator[None]:
        """Opens a context for tracing a forward on shapes, without gathering parameters."""
        content = self.gatherer.without_content() if self.gatherer else nullcontext()
        replay = self.program.replay.tracing() if self.program.replay is not None else nullcontext()
        with self.running(), self.counting(None), content, replay:
            yield
