"""Hooks by which optional features act in a step: one object per feature, with methods for each phase.

    taken            the microbatches of a call are known, and ranks have not agreed on them
    begin_step       before the first forward of a training step
    counts           returns zeros to which forwards add
    forward          around each forward
    begin_backward   before the backward of a microbatch
    end_backward     after a backward
    before_update    gradients are reduced, and ranks have not agreed on the step
    agreed           all ranks have the totals of the step, and none has raised
    after_update     the optimizer has updated the weights         | one of these,
    after_skip       there is no update: the norm was not finite   | or undo_step
    undo_step        the step has failed
    end_step         the step is over, with an update or without

A phase calls the parts that override its method, in the order of :class:`PartOrder`; a feature that is off has no part.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from enum import IntEnum, auto
from typing import ClassVar, Protocol, TypeVar

from torch import Tensor

from engine.program.batch import Batch
from engine.step.state import StepState, StepTotals


class PartOrder(IntEnum):
    """Order in which the hooks of step parts (optional features of a step) are called: the first member first."""

    HELD = auto()
    """Part that copies weights for late backwards before any other part may change them."""
    DELAYED_UPDATE = auto()
    """Part that finishes an overlapped optimizer update before other parts read weights."""
    BACKGROUND_READS = auto()
    """Part that waits for threads that read weights before they change."""
    DISK = auto()
    """Part that refuses to save optimizer moments that a disk has lost."""
    OFFLOADED = auto()
    """Part that skips all later parts while weights and state are offloaded to host memory."""
    OUTER = auto()
    """Part that exchanges gradients or weights with other sites, before other parts read them."""
    INTEGRITY = auto()
    """Part that verifies that state did not change between two updates."""
    REPLICAS = auto()
    """Part that compares gradients that several tensor ranks compute."""
    COPIES = auto()
    """Part that compares weights that are replicated on several ranks."""
    BUFFERS = auto()
    """Part that restores module buffers after a step without update."""
    RESIDUALS = auto()
    """Part that rescales error-feedback residuals of compressed gradients."""
    AVERAGE = auto()
    """Part that updates the moving average of the weights."""
    EXPERTS = auto()
    """Part that counts the tokens routed to each expert."""
    ROUTERS = auto()
    """Part that adjusts router biases towards an even expert load."""
    REPLAY = auto()
    """Part that passes the recorded routing of a batch to routers."""


class Rerun(Protocol):
    """Interface of a comparison of two runs of one step, to detect silent data corruption."""

    def see(self, name: str, gradient: Tensor) -> None:
        """Receives this rank's unreduced ``gradient`` of parameter ``name`` in the current run."""

    def end(self, loss: Tensor) -> None:
        """Ends the current run; ``loss`` is the sum of this rank's losses in it."""


class StepPart:
    """Base class of a step part: an optional feature with hooks that run in each training step.

    A hook does nothing unless a subclass overrides it.
    """

    order: ClassVar[PartOrder]

    @property
    def hides(self) -> bool:
        """True if this part has moved weights or optimizer state away from the device.

        The hooks ``changing`` and ``saving`` of later parts are then skipped.
        """
        return False

    def taken(self, microbatches: Sequence[Batch]) -> None:
        """Raises if this feature refuses this rank's microbatches. No rank communicates."""

    def begin_step(self) -> None:
        """Runs before the first forward of a training step."""

    def counts(self) -> Tensor | None:
        """Returns zeros to which a step's forwards add counts, such as tokens of each expert; None for no counts."""
        return None

    def forward(self, counts: Tensor | None) -> AbstractContextManager[None]:
        """Returns a context to open around one forward. In the context, this part adds its counts, such as tokens of
        each expert, to ``counts``.

        ``counts`` is a tensor from :meth:`counts`; None outside of training steps.
        """
        return nullcontext()

    def begin_backward(self, microbatch: Batch) -> None:
        """Runs before the backward of a microbatch, and so before any recomputation of checkpointed activations."""

    def end_backward(self) -> None:
        """Runs after the backward of a microbatch."""

    def rerun(self) -> Rerun | None:
        """Returns a comparison if the next step has to run twice, else None. Runs before each step."""
        return None

    def refuse_own_loop(self) -> None:
        """Raises if this feature works only with ``train_batch``, not with a training loop of the user."""

    def before_update(self, step: StepState) -> BaseException | None:
        """Runs on every rank after the gradients of a step are reduced, also after a failed step.

        Returns the error with which the step ends: ``step.problem``, an error of this part, or None.
        """
        return step.problem

    def agreed(self, step: StepState, totals: StepTotals[float]) -> None:
        """Runs before ``after_update`` if no rank failed; ``totals``: the step's sums over all ranks. Collective."""

    def after_update(self) -> None:
        """Runs after the optimizer has updated the weights, or has started to on the host (``delayed_update``)."""

    def after_skip(self) -> None:
        """Runs after a step that was skipped because of a non-finite gradient."""

    def undo_step(self) -> None:
        """Reverts this part's changes of state after a step has failed."""

    def end_step(self, step: StepState, made: int, skipped: bool) -> None:
        """Runs at the end of every step without a failure; ``made`` is the number of updates so far. Collective."""

    def scaled(self, factor: float) -> None:
        """Multiplies loss-scaled state, such as error-feedback residuals, by ``factor`` (new scale / old scale).

        Runs when the loss scale changes.
        """

    def changing(self) -> AbstractContextManager[None]:
        """Returns a context around reads or writes of weights or optimizer state between steps, such as a load."""
        return nullcontext()

    def saving(self) -> AbstractContextManager[None]:
        """Returns a context that surrounds a checkpoint save. Collective."""
        return nullcontext()

    def restarted(self, made: int) -> None:
        """Resets this part after weights were loaded or built; ``made`` is the number of updates so far."""

    def state(self) -> Mapping[str, Tensor]:
        """Returns this part's tensors on this rank by name, for checkpoints.

        A load restores them at the same grid coordinates.
        """
        return {}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Restores this part from ``state``, tensors by name as :meth:`state` returns them."""

    def close(self) -> None:
        """Releases memory and files of this part when the engine closes."""


Part = TypeVar("Part", bound=StepPart)


class StepParts:
    """Step parts (optional features with hooks around a step) on this rank, in the order of :class:`PartOrder`."""

    def __init__(self, parts: Iterable[StepPart]) -> None:
        self._parts = sorted(parts, key=lambda part: part.order)
        self._having: dict[str, tuple[StepPart, ...]] = {}

    def add(self, part: StepPart) -> None:
        """Adds ``part``, a feature that the user has turned on during the run."""
        self._parts = sorted((*self._parts, part), key=lambda each: each.order)
        self._having.clear()

    def having(self, phase: Callable[..., object]) -> tuple[StepPart, ...]:
        """Returns the parts that override the method ``phase``, such as ``StepPart.agreed``, in the order of calls."""
        found = self._having.get(phase.__name__)
        if found is None:
            name = phase.__name__
            found = tuple(part for part in self._parts if getattr(type(part), name) is not phase)
            self._having[name] = found
        return found

    def find(self, kind: type[Part]) -> Part | None:
        """Returns the part of class ``kind``; None if that feature is off."""
        return next((part for part in self._parts if isinstance(part, kind)), None)

    def undo_step(self) -> None:
        """Calls ``undo_step`` of all parts after a step has failed."""
        for part in self.having(StepPart.undo_step):
            part.undo_step()

    @contextmanager
    def undoing_failures(self) -> Iterator[None]:
        """Opens a context that calls ``undo_step`` of all parts if its block raises."""
        try:
            yield
        except BaseException:
            self.undo_step()
            raise

    @contextmanager
    def entering(self, contexts: Callable[[StepPart], AbstractContextManager[None]]) -> Iterator[None]:
        """Opens the contexts of all parts; ``contexts`` is ``StepPart.changing`` or ``StepPart.saving``.

        Skips all parts after one with ``hides``, which has moved weights or optimizer state away from the device.
        """
        with ExitStack() as stack:
            for part in self.having(contexts):
                stack.enter_context(getattr(part, contexts.__name__)())
                if part.hides:
                    break
            yield
