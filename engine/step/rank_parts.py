"""Parts of a step that act on what this rank holds: gradients and weights of several ranks, averages, residuals."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from engine.errors import EngineError
from engine.parallel.pipeline.runtime.encoded_messages import MessageEncoder
from engine.program.expert_load import ExpertCounter
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
    """Brings the update that has run beside a step."""

    order = PartOrder.DELAYED_UPDATE

    def __init__(self, delayed: DelayedUpdate, optimizer: ShardedOptimizer, gatherer: ParameterGatherer | None) -> None:
        self._delayed, self._optimizer, self._gatherer = delayed, optimizer, gatherer

    @property
    def pending(self) -> bool:
        """Whether there is an update whose weights are not brought."""
        return self._delayed.pending

    def problem(self) -> EngineError | None:
        """Wait for the update; return why it cannot be brought."""
        return self._delayed.problem()

    def before_update(self, step: StepState) -> BaseException | None:
        """Wait for the update; return the problem of the step."""
        late = self.problem()
        return step.problem or late

    def agreed(self, step: StepState, totals: StepTotals[float]) -> None:
        """Bring the weights, on which the next update builds."""
        self.bring()

    def bring(self) -> None:
        """Finish the update, and bring its weights to the device. Collective over the data ranks."""
        if self._delayed.finish() and self._gatherer is not None:
            self._gatherer.forget()

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Wait for the update, whose weights may still wait to be brought."""
        self._delayed.join()
        yield

    def saving(self) -> AbstractContextManager[None]:
        """Wait for the update."""
        return self.changing()

    def close(self) -> None:
        """Wait for the update, and bring its weights as far as that takes no other rank."""
        self._optimizer.end_delayed()


class MomentsOnDisk(StepPart):
    """Keeps moments on disk, which may fail."""

    order = PartOrder.DISK

    def __init__(self, disk: DiskMoments) -> None:
        self._disk = disk

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Refuse to save moments that a disk has lost."""
        self._disk.refuse_failed()
        yield

    def close(self) -> None:
        """Close the files."""
        self._disk.close()


class StatesOnHost(StepPart):
    """Moves state to host memory between two phases of a run.

    Args:
        states: what waits there.
    """

    order = PartOrder.OFFLOADED

    def __init__(self, states: OffloadedStates) -> None:
        self.states = states

    @property
    def hides(self) -> bool:
        """Some of it waits there."""
        return bool(self.states.kinds)

    def changing(self) -> AbstractContextManager[None]:
        """Keep state where it is while a call refers to it."""
        return self.states.held()

    def saving(self) -> AbstractContextManager[None]:
        """Hide from a save what waits."""
        return nullcontext()

    def close(self) -> None:
        """Bring parameters back, which the user's model keeps."""
        self.states.reload({PARAMETERS})


class CountedExperts(StepPart):
    """Counts the rows of experts.

    Args:
        counter: counts them in the forwards of a step.
    """

    order = PartOrder.EXPERTS

    def __init__(self, counter: ExpertCounter) -> None:
        self.counter = counter


class EqualGradients(StepPart):
    """Compares, in the first step, the gradients that all tensor ranks should compute alike."""

    order = PartOrder.REPLICAS

    def __init__(self, check: ReplicaCheck) -> None:
        self._check = check

    def before_update(self, step: StepState) -> BaseException | None:
        """Return the error found; every rank of a stage takes part, also one whose step has failed."""
        found = self._check.run(step.sent) if self._check.places else None
        return found or step.problem


_OFTEN = 64
"""Steps between two comparisons of weights, once a run goes on; before, those whose number is a power of two."""


class EqualWeights(StepPart):
    """Compares, in some steps, the weights that several ranks hold; the digest travels in the control sum."""

    order = PartOrder.COPIES

    def __init__(self, copies: WeightCopies, optimizer: ShardedOptimizer) -> None:
        self._copies, self._optimizer, self._steps = copies, optimizer, 0

    def before_update(self, step: StepState) -> BaseException | None:
        """Take the digest if one is due; a delayed update may write its weights meanwhile."""
        self._steps += 1
        due = self._steps > 2 and (not self._steps % _OFTEN or not self._steps & (self._steps - 1))
        step.copies = self._copies.digest() if due and self._optimizer.delayed is None else None
        return step.problem

    def agreed(self, step: StepState, totals: StepTotals[float]) -> None:
        """Name the weight that differs, if one does."""
        if step.copies is not None:
            self._copies.compare(totals.digest_squared, step.sent)


class EncodingResiduals(StepPart):
    """Keeps what encodings have left out of gradients in the scale of the next step."""

    order = PartOrder.RESIDUALS

    def __init__(self, reducer: Reducer, encoder: MessageEncoder | None) -> None:
        self._reducer, self.encoder = reducer, encoder

    def scaled(self, factor: float) -> None:
        """Scale the residuals."""
        sent = self.encoder.residuals if self.encoder is not None else ()
        for residual in (*self._reducer.residuals.values(), *sent):
            residual.mul_(factor)

    def after_skip(self) -> None:
        """Forget residuals of gradients that belong to no update."""
        self.scaled(0.0)

    def undo_step(self) -> None:
        """Forget residuals of gradients that belong to no update."""
        self.scaled(0.0)


class AverageOfWeights(StepPart):
    """Takes the weights of each update into their moving average.

    Args:
        weights: exchanges the weights for their average and back.
    """

    order = PartOrder.AVERAGE

    def __init__(self, weights: AveragedWeights) -> None:
        self.weights = weights

    def after_update(self) -> None:
        """Take the new weights in."""
        if self.weights.moving is not None:
            self.weights.moving.update()
