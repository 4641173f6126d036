"""Step parts for state of this rank: replicated gradients and weights, averages, residuals, buffers.

Buffers that a forward writes (running statistics, counters) are rolled back after skipped steps.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn

from engine.errors import EngineError
from engine.parallel.pipeline.runtime.encoded_messages import MessageEncoder
from engine.program.batch import Batch
from engine.program.expert_load import ExpertCounter
from engine.program.router_replay import RouterReplay
from engine.step.parts import PartOrder, StepPart
from engine.step.state import StepState, StepTotals
from engine.zero.gather.gatherer import ParameterGatherer
from engine.zero.offload.delayed_update import DelayedUpdate
from engine.zero.offload.disk_moments import DiskMoments
from engine.zero.offload.offloaded_states import PARAMETERS, OffloadedStates
from engine.zero.optim.averaged_weights import AveragedWeights
from engine.zero.optim.sharded_optimizer import ShardedOptimizer
from engine.zero.reduce.reducer import Reducer
from engine.zero.reduce.replica_check import ReplicaCheck
from engine.zero.reduce.weight_copies import WeightCopies


class DelayedUpdates(StepPart):
    """Hooks around a training step that finish an optimizer update overlapped with it (``offload_optimizer``)."""

    order = PartOrder.DELAYED_UPDATE

    def __init__(self, delayed: DelayedUpdate, optimizer: ShardedOptimizer, gatherer: ParameterGatherer | None) -> None:
        self._delayed, self._optimizer, self._gatherer = delayed, optimizer, gatherer

    @property
    def pending(self) -> bool:
        """True while updated weights are still on the host, not yet copied to the device."""
        return self._delayed.pending

    def problem(self) -> EngineError | None:
        """Waits for the overlapped update; returns its error, or None."""
        return self._delayed.problem()

    def before_update(self, step: StepState) -> BaseException | None:
        """Waits for the overlapped update; returns ``step.problem`` (the error of the step), or else the error of that
        update.
        """
        late = self.problem()
        return step.problem or late

    def agreed(self, step: StepState, totals: StepTotals[float]) -> None:
        """Copies the updated weights to the device, because the next update builds on them."""
        self.bring()

    def bring(self) -> None:
        """Finishes the overlapped update and copies its weights to the device. Collective over dp."""
        if self._delayed.finish() and self._gatherer is not None:
            self._gatherer.forget()

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Opens a context for reads or writes of weights, after a wait for the overlapped update. Its weights may stay
        on the host.
        """
        self._delayed.join()
        yield

    def saving(self) -> AbstractContextManager[None]:
        """Returns a context for a save, which first waits for the overlapped update."""
        return self.changing()

    def close(self) -> None:
        """Waits for the overlapped update, and copies its weights to the device without communication."""
        self._optimizer.end_delayed()


class BackgroundReads(StepPart):
    """Hooks around a training step that let a background thread read weights, until the next update or change of
    them.
    """

    order = PartOrder.BACKGROUND_READS

    def __init__(self) -> None:
        self._reading: Future[None] | None = None
        self._pool = ThreadPoolExecutor(1, "weight-reads")

    def start(self, read: Callable[[], None]) -> None:
        """Starts ``read`` in a thread; the caller has joined every earlier read."""
        self._reading = self._pool.submit(read)

    def wait(self) -> None:
        """Waits until the running read ends, if there is one; may be called from any thread."""
        if (reading := self._reading) is not None:
            wait([reading])

    def join(self) -> None:
        """Waits until the running read ends, if there is one, and raises its error."""
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.result()

    def before_update(self, step: StepState) -> BaseException | None:
        """Waits until the running read ends, before the update; returns its error, or else ``step.problem``, the error
        of the step.
        """
        reading, self._reading = self._reading, None
        return (reading.exception() if reading is not None else None) or step.problem

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Opens a context for changes of weights, after the end of the running read."""
        self.join()
        yield

    def close(self) -> None:
        """Waits until the running read ends, and stops the thread."""
        self._pool.shutdown()


class MomentsOnDisk(StepPart):
    """Hooks for optimizer moments on a disk: they refuse saves after the disk has lost some, and close its files at the
    end.
    """

    order = PartOrder.DISK

    def __init__(self, disk: DiskMoments) -> None:
        self._disk = disk

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Opens a context for a save; raises if the disk has lost optimizer moments."""
        self._disk.refuse_failed()
        yield

    def close(self) -> None:
        """Closes the files of the optimizer moments."""
        self._disk.close()


class StatesOnHost(StepPart):
    """Hooks for state that ``offload_states`` moves to host memory between two phases of a run.

    Args:
        states: the offloaded state.
    """

    order = PartOrder.OFFLOADED

    def __init__(self, states: OffloadedStates) -> None:
        self.states = states

    @property
    def hides(self) -> bool:
        """True if weights or optimizer state are in host memory, so that later step parts must not read them."""
        return bool(self.states.kinds)

    def changing(self) -> AbstractContextManager[None]:
        """Returns a context in which ``offload_states`` raises, because the block reads or writes the state."""
        return self.states.held()

    def saving(self) -> AbstractContextManager[None]:
        """Returns an empty context; a save reads offloaded state from host memory."""
        return nullcontext()

    def close(self) -> None:
        """Moves offloaded parameters back to the device for the user's model."""
        self.states.reload({PARAMETERS})


class CountedExperts(StepPart):
    """Hooks around a training step that count the tokens routed to each expert."""

    order = PartOrder.EXPERTS

    def __init__(self, counter: ExpertCounter) -> None:
        self._counter = counter

    def counts(self) -> Tensor:
        """Returns a tensor of zeros with one element for each expert of each layer, in which forwards count routed
        tokens.
        """
        return self._counter.zeros()

    def forward(self, counts: Tensor | None) -> AbstractContextManager[None]:
        """Returns a context in which a forward adds its routed tokens to ``counts``."""
        return self._counter.counting(counts)


class BalancedRouters(StepPart):
    """Hooks that balance experts after each update. They add ``rate`` to the router bias of an expert with less than
    the mean load, and subtract ``rate`` above the mean.

    The load is summed over the whole step and all ranks; each token counts once, also under recomputation.

    Args:
        biases: the bias buffers [experts], each with the index of its first expert in the counts.
    """

    order = PartOrder.ROUTERS

    def __init__(self, biases: Sequence[tuple[Tensor, int]], rate: float) -> None:
        self._biases, self._rate = biases, rate
        self._load: tuple[float, ...] = ()

    def agreed(self, step: StepState, totals: StepTotals[float]) -> None:
        """Stores the number of tokens routed to each expert in this step, from ``totals``."""
        self._load = totals.experts

    @torch.no_grad()
    def after_update(self) -> None:
        """Adds ``rate`` to the router biases of experts below the mean load, and subtracts it above the mean."""
        for bias, start in self._biases:
            load = torch.tensor(self._load[start : start + len(bias)], dtype=torch.float64)
            bias.add_((load.mean() - load).sign().to(bias), alpha=self._rate)


class ReplayedRouters(StepPart):
    """Hooks for router replay, by which routers read recorded choices of experts from the batch instead of choosing.

    Args:
        replay: recorded choices of the running microbatches.
    """

    order = PartOrder.REPLAY

    def __init__(self, replay: RouterReplay) -> None:
        self.replay = replay

    def taken(self, microbatches: Sequence[Batch]) -> None:
        """Raises if the recorded choices of a microbatch do not fit the model."""
        for microbatch in microbatches:
            self.replay.check(microbatch)

    def begin_step(self) -> None:
        """Drops the expert choices of forwards that had no backward."""
        self.replay.end_backward()

    def begin_backward(self, microbatch: Batch) -> None:
        """Selects the expert choices of ``microbatch``, because its backward may recompute blocks with routers."""
        self.replay.begin_backward(microbatch)

    def end_backward(self) -> None:
        """Drops the expert choices of the microbatches after a backward."""
        self.replay.end_backward()


class EqualGradients(StepPart):
    """Hooks that compare, in the first step, gradients that must be equal on all tensor ranks."""

    order = PartOrder.REPLICAS

    def __init__(self, check: ReplicaCheck) -> None:
        self._check = check

    def before_update(self, step: StepState) -> BaseException | None:
        """Compares the gradients; returns an error if they differ, or else ``step.problem``, the error of the step.

        Collective over tp, also after a failed step.
        """
        found = self._check.run(step.sent) if self._check.places else None
        return found or step.problem


_OFTEN = 64
"""Steps between two comparisons of weights; the first comparisons follow steps 1, 2, 4 and so on."""


class EqualWeights(StepPart):
    """Hooks that compare replicated weights in some steps, by a digest that travels with the all-reduced step
    totals.
    """

    order = PartOrder.COPIES

    def __init__(self, copies: WeightCopies, optimizer: ShardedOptimizer) -> None:
        self._copies, self._optimizer, self._steps = copies, optimizer, 0

    def before_update(self, step: StepState) -> BaseException | None:
        """Computes the digest of this rank's replicated weights if this step compares them.

        Returns ``step.problem``, the error of the step, or None.
        """
        self._steps += 1
        due = self._steps > 2 and (not self._steps % _OFTEN or not self._steps & (self._steps - 1))
        step.copies = self._copies.digest() if due and self._optimizer.delayed is None else None
        return step.problem

    def agreed(self, step: StepState, totals: StepTotals[float]) -> None:
        """Logs the name of a weight that differs between ranks, if the summed digests of ``totals`` show it."""
        if step.copies is not None:
            self._copies.compare(totals.digest_squared, step.sent)


class EncodingResiduals(StepPart):
    """Hooks that rescale error-feedback residuals of compressed gradients when the loss scale changes."""

    order = PartOrder.RESIDUALS

    def __init__(self, reducer: Reducer, encoder: MessageEncoder | None) -> None:
        self._reducer, self.encoder = reducer, encoder

    def scaled(self, factor: float) -> None:
        """Multiplies all error-feedback residuals by ``factor``."""
        sent = self.encoder.residuals if self.encoder is not None else ()
        for residual in (*self._reducer.residuals.values(), *sent):
            residual.mul_(factor)

    def after_skip(self) -> None:
        """Sets all residuals to 0, because a skipped step does not use its gradients."""
        self.scaled(0.0)

    def undo_step(self) -> None:
        """Sets all residuals to 0, because the step has failed."""
        self.scaled(0.0)


class AverageOfWeights(StepPart):
    """Hooks around a training step that update the moving average of the weights after each update.

    Args:
        weights: the average, with a switch that puts it into the model.
    """

    order = PartOrder.AVERAGE

    def __init__(self, weights: AveragedWeights) -> None:
        self.weights = weights

    def after_update(self) -> None:
        """Adds the new weights to the average."""
        if self.weights.moving is not None:
            self.weights.moving.update()


class _Seen(NamedTuple):
    """Buffer as it was before a step."""

    module: nn.Module
    leaf: str
    buffer: Tensor
    version: int
    copy: Tensor | None

    def written(self) -> bool:
        """Returns True if the buffer is another tensor now, or has other content.

        The version alone is not enough: torch's batch normalisation writes its running mean without counting it.
        """
        now = self.module._buffers.get(self.leaf)
        if now is not self.buffer or now._version != self.version:
            return True
        return self.copy is not None and not torch.equal(self.copy, now)


class WrittenBuffers(StepPart):
    """Hooks that copy module buffers before a step, and restore them if the step makes no update.

    The first step in each combination of train and eval modes copies all buffers, to find the ones that forwards write.
    Later steps copy only these, and new buffers. A buffer that the model registers during a step is not removed.
    """

    order = PartOrder.BUFFERS

    def __init__(self, model: nn.Module) -> None:
        self._named = tuple(model.named_modules())
        self._modules = tuple(module for _, module in self._named)
        self._compared: dict[tuple[bool, ...], set[tuple[int, str]]] = {}
        """The buffers that a step in these modes has copied and compared."""
        self._written: set[tuple[int, str]] = set()
        self._seen: list[_Seen] = []

    @torch.no_grad()
    def begin_step(self) -> None:
        """Copies the buffers before the first forward of a training step."""
        self._seen = []
        holders = [module for module in self._modules if module._buffers]
        compared = self._compared.get(self._mode(), set()) if holders else set()
        for module in holders:
            for leaf, buffer in module._buffers.items():
                if buffer is not None:
                    wanted = (key := (id(module), leaf)) in self._written or key not in compared
                    self._seen.append(_Seen(module, leaf, buffer, buffer._version, buffer.clone() if wanted else None))

    @torch.no_grad()
    def undo_step(self) -> None:
        """Restores the buffers that forwards of the step have written."""
        seen = list(self._seen)
        self.after_update()
        for each in seen:
            if each.copy is not None and (id(each.module), each.leaf) in self._written:
                each.buffer.copy_(each.copy)
                each.module._buffers[each.leaf] = each.buffer

    def after_skip(self) -> None:
        """Restores the buffers that forwards of the step have written."""
        self.undo_step()

    def after_update(self) -> None:
        """Drops the copies, and records which buffers the step has written."""
        for seen in self._seen:
            key = id(seen.module), seen.leaf
            if key not in self._written and seen.written():
                self._written.add(key)
        if self._seen:
            self._compared.setdefault(self._mode(), set()).update((id(seen.module), seen.leaf) for seen in self._seen)
        self._seen = []

    def state(self) -> dict[str, Tensor]:
        """Returns every module buffer that steps have written on this rank, under the key ``buffer/NAME``."""
        return {
            _key(path, leaf): buffer.detach()
            for path, module in self._named
            for leaf, buffer in module._buffers.items()
            if buffer is not None and (id(module), leaf) in self._written
        }

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Restores module buffers from ``state``, tensors of a checkpoint by the keys ``buffer/NAME``.

        Works also if forwards have changed the shape or dtype of a buffer.
        """
        for path, module in self._named:
            for leaf, buffer in module._buffers.items():
                saved = state.get(_key(path, leaf))
                if buffer is not None and saved is not None:
                    if (buffer.shape, buffer.dtype) == (saved.shape, saved.dtype):
                        buffer.copy_(saved)
                    else:
                        module._buffers[leaf] = saved.to(buffer.device, copy=True)
                    self._written.add((id(module), leaf))

    def _mode(self) -> tuple[bool, ...]:
        return tuple(module.training for module in self._modules)


def _key(path: str, leaf: str) -> str:
    return f"buffer/{path}.{leaf}" if path else f"buffer/{leaf}"
