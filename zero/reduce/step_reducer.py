"""Sums gradients in the flat buckets and reduces them over axis dp while the last backward runs.

    backward of the last microbatch   head      block 7     block 6   ...   embedding
    bucket 0 complete                      | reduce-scatter 0 ------>
    bucket 1 complete                                  | reduce-scatter 1 ------>
    finish                                                                  | the rest | wait

Collectives are issued in the order of the buckets on every rank, independent of the order of the hooks, so that they
match even on ranks with different backwards (an unused parameter, another branch).

Deferred buckets are reduced last, by ``finish``: gradients partial over tensor ranks are summed before their reduction,
gradients of parameters tied over pipeline ranks after it, on the shard.

A rank may have several stages, and a backward may be split in two parts (``pipeline/runtime/split_backward``): a bucket
is complete after the last of all backwards that contribute to it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from engine.errors import EngineError
from engine.kernels.dispatch import OpenSum
from engine.parallel.comm.comm import Pending
from engine.zero.flat_buckets import FlatBucket, slot_view
from engine.zero.layout import Slot
from engine.zero.reduce.reducer import Backward, Reducer, ReducerSetup
from engine.zero.reduce.replica_sums import ReplicaSum, summed_over_replicas


@dataclass(slots=True)
class _Place:
    """Destination of the gradient of one parameter."""

    name: str
    progress: "_Progress"
    view: Tensor
    touched: bool = False
    """True if ``view`` holds a gradient of this step; otherwise its content is stale."""
    arrived: bool = False
    """True if one of the last backwards of the step has delivered its gradient."""


@dataclass(slots=True)
class _Progress:
    """State of one bucket."""

    flat: FlatBucket
    late: bool
    """Its reduction is deferred until every gradient of the step has arrived."""
    places: list[_Place] = field(default_factory=list)
    missing: int = 0
    repeats: bool = False
    """True once a parameter gave two gradients in the last backwards (re-entrant checkpointing; parameters tied over
    stages of this rank). Which of them is the last is then unknown, and the bucket waits for ``finish``.
    """
    reduction: Pending | None = None
    received: Callable[[], object] | None = None
    sums: Tensor | None = None
    """Reduced sums of the backwards before a further one."""

    @property
    def slots(self) -> tuple[Slot, ...]:
        """Slots of the bucket."""
        return self.flat.bucket.slots


class GradientReducer(Reducer):
    """Gradient reducer for ZeRO 0 and 1. It accumulates the gradients of all microbatches in full buckets, then reduces
    each bucket once per step.

    Args:
        scatter: True: reduce-scatter to the shards (ZeRO 1); False: all-reduce (ZeRO 0).
    """

    def __init__(self, setup: ReducerSetup, scatter: bool) -> None:
        super().__init__(setup)
        self._scatter = scatter
        self._progress = [_Progress(flat, flat.bucket.late) for flat in setup.buckets]
        self._next = 0
        self._launched: ReplicaSum | None = None
        self._last = self._eager = False
        self._backward_seen = self._whole_step_seen = False
        self._places = {slot.name: _place(progress, slot) for progress in self._progress for slot in progress.slots}
        self.reset()

    @contextmanager
    def backward(self, which: Backward) -> Iterator[None]:
        """Returns a context that accumulates the gradients of the backward ``which``. The last backward of a step
        reduces each bucket once all its gradients have arrived; in the first step, :meth:`finish` reduces all buckets.

        Raises:
            EngineError: a gradient arrived after its bucket was reduced.
        """
        self._settle()
        if which.further:
            self._reopen()
        self._last = which.last
        # The first step only observes, because it is not yet known which parameters give several gradients.
        self._eager = which.last and self._whole_step_seen and not which.unequal
        try:
            with self._hooks.backward():
                yield
            self._backward_seen = self._backward_seen or which.last
        finally:
            self._last = self._eager = False

    def expect(self, backwards: int) -> None:
        """Does nothing, because this reduction does not depend on the number of backwards in a step."""

    def finish(self) -> None:
        """Reduces the remaining buckets, waits for all reductions, and prepares the next step.

        Afterwards ``grads`` of each bucket contains the sum over microbatches and data ranks: in this rank's shard at
        ZeRO 1, in the full bucket at ZeRO 0.
        """
        self._settle()
        self.unused = self.names - self._seen - self._kept_names
        self._reduce_all()
        for progress in self._progress:
            self._add_ties(progress.flat, self._part(progress.flat))
        self._add_kept()
        self._whole_step_seen = self._whole_step_seen or self._backward_seen
        self.reset()

    def land(self) -> None:
        """Waits for the reductions that have been started, without starting the remaining ones."""
        self._settle()
        for progress in self._progress:
            if progress.reduction is not None:
                progress.reduction.wait()

    def reset(self) -> None:
        """Discards the gradients of an unfinished step. It does not wait for running collectives; the next backward
        does.
        """
        self._seen.clear()
        self._forget()
        self._empty()

    def _empty(self) -> None:
        """Marks the next gradient of each parameter as the first one; ``reset`` without the names that had one."""
        self._next, self._launched = 0, None
        for progress in self._progress:
            if progress.reduction is not None:
                self._abandoned.append(progress.reduction)
            progress.reduction = progress.received = progress.sums = None
            progress.missing = len(progress.places)
            for place in progress.places:
                place.touched = place.arrived = False

    def _reduce_all(self) -> None:
        """Reduces the remaining buckets, and waits for all."""
        self._add_parts()
        while self._next < len(self._progress):
            self._launch()
        for progress in self._progress:
            if progress.reduction is not None:
                progress.reduction.wait()
            if progress.received is not None:
                progress.received()
            if progress.sums is not None:
                progress.flat.gradient(self._part(progress.flat)).add_(progress.sums)
            if progress.received is not None or progress.sums is not None:
                self._changed(progress.flat)
            progress.reduction = progress.received = progress.sums = None
        if self._copies is not None:
            self._copies.join()

    def _reopen(self) -> None:
        """Sets reduced sums aside, so that a further backward starts anew and all buckets are reduced once more.

        Every rank reduces every bucket here, since which ones it has reduced already depends on its own hooks.
        """
        self._reduce_all()
        sums = [progress.flat.gradient(self._part(progress.flat)).clone() for progress in self._progress]
        self._empty()
        for progress, done in zip(self._progress, sums, strict=True):
            progress.sums = done

    def _sum(self, name: str) -> OpenSum:
        place = self._places[name]
        if place.progress.reduction is not None:
            raise EngineError(
                f"parameter {place.name!r} got a gradient after its bucket was reduced: its use differs from "
                "earlier steps; use it the same number of times in every backward."
            )
        return OpenSum(place.view, place.touched)

    def _note_sum(self, name: str) -> None:
        self._places[name].touched = True

    def complete(self, name: str) -> None:
        """Records that the gradient of parameter ``name`` is complete. In the last backward of a step, reduces complete
        buckets, in the same order on every rank.
        """
        place = self._places[name]
        progress = place.progress
        if self._last:
            progress.repeats = progress.repeats or place.arrived
            progress.missing -= not place.arrived
            place.arrived = True
        # A complete bucket waits for all buckets before it: hooks fire in any order, collectives must match on all
        # ranks.
        while self._eager and self._next < len(self._progress) and self._ready(self._progress[self._next]):
            self._launch()

    def _ready(self, progress: _Progress) -> bool:
        return progress.missing == 0 and not progress.repeats and not progress.late

    def _add_parts(self) -> None:
        """Sums the gradients that are partial over tensor ranks, so that each of these ranks has the full gradient."""
        places = [place for progress in self._progress if progress.flat.bucket.partial for place in progress.places]
        if not places or self._sum_partial is None:
            return
        for place in places:
            if not place.touched:
                place.view.zero_()
                place.touched = True
        self._sum_partial({place.name: place.view for place in places})

    def _part(self, flat: FlatBucket) -> slice:
        return flat.shard if self._scatter else flat.held

    def _launch(self) -> None:
        progress = self._progress[self._next]
        self._next += 1
        for place in progress.places:  # a slot without a gradient has that of an earlier step
            if not place.touched:
                place.view.zero_()
        grads, shard = progress.flat.grads, progress.flat.shard
        if before := self._launched:  # a hop behind: it is most likely over, and nothing waits for it here
            before.cross()
        encoded = self._encoded.get(progress.flat.bucket.index)
        if encoded is not None:
            self._follow(progress, encoded.start(grads, grads[shard]), grads[shard])
            self._changed(progress.flat)
            return
        wire = self._on_wire(grads)
        if self._scatter:
            inside = self._comm.reduce_scatter(wire[shard], wire, progress.flat.bucket.spread.sharding, "gradients")
            self._follow(progress, inside, wire[shard])
        else:
            progress.reduction = self._comm.all_reduce(wire, progress.flat.bucket.spread.sums, "gradients")
        if wire is not grads:
            kept = self._part(progress.flat)
            progress.received = partial(grads[kept].copy_, wire[kept])
        self._changed(progress.flat)
        alone = progress.received is None and progress.sums is None and self._launched is None
        if alone and progress.reduction is not None:
            self._follow_copy(progress.flat, progress.reduction)

    def _follow(self, progress: _Progress, inside: Pending, shard: Tensor) -> None:
        """Starts the sum over shard groups after the sum within one; buckets cross in their order, equal on all
        ranks."""
        progress.reduction, self._launched = inside, None
        groups = progress.flat.bucket.spread.groups
        if self._comm.grid.size(groups) > 1:
            progress.reduction, self._launched = summed_over_replicas(inside, shard, groups, self._comm, self._on_wire)


def _place(progress: _Progress, slot: Slot) -> _Place:
    place = _Place(slot.name, progress, slot_view(progress.flat.grads, slot))
    progress.places.append(place)
    return place
