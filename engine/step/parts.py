"""Features that take part in steps, each as one object: what it does around a step, its state, its end.

    begin_step       before the first forward of a step that trains
    counts           makes the sums to which its forwards add
    forward          around each forward
    before_update    gradients are reduced, and ranks have not agreed on the step
    agreed           all ranks know the totals of the step, and none has raised
    after_update     the optimizer has made the update             | one of these,
    after_skip       there is no update: the norm was not finite   | or undo_step
    undo_step        the step has failed
    end_step         the step is over, with an update or without

A phase calls the parts that have something to do in it, in the order of :class:`PartOrder`; a feature that is off is in
no list. ``engine.build.step_parts`` has the table that makes them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from enum import IntEnum, auto
from typing import ClassVar, Protocol, TypeVar

from torch import Tensor

from engine.step.state import StepState, StepTotals


class PartOrder(IntEnum):
    """The order in which parts are called, the same in every phase."""

    DELAYED_UPDATE = auto()
    """Ends the update that runs beside the step, before others read weights."""
    DISK = auto()
    """Refuses to save moments that a disk has lost."""
    OFFLOADED = auto()
    """Hides weights and state from the parts below while they wait in host memory."""
    INTEGRITY = auto()
    """Compares what the update reads with what the last one has left."""
    REPLICAS = auto()
    """Compares gradients that several ranks compute."""
    COPIES = auto()
    """Compares weights that several ranks hold."""
    BUFFERS = auto()
    """Puts back what the forwards of a step without update have written."""
    RESIDUALS = auto()
    """Scales what encodings have left out of gradients."""
    AVERAGE = auto()
    """Takes the weights of an update into their average."""
    EXPERTS = auto()
    """Counts the rows of experts."""
    ROUTERS = auto()
    """Moves the biases of routers towards an even load."""


class Rerun(Protocol):
    """Compares two runs of one step."""

    def see(self, name: str, gradient: Tensor) -> None:
        """Take a gradient of the run."""

    def end(self, loss: Tensor) -> None:
        """End a run, whose sum of losses this is."""


class StepPart:
    """Base of the features of a step; its methods do nothing."""

    order: ClassVar[PartOrder]

    @property
    def hides(self) -> bool:
        """Weights and state are where the parts after this one cannot read them."""
        return False

    def begin_step(self) -> None:
        """Begin a step that trains."""

    def counts(self) -> Tensor | None:
        """Return the sums, 0 so far, to which the forwards of a step that begins add; None: none."""
        return None

    def forward(self, counts: Tensor | None) -> AbstractContextManager[None]:
        """Context of a forward that adds to ``counts``; None: it belongs to no step that trains."""
        return nullcontext()

    def rerun(self) -> Rerun | None:
        """Return what compares two runs of the step that begins; None: it runs once."""
        return None

    def refuse_own_loop(self) -> None:
        """Raise if a loop of the user's own cannot have this feature."""

    def before_update(self, step: StepState) -> BaseException | None:
        """Act on reduced gradients; return the step's problem. Every rank calls it, also for a failed step."""
        return step.problem

    def agreed(self, step: StepState, totals: StepTotals[float]) -> None:
        """Act on the totals of all ranks. Collective."""

    def after_update(self) -> None:
        """Act on updated weights; a delayed update may run still."""

    def after_skip(self) -> None:
        """Act on a step without update."""

    def undo_step(self) -> None:
        """Undo what a failed step has changed."""

    def end_step(self, step: StepState, made: int, skipped: bool) -> None:
        """End a step, after which ``made`` updates are made. Collective."""

    def scaled(self, factor: float) -> None:
        """Take part in a change of the loss scale by ``factor``; 0: gradients of the step belong to no update."""

    def changing(self) -> AbstractContextManager[None]:
        """Context of a call that reads or writes weights or optimizer state between steps."""
        return nullcontext()

    def saving(self) -> AbstractContextManager[None]:
        """Context of a save. Collective."""
        return nullcontext()

    def restarted(self, made: int) -> None:
        """Begin anew with the weights that were made or loaded, after ``made`` updates."""

    def state(self) -> Mapping[str, Tensor]:
        """This rank's state by name, for checkpoints that go on at the same place of the grid."""
        return {}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take the state of ``state`` back."""

    def close(self) -> None:
        """Release what the part holds; the engine is closed."""


Part = TypeVar("Part", bound=StepPart)


class StepParts:
    """The parts of one engine on this rank, in their order."""

    def __init__(self, parts: Iterable[StepPart]) -> None:
        self._parts = sorted(parts, key=lambda part: part.order)
        self._having: dict[str, tuple[StepPart, ...]] = {}

    def having(self, phase: Callable[..., object]) -> tuple[StepPart, ...]:
        """The parts that have something to do in a phase, such as ``StepPart.agreed``."""
        found = self._having.get(phase.__name__)
        if found is None:
            name = phase.__name__
            found = tuple(part for part in self._parts if getattr(type(part), name) is not phase)
            self._having[name] = found
        return found

    def find(self, kind: type[Part]) -> Part | None:
        """The part of this kind; None: the feature is off."""
        return next((part for part in self._parts if isinstance(part, kind)), None)

    def undo_step(self) -> None:
        """Undo what a failed step has changed."""
        for part in self.having(StepPart.undo_step):
            part.undo_step()

    @contextmanager
    def undoing_failures(self) -> Iterator[None]:
        """Context of the end of a step, which is undone if it raises."""
        try:
            yield
        except BaseException:
            self.undo_step()
            raise

    @contextmanager
    def entering(self, contexts: Callable[[StepPart], AbstractContextManager[None]]) -> Iterator[None]:
        """Context of all parts' contexts: of ``StepPart.changing`` or ``StepPart.saving``."""
        with ExitStack() as stack:
            for part in self.having(contexts):
                stack.enter_context(getattr(part, contexts.__name__)())
                if part.hides:
                    break
            yield
