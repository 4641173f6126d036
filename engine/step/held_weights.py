"""Weights of earlier updates for late backwards: a forward, then updates, then the backward of that forward.

hold        eng.hold_weights() after the forward
update      while a hold of the present weights is alive, they are copied first: one copy, however many holds
backward    inside ``restored`` the model has the weights of the hold again, and afterwards the newest ones

Contents are exchanged, never addresses: saved views, saved parameters and recomputed blocks all read the same memory.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from engine.step.parts import PartOrder, StepPart
from engine.step.pipeline_call import PipelineCalls, stale_forward
from engine.step.state import StepState
from engine.zero.flat_buckets import FlatBucket
from engine.zero.gather.gatherer import ParameterGatherer

_AT_ONCE = 1 << 22
"""Elements that are exchanged at a time, so that no second copy of the weights exists."""


class CountsUpdates(Protocol):
    """Interface of an object that counts weight updates, such as :class:`StepRunner`."""

    @property
    def made(self) -> int:
        """Number of weight updates so far."""


class _Date(NamedTuple):
    """Place of a forward among the updates."""

    made: int
    """Updates before it."""
    calls: int
    """Times that earlier calls of a pipeline became stale before it."""


class ForwardDates:
    """Guard that makes a backward raise if weights were updated after its forward.

    Args:
        updates: object that counts weight updates (``made``).
        calls: runner of the user's ``eng(batch)`` calls on a pipeline; None without a pipeline.
    """

    def __init__(self, updates: CountsUpdates, calls: PipelineCalls | None) -> None:
        self._updates, self._calls = updates, calls
        self._given: _Date | None = None
        """The date of the weights that the model has, if these are not the newest."""

    def note(self, output: Any) -> None:
        """Adds hooks to the forward's ``output``: a later backward raises if weights were updated since this call."""
        made = self._made

        def check(_: Tensor) -> None:
            if self._made != made:
                raise stale_forward()

        for leaf in pytree.tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                with torch._C.DisableTorchFunctionSubclass():
                    leaf.register_hook(check)  # type: ignore[no-untyped-call]

    def expire(self) -> None:
        """Makes backwards of earlier ``eng(batch)`` calls raise, if the engine has a pipeline; else does nothing."""
        if self._calls is not None:
            self._calls.updates += 1

    @property
    def now(self) -> _Date:
        """Counts of weight updates and, on a pipeline, of ``expire`` calls so far, for :meth:`at`."""
        return _Date(self._made, self._calls.updates if self._calls is not None else 0)

    @contextmanager
    def at(self, date: _Date) -> Iterator[None]:
        """Opens a context that accepts only backwards of forwards that ran while ``now`` was ``date``.

        Other backwards raise.
        """
        newest, self._given = self.now, date
        try:
            if self._calls is not None:
                self._calls.updates = date.calls
            yield
        finally:
            self._given = None
            if self._calls is not None:
                self._calls.updates = newest.calls

    @property
    def _made(self) -> int:
        return self._updates.made if self._given is None else self._given.made


class HeldWeights:
    """Handle to one version of this rank's weights, for backwards after later updates.

    The copy of the weights is freed with the last reference to the handle.
    """

    def __init__(self, part: "WeightHolds", dates: ForwardDates) -> None:
        self._part, self._dates, self._date = part, dates, dates.now
        self.versions = part.versions()
        """Versions of the parameters, by which autograd knows the weights of a graph."""
        self.copies: tuple[Tensor, ...] | None = None
        """Weights of each bucket; None: the model has these weights."""

    @property
    def bytes(self) -> int:
        """Bytes of this version's copy on this rank; 0 until the first update makes the copy."""
        return sum(copy.nbytes for copy in self.copies or ())

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Opens a context in which the model has this version of the weights, for backwards of earlier forwards.

        Gradients add to the accumulated ones; the next update applies them to the newest weights. No forward may run
        inside. Every rank enters and leaves the context.
        """
        with self._dates.at(self._date), self._part.restored(self):
            yield


class WeightHolds(StepPart):
    """Step hooks that copy the weights before a change if a :class:`HeldWeights` refers to them."""

    order = PartOrder.HELD

    def __init__(self, buckets: Sequence[FlatBucket], gatherer: ParameterGatherer | None) -> None:
        self._buckets, self._gatherer = buckets, gatherer
        self._present: WeakSet[HeldWeights] = WeakSet()
        """Holds of the weights that the model has."""

    def hold(self, dates: ForwardDates) -> HeldWeights:
        """Returns a handle to the present weights; all calls before the next update return the same handle.

        The next update copies the weights first if the handle still exists. ``dates``: this rank's guard against
        backwards of outdated forwards.
        """
        now = self.versions()
        for known in self._present:
            if known.versions == now:
                return known
        made = HeldWeights(self, dates)
        self._present.add(made)
        return made

    def versions(self) -> tuple[int, ...]:
        """Returns the autograd version counter of each trained parameter of this rank."""
        return tuple(parameter._version for parameter in self._parameters())

    def before_update(self, step: StepState) -> BaseException | None:
        """Copies the weights before the update if a handle refers to them; returns ``step.problem`` unchanged."""
        self._copy_held()
        return step.problem

    def changing(self) -> AbstractContextManager[None]:
        """Copies the weights now if a handle refers to them; the returned context itself does nothing."""
        self._copy_held()
        return nullcontext()

    @torch.no_grad()
    def _copy_held(self) -> None:
        held, self._present = list(self._present), WeakSet()
        if held:
            copies = tuple(_weights(flat).clone() for flat in self._buckets)
            for one in held:
                one.copies = copies

    @contextmanager
    def restored(self, held: HeldWeights) -> Iterator[None]:
        """Opens a context in which the model has the weights of the handle ``held``."""
        newest = self.versions()
        self._exchange(held, held.versions)
        try:
            yield
        finally:
            self._exchange(held, newest)

    @torch.no_grad()
    def _exchange(self, held: HeldWeights, versions: tuple[int, ...]) -> None:
        if self._gatherer is not None and held.copies is not None:
            self._gatherer.end()  # what a pass has left gathered has the other weights
        for flat, copy in zip(self._buckets, held.copies or (), strict=False):
            for here, there in zip(torch.split(_weights(flat), _AT_ONCE), torch.split(copy, _AT_ONCE), strict=True):
                before = here.clone()
                here.copy_(there)
                there.copy_(before)
        torch.clear_autocast_cache()
        torch._C._autograd._unsafe_set_version_counter(tuple(self._parameters()), versions)

    def _parameters(self) -> Iterator[Tensor]:
        return (parameter for flat in self._buckets for parameter in flat.parameters)


def _weights(flat: FlatBucket) -> Tensor:
    """Returns the weights that this rank stores, outside autograd."""
    return (flat.kept if flat.sharded else flat.params).data
