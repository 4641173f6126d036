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
from engine.parallel.model.side_effects import overwrite
from engine.parallel.pipeline.runtime.encoded_messages import MessageEncoder
from engine.program.batch import Batch
from engine.program.expert_load import ExpertCounter
from engine.program.router_replay import RouterReplay
from engine.step.parts import PartOrder, StepPart
from engine.step.state import StepState, StepTotals
from engine.zero.gather.gatherer import ParameterGatherer
from engine.zero.offload.delayed_update import DelayedUpdate
from engine.zero.offload.disk_moments import DiskMoments
from engine.zero.optim.averaged_weights import AveragedWeights
from engine.zero.optim.sharded_optimizer import ShardedOptimizer
from engine.zero.reduce.reducer import Reducer
from engine.zero.reduce.replica_check import ReplicaCheck
from engine.zero.reduce.weight_copies import WeightCopies
from engine.zero.state.offloaded_states import PARAMETERS, OffloadedStates


class DelayedUpdates(StepPart):
    """Step hooks that complete an optimizer update on the host during the next step.

    ``offload_optimizer.delayed_update`` turns them on.
    """

    order = PartOrder.DELAYED_UPDATE

    def __init__(self, delayed: DelayedUpdate, optimizer: ShardedOptimizer, gatherer: ParameterGatherer | None) -> None:
        self._delayed, self._optimizer, self._gatherer = delayed, optimizer, gatherer

    @property
    def pending(self) -> bool:
        """True while updated weights are still on the host, not yet copied to the device."""
        return self._delayed.pending

    def problem(self) -> EngineError | None:
        """Waits for the optimizer update that runs on the host; returns its error, or None."""
        return self._delayed.problem()

    def before_update(self, step: StepState) -> BaseException | None:
        """Waits for the update that runs on the host; returns ``step.problem``, else the update's error or None."""
        late = self.problem()
        return step.problem or late

    def agreed(self, step: StepState, totals: StepTotals[float]) -> None:
        """Finishes the update that still runs on the host, if any, and copies its weights to the device."""
        self.bring()

    def bring(self) -> None:
        """Finishes the update that runs on the host, and copies its weights to the device. Collective over dp."""
        if self._delayed.finish() and self._gatherer is not None:
            self._gatherer.forget()

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Waits for an update that runs on the host; opens a context for reads or writes of weights.

        It does not copy the updated weights to the device; call :meth:`bring` before reading them there.
        """
        self._delayed.join()
        yield

    def saving(self) -> AbstractContextManager[None]:
        """Returns a context for a checkpoint save, which first waits for an update that runs on the host."""
        return self.changing()

    def close(self) -> None:
        """Waits for an update that runs on the host, and copies its weights to the device without communication."""
        self._optimizer.end_delayed()


class BackgroundReads(StepPart):
    """Step hooks that let a thread read weights during training; changes of the weights wait for the read."""

    order = PartOrder.BACKGROUND_READS

    def __init__(self) -> None:
        self.changed = False
        """True if frozen weights may have changed since the last published version, which sets it to False."""
        self._reading: Future[None] | None = None
        self._pool = ThreadPoolExecutor(1, "weight-reads")

    def start(self, read: Callable[[], None]) -> None:
        """Starts the callback ``read`` in a background thread; first call :meth:`join` to wait for an earlier read."""
        self._reading = self._pool.submit(read)

    def wait(self) -> None:
        """Waits until the running read ends, if there is one; does not raise its error. Any thread may call it."""
        if (reading := self._reading) is not None:
            wait([reading])

    def join(self) -> None:
        """Waits until the running read ends, if there is one, and raises its error."""
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.result()

    def before_update(self, step: StepState) -> BaseException | None:
        """Waits until the running read ends; returns its error, ``step.problem``, or None."""
        reading, self._reading = self._reading, None
        return (reading.exception() if reading is not None else None) or step.problem

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Waits until the running background read ends, and raises its error. Weights may be changed in the context."""
        self.join()
        self.changed = True
        yield

    def close(self) -> None:
        """Waits until the running read ends, and stops the background thread."""
        self._pool.shutdown()


class MomentsOnDisk(StepPart):
    """Step hooks for optimizer moments on a disk; they refuse a save after a failed read or write of moments."""

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
    """Step hooks for state that ``offload_states`` moves to host memory between two phases of a run.

    Args:
        states: weights, gradients and optimizer state that can be moved.
    """

    order = PartOrder.OFFLOADED

    def __init__(self, states: OffloadedStates) -> None:
        self.states = states

    @property
    def hides(self) -> bool:
        """True if ``offload_states`` has moved weights, gradients or optimizer state to host memory."""
        return bool(self.states.kinds)

    def changing(self) -> AbstractContextManager[None]:
        """Returns a context for reads or writes of state; inside it, ``offload_states`` raises."""
        return self.states.held()

    def saving(self) -> AbstractContextManager[None]:
        """Returns an empty context; a save reads offloaded state from host memory."""
        return nullcontext()

    def close(self) -> None:
        """Moves parameters in host memory back to the device."""
        self.states.reload({PARAMETERS})


class CountedExperts(StepPart):
    """Step hooks that count the tokens routed to each expert."""

    order = PartOrder.EXPERTS

    def __init__(self, counter: ExpertCounter) -> None:
        self._counter = counter

    def counts(self) -> Tensor:
        """Returns zeros, one element for each expert of each layer, to which forwards add routed tokens."""
        return self._counter.zeros()

    def forward(self, counts: Tensor | None) -> AbstractContextManager[None]:
        """Returns a context in which a forward adds its token count of each expert to ``counts``, unless it is None."""
        return self._counter.counting(counts)


class BalancedRouters(StepPart):
    """Step hooks that balance expert loads by router biases.

    After each update they add ``rate`` to the biases of experts below the mean load, and subtract it from the biases of
    experts above. An expert's load is the number of tokens routed to it in the step, on all ranks.

    Args:
        biases: for each layer, the bias buffer [experts] and the number of experts in all earlier layers.
        rate: change of a bias per update (``router_bias_update_rate``).
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
    """Step hooks for router replay, in which routers use the expert choices recorded in the batch.

    Args:
        replay: object that makes the model's routers use the recorded choices.
    """

    order = PartOrder.REPLAY

    def __init__(self, replay: RouterReplay) -> None:
        self.replay = replay

    def taken(self, microbatches: Sequence[Batch]) -> None:
        """Raises EngineError if the experts recorded in a microbatch are for another number of layers, or invalid."""
        for microbatch in microbatches:
            self.replay.check(microbatch)

    def begin_step(self) -> None:
        """Drops the expert choices of forwards that had no backward."""
        self.replay.end_backward()

    def begin_backward(self, microbatch: Batch) -> None:
        """Selects the expert choices of ``microbatch`` for its backward, which may recompute routers."""
        self.replay.begin_backward(microbatch)

    def end_backward(self) -> None:
        """Ends the use of the expert choices that ``begin_backward`` selected."""
        self.replay.end_backward()


class EqualGradients(StepPart):
    """Step hooks that compare replicated gradients between tensor-parallel ranks in the first step."""

    order = PartOrder.REPLICAS

    def __init__(self, check: ReplicaCheck) -> None:
        self._check = check

    def before_update(self, step: StepState) -> BaseException | None:
        """Compares gradients over tp, also after a failed step.

        Returns an error if they differ, else ``step.problem``.
        """
        found = self._check.run(step.sent) if self._check.places else None
        return found or step.problem


_OFTEN = 64
"""Steps between two comparisons of weights; the first comparisons follow steps 1, 2, 4 and so on."""


class EqualWeights(StepPart):
    """Step hooks that compare hashes of replicated weights between ranks in steps 4, 8, 16, 32 and every 64th."""

    order = PartOrder.COPIES

    def __init__(self, copies: WeightCopies, optimizer: ShardedOptimizer) -> None:
        self._copies, self._optimizer, self._steps = copies, optimizer, 0

    def before_update(self, step: StepState) -> BaseException | None:
        """Computes the hash of this rank's replicated weights if this step compares them; returns ``step.problem``."""
        self._steps += 1
        due = self._steps > 2 and (not self._steps % _OFTEN or not self._steps & (self._steps - 1))
        step.copies = self._copies.digest() if due and self._optimizer.delayed is None else None
        return step.problem

    def agreed(self, step: StepState, totals: StepTotals[float]) -> None:
        """Logs the name of a weight that differs between ranks; does not raise.

        It looks for one only if the sum of all ranks' hashes in ``totals`` is not 0 modulo 2^31 - 1.
        """
        if step.copies is not None:
            self._copies.compare(totals.digest_squared, step.sent)


class EncodingResiduals(StepPart):
    """Step hooks that rescale error-feedback residuals of compressed gradients when the loss scale changes."""

    order = PartOrder.RESIDUALS

    def __init__(self, reducer: Reducer, encoder: MessageEncoder | None) -> None:
        self._reducer, self.encoder = reducer, encoder

    def scaled(self, factor: float) -> None:
        """Multiplies all error-feedback residuals by ``factor``."""
        sent = self.encoder.residuals if self.encoder is not None else ()
        for residual in (*self._reducer.residuals.values(), *sent):
            residual.mul_(factor)

    def after_skip(self) -> None:
        """Sets all error-feedback residuals to 0, because the skipped step's gradients are not used."""
        self.scaled(0.0)

    def undo_step(self) -> None:
        """Sets all error-feedback residuals to 0 after a failed step."""
        self.scaled(0.0)

    def restarted(self, made: int) -> None:
        """Sets the residuals of messages between stages to 0 after a load: they belong to steps that are undone."""
        for residual in self.encoder.residuals if self.encoder is not None else ():
            residual.zero_()


class AverageOfWeights(StepPart):
    """Step hooks that update the moving average of the weights after each update.

    Args:
        weights: object that switches the model between its training weights and their average.
    """

    order = PartOrder.AVERAGE

    def __init__(self, weights: AveragedWeights) -> None:
        self.weights = weights

    def after_update(self) -> None:
        """Updates the moving average of the weights with their new values."""
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
    """Step hooks that restore module buffers after a step without an update.

    Buffers that the model registers during a step remain.
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
        """Restores the buffers that forwards of the failed step have written."""
        seen = list(self._seen)
        self.after_update()
        for each in seen:
            if each.copy is not None and (id(each.module), each.leaf) in self._written:
                overwrite(each.buffer, each.copy)
                each.module._buffers[each.leaf] = each.buffer

    def after_skip(self) -> None:
        """Restores the buffers that forwards of the skipped step have written."""
        self.undo_step()

    def after_update(self) -> None:
        """Drops the copies of module buffers, and records which of them the step has written."""
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
        """Restores module buffers from ``state``, a checkpoint's tensors by the keys ``buffer/NAME``.

        A buffer is replaced if the saved tensor has another shape or dtype.
        """
        for path, module in self._named:
            for leaf, buffer in module._buffers.items():
                saved = state.get(_key(path, leaf))
                if buffer is not None and saved is not None:
                    if (buffer.shape, buffer.dtype) == (saved.shape, saved.dtype):
                        overwrite(buffer, saved)
                    else:
                        module._buffers[leaf] = saved.to(buffer.device, copy=True)
                    self._written.add((id(module), leaf))

    def _mode(self) -> tuple[bool, ...]:
        return tuple(module.training for module in self._modules)


def _key(path: str, leaf: str) -> str:
    return f"buffer/{path}.{leaf}" if path else f"buffer/{leaf}"
