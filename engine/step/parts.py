"""Features that take part in steps, each as one object with its actions around a step, its state and its end.

    taken            the microbatches of a call are known, and ranks have not agreed on them
    begin_step       before the first forward of a step that trains
    counts           makes the sums to which its forwards add
    forward          around each forward
    begin_backward   before the backward of a microbatch
    end_backward     after a backward
    before_update    gradients are reduced, and ranks have not agreed on the step
    agreed           all ranks know the totals of the step, and none has raised
    after_update     the optimizer has made the update             | one of these,
    after_skip       there is no update: the norm was not finite   | or undo_step
    undo_step        the step has failed
    end_step         the step is over, with an update or without

A phase calls the parts that have something to do in it, in the order of :class:`PartOrder`; a feature that is off is in
no list. ``engine.build.step_parts`` has the table that makes them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from enum import IntEnum, auto
from typing import ClassVar, Protocol, TypeVar

from torch import Tensor

from engine.program.batch import Batch
from engine.step.state import StepState, StepTotals


class PartOrder(IntEnum):
    """Order in which parts are called, the same in every phase."""

    DELAYED_UPDATE = auto()
    """Ends the update that overlaps with the step, before other parts read weights."""
    DISK = auto()
    """Refuses to save moments that a disk has lost."""
    OFFLOADED = auto()
    """Hides weights and state from the parts below while they wait in host memory."""
    INTEGRITY = auto()
    """Compares the state that the update reads with the state that the last one has left."""
    REPLICAS = auto()
    """Compares gradients that several ranks compute."""
    COPIES = auto()
    """Compares weights that several ranks hold."""
    BUFFERS = auto()
    """Restores buffers that the forwards of a step without update have written."""
    RESIDUALS = auto()
    """Scales the residuals of encoded gradients."""
    AVERAGE = auto()
    """Takes the weights of an update into their average."""
    EXPERTS = auto()
    """Counts the rows of experts."""
    ROUTERS = auto()
    """Moves the biases of routers towards an even load."""
    REPLAY = auto()
    """Gives routers the choices of a batch."""


class Rerun(Protocol):
    """Compares two runs of one step."""

    def see(self, name: str, gradient: Tensor) -> None:
        """Takes a gradient of the run."""

    def end(self, loss: Tensor) -> None:
        """Ends a run with this sum of losses."""


class StepPart:
    """Base of the features of a step; its methods do nothing."""

    order: ClassVar[PartOrder]

    @property
    def hides(self) -> bool:
        """True if weights or state are not on the device, so that later parts cannot read them."""
        return False

    def taken(self, microbatches: Sequence[Batch]) -> None:
        """Raises if this feature refuses this rank's microbatches. No rank communicates."""

    def begin_step(self) -> None:
        """Begins a step that trains."""

    def counts(self) -> Tensor | None:
        """Returns sums of 0 to which the forwards of a step that begins add; None: this part counts nothing."""
        return None

    def forward(self, counts: Tensor | None) -> AbstractContextManager[None]:
        """Returns the context of a forward that adds to ``counts``; None: it belongs to no training step."""
        return nullcontext()

    def begin_backward(self, microbatch: Batch) -> None:
        """Begins the backward of a microbatch, in which blocks may run again."""

    def end_backward(self) -> None:
        """Ends a backward."""

    def rerun(self) -> Rerun | None:
        """Returns the comparison of two runs of the step that begins; None: it runs once."""
        return None

    def refuse_own_loop(self) -> None:
        """Raises if this feature does not work in a loop of the user's own."""

    def before_update(self, step: StepState) -> BaseException | None:
        """Acts on reduced gradients and returns the step's problem. Every rank calls it, also for a failed step."""
        return step.problem

    def agreed(self, step: StepState, totals: StepTotals[float]) -> None:
        """Acts on the totals of all ranks. Collective."""

    def after_update(self) -> None:
        """Acts on updated weights; a delayed update may run on."""

    def after_skip(self) -> None:
        """Acts on a step without update."""

    def undo_step(self) -> None:
        """Undoes what a failed step has changed."""

    def end_step(self, step: StepState, made: int, skipped: bool) -> None:
        """Ends a step, after ``made`` updates. Collective."""

    def scaled(self, factor: float) -> None:
        """Multiplies state of this part by a change of the loss scale; factor 0: gradients of the step belong to no
        update."""

    def changing(self) -> AbstractContextManager[None]:
        """Returns the context of a call that reads or writes weights or optimizer state between steps."""
        return nullcontext()

    def saving(self) -> AbstractContextManager[None]:
        """Returns the context of a save. Collective."""
        return nullcontext()

    def restarted(self, made: int) -> None:
        """Begins anew with the weights that were computed or loaded, after ``made`` updates."""

    def state(self) -> Mapping[str, Tensor]:
        """Returns this rank's state by name, for checkpoints that resume at the same position of the grid."""
        return {}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Restores the state that ``state`` has returned."""

    def close(self) -> None:
        """Releases the memory and files of this part when the engine closes."""


Part = TypeVar("Part", bound=StepPart)


class StepParts:
    """Parts of one engine on this rank, in their order."""

    def __init__(self, parts: Iterable[StepPart]) -> None:
        self._parts = sorted(parts, key=lambda part: part.order)
        self._having: dict[str, tuple[StepPart, ...]] = {}

    def having(self, phase: Callable[..., object]) -> tuple[StepPart, ...]:
        """Returns the parts that override a phase, such as ``StepPart.agreed``."""
        found = self._having.get(phase.__name__)
        if found is None:
            name = phase.__name__
            found = tuple(part for part in self._parts if getattr(type(part), name) is not phase)
            self._having[name] = found
        return found

    def find(self, kind: type[Part]) -> Part | None:
        """Returns the part of this kind; None: the feature is off."""
        return next((part for part in self._parts if isinstance(part, kind)), None)

    def undo_step(self) -> None:
        """Undoes what a failed step has changed."""
        for part in self.having(StepPart.undo_step):
            part.undo_step()

    @contextmanager
    def undoing_failures(self) -> Iterator[None]:
        """Undoes the step if the end of it raises inside this context."""
        try:
            yield
        except BaseException:
            self.undo_step()
            raise

    @contextmanager
    def entering(self, contexts: Callable[[StepPart], AbstractContextManager[None]]) -> Iterator[None]:
        """Enters the contexts of all parts: ``StepPart.changing`` or ``StepPart.saving``."""
        with ExitStack() as stack:
            for part in self.having(contexts):
                stack.enter_context(getattr(part, contexts.__name__)())
                if part.hides:
                    break
            yield
