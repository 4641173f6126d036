"""Reduces gradients into shards in every microbatch, so that full gradients never exist (ZeRO 2, Rajbhandari et al.
2020).

    backward of every microbatch   head      block 7     block 6   ...   embedding
    buffer A                       [ fill 0  | reduce-scatter 0, add shard ][ fill 2 ...
    buffer B                                 [ fill 1             | reduce-scatter 1, add shard ]

A bucket borrows a buffer when its first gradient arrives and returns it when its sum has been added to the shard. Two
buffers are enough while gradients arrive in the order of the buckets. Every backward reduces every bucket of its stage,
in order, on every rank, with any gradients: (m + 1) Psi (N-1)/N elements a step, including the gather.
Of a split backward (``pipeline/runtime/split_backward``) the second part reduces; gradients of the first part are kept
until then.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.kernels.dispatch import OpenSum
from engine.parallel.comm.comm import Pending
from engine.zero.flat_buckets import FlatBucket, slot_view
from engine.zero.layout import Slot
from engine.zero.reduce.reducer import Backward, Reducer, ReducerSetup
from engine.zero.reduce.replica_sums import summed_over_replicas

BUFFERS = 2
"""Maximum number of full gradient buckets at a time."""


@dataclass(slots=True)
class _Filling:
    """State of one bucket in the running backward."""

    flat: FlatBucket
    buffer: Tensor | None = None
    summed: set[str] = field(default_factory=set)
    """Parameters of which the buffer holds gradients."""
    arrived: set[str] = field(default_factory=set)
    """Buckets to which the running backward adds nothing more."""
    reduced: bool = False
    repeats: bool = False
    """True once a parameter gave a gradient after its bucket was reduced (re-entrant checkpointing); from then on the
    bucket waits for the end of the backward.
    """
    touched: bool = False
    """True if the shard holds gradients of this step; otherwise its content is stale."""


@dataclass(frozen=True, slots=True)
class _Flight:
    """Reduction under way."""

    filling: _Filling
    result: Tensor
    """The shard of this rank."""
    pending: Pending
    last: bool
    """True in the last backward of the step, as far as that is known."""
    buffer: Tensor | None = None
    """The buffer of the full bucket, to be used again."""


class MicrobatchReducer(Reducer):
    """Gradient reducer for ZeRO 2. It reduce-scatters every bucket once per microbatch, and adds the result to this
    rank's gradient shard.

    Args:
        setup: arguments that all reducers share.
        microbatches: usual number of backwards in a step. If a rank runs fewer, as after an error, ``finish`` runs the
            missing reduce-scatters with zeros.
        chained: True if the backward of a rank waits for that of another rank (recurrences over context ranks), which
            must not wait for it meanwhile; then a backward may use more than ``BUFFERS`` buffers.
    """

    def __init__(self, setup: ReducerSetup, microbatches: int, chained: bool = False) -> None:
        super().__init__(setup)
        self._chained, self._running = chained, False
        self._usual = self._microbatches = microbatches
        self._fillings = [_Filling(flat) for flat in setup.buckets]
        self._places: dict[str, tuple[_Filling, Slot]] = {
            slot.name: (filling, slot) for filling in self._fillings for slot in filling.flat.bucket.slots
        }
        self._flights: deque[_Flight] = deque()
        self._free: list[Tensor] = []
        stages = {stage for filling in self._fillings for stage in filling.flat.bucket.stages}
        self._rounds: dict[int | None, int] = dict.fromkeys(sorted(stages) or (None,), 0)
        """Backwards of this step by stage; a rank with one stage uses the key None."""
        self._round: Sequence[_Filling] = ()
        """Buckets that the running backward reduces."""
        self._next = 0
        self._eager = True
        """Buckets of the running backward are reduced as soon as they are complete."""
        self._kept: dict[tuple[int, int], list[tuple[str, Tensor]]] = {}
        """Gradients of first parts of split backwards, by stage and microbatch."""
        self._keeping: list[tuple[str, Tensor]] | None = None

    @contextmanager
    def backward(self, which: Backward) -> Iterator[None]:
        """Returns a context that accumulates the gradients of the backward ``which``. Each bucket is reduced once all
        its gradients have arrived.

        In the input-gradient half of a split backward, autograd also computes some parameter gradients. They are
        stored, and the weight-gradient half adds them to the buckets.
        """
        self._settle()
        place = which.stage, which.microbatch
        if which.part == "input":
            self._keeping = self._kept[place] = []
            try:
                with self._hooks.backward():
                    yield
            finally:
                self._keeping = None
            return
        stage = None if None in self._rounds else which.stage
        self._begin_round(stage)
        self._eager = not which.unequal
        try:
            for name, grad in self._kept.pop(place, ()):
                self.take(name, grad)
            self._running = True
            with self._hooks.backward():
                yield
        finally:
            self._running = False
            self._end_round(stage)

    def expect(self, backwards: int) -> None:
        """Sets the number of backwards of each stage in the current step, in place of ``microbatches``. All data ranks
        must set the same number.
        """
        self._microbatches = backwards

    def finish(self) -> None:
        """Waits for all reductions, and prepares the next step. Sums partial gradients over tensor ranks, and gradients
        of shared parameters over stages.

        Afterwards ``grads`` of each bucket contains this rank's shard of the sum over microbatches and data ranks.
        """
        self._settle()
        self.unused = self.names - self._seen - self._kept_names
        for stage, done in self._rounds.items():
            for _ in range(done, self._microbatches):
                self._begin_round(stage)
                self._end_round(stage)
        self._add_parts()
        self.land()
        for filling in self._fillings:
            if not filling.touched:
                filling.flat.grads.zero_()
                self._changed(filling.flat)
        self._add_replicas()
        for filling in self._fillings:
            self._add_ties(filling.flat, filling.flat.shard)
        self._add_kept()
        self._free.clear()
        self.reset()

    def land(self) -> None:
        """Waits for the reductions that have been started, and adds their results to the gradient shards."""
        self._settle()
        while self._flights:
            self._land()

    def reset(self) -> None:
        """Discards the gradients of an unfinished step. It does not wait for running collectives; the next backward
        does.
        """
        self._abandoned += [flight.pending for flight in self._flights]
        self._flights.clear()
        self._kept.clear()
        self._seen.clear()
        self._forget()
        self._rounds = dict.fromkeys(self._rounds, 0)
        self._microbatches = self._usual
        for filling in self._fillings:
            filling.touched = False
            self._begin(filling)
        self._next = 0

    def _part(self, flat: FlatBucket) -> slice:
        return flat.shard

    def _add(self, name: str, grad: Tensor) -> None:
        """Adds a gradient to its bucket, or keeps it for the second part of its backward."""
        if self._keeping is not None:
            self._keeping.append((name, grad))
        else:
            super()._add(name, grad)

    def _sum(self, name: str) -> OpenSum | None:
        """Finds the sum to which the running backward adds a gradient; None in the first part of a split backward."""
        if self._keeping is not None:
            return None
        filling, slot = self._places[name]
        if filling.flat.bucket.partial:
            return OpenSum(self._whole_sum(filling, slot), holds=True)
        if filling.reduced:
            filling.repeats, filling.reduced = True, False  # reduced again in this round, on every rank alike
            filling.summed.clear()
            filling.arrived.clear()
        if filling.buffer is None:  # full gradients exist only between here and the reduction of the bucket
            filling.buffer = self._borrow(filling.flat)
        return OpenSum(slot_view(filling.buffer, slot), name in filling.summed)

    def _note_sum(self, name: str) -> None:
        self._places[name][0].summed.add(name)

    def complete(self, name: str) -> None:
        """Records that the gradient of parameter ``name`` is complete in the running backward. Reduces complete
        buckets, in the same order on every rank.
        """
        self._places[name][0].arrived.add(name)
        # Buckets are launched in order: data ranks must issue the same collectives, though their hooks may fire in
        # another order.
        while self._eager and self._next < len(self._round) and self._ready(self._round[self._next]):
            self._launch(self._round[self._next])
            self._next += 1

    def _ready(self, filling: _Filling) -> bool:
        if filling.flat.bucket.partial:
            return True
        return len(filling.arrived) == len(filling.flat.bucket.slots) and not filling.repeats

    def _whole_sum(self, filling: _Filling, slot: Slot) -> Tensor:
        """Returns the sum of a partial gradient, which remains unsharded until the end of the step."""
        if not filling.touched:
            filling.flat.grads.zero_()
            filling.touched = True
        return slot_view(filling.flat.grads, slot)

    def _begin_round(self, stage: int | None) -> None:
        self._round = [f for f in self._fillings if not f.flat.bucket.stages or stage in f.flat.bucket.stages]
        self._next = 0

    def _end_round(self, stage: int | None) -> None:
        """Reduces the remaining buckets in order, then buckets with gradients that arrived after their reduction."""
        again = [f for f in self._round[: self._next] if not f.reduced and f.summed]
        for filling in (*self._round[self._next :], *again):
            self._launch(filling)
        for filling in self._round:
            self._begin(filling)
        self._next = 0
        if stage in self._rounds:  # a stage without trained parameters has no entry
            self._rounds[stage] += 1

    def _begin(self, filling: _Filling) -> None:
        filling.summed.clear()
        filling.arrived.clear()
        filling.reduced = False

    def _launch(self, filling: _Filling) -> None:
        if filling.flat.bucket.partial:
            return
        full = self._borrow(filling.flat) if filling.buffer is None else filling.buffer
        filling.buffer, filling.reduced = None, True
        _blank(full, filling)
        encoded = self._encoded.get(filling.flat.bucket.index)
        last = sum(self._rounds.values()) == self._microbatches * len(self._rounds) - 1
        if encoded is not None:
            result = torch.empty_like(filling.flat.grads)
            self._flights.append(_Flight(filling, result, encoded.start(full, result), last))
            self._free.append(full)
            return
        wire = self._on_wire(full)
        shard = filling.flat.shard
        axis = filling.flat.bucket.spread.sharding
        pending = self._comm.reduce_scatter(wire[shard], wire, axis, "gradients")
        if wire is not full:
            self._free.append(full)
        self._flights.append(_Flight(filling, wire[shard], pending, last, wire if wire.dtype == full.dtype else None))

    def _land(self) -> None:
        """Adds the result of the oldest reduction to its shard."""
        flight = self._flights.popleft()
        flight.pending.wait()
        flat = flight.filling.flat
        if flight.filling.touched:
            flat.grads.add_(flight.result)
        else:
            flat.grads.copy_(flight.result)
        flight.filling.touched = True
        self._changed(flat)
        if flight.last and self._comm.grid.size(flat.bucket.spread.groups) == 1:
            self._follow_copy(flat, Pending())
        if flight.buffer is not None:
            self._free.append(flight.buffer)

    def _borrow(self, flat: FlatBucket) -> Tensor:
        """Returns a buffer of the bucket's size, with undefined content."""
        while len(self._flights) >= BUFFERS and not (self._chained and self._running):
            self._land()
        elements, dtype = flat.bucket.elements, flat.grads.dtype
        for index, buffer in enumerate(self._free):
            if buffer.numel() == elements and buffer.dtype == dtype:
                return self._free.pop(index)
        self._free.clear()
        return flat.grads.new_empty(elements)  # of shapes alone where these are

    def _add_replicas(self) -> None:
        """Sums the shards over the shard groups, once a step; all of them run at a time."""
        flats = [filling.flat for filling in self._fillings]
        apart = [flat for flat in flats if self._comm.grid.size(flat.bucket.spread.groups) > 1]
        sums = [
            summed_over_replicas(
                Pending(), flat.gradient(flat.shard), flat.bucket.spread.groups, self._comm, self._on_wire
            )
            for flat in apart
        ]
        for _, across in sums:
            across.cross()
        for flat, (whole, _) in zip(apart, sums, strict=True):
            whole.wait()
            self._changed(flat)

    def _add_parts(self) -> None:
        """Sums the gradients that are partial over tensor ranks and reduces them, once a step."""
        fillings = [filling for filling in self._fillings if filling.flat.bucket.partial]
        views = {}
        for filling in fillings:
            flat = filling.flat
            if not filling.touched:
                flat.grads.zero_()
                filling.touched = True
            for slot in flat.bucket.slots:
                views[slot.name] = slot_view(flat.grads, slot)
        if views and self._sum_partial is not None:
            self._sum_partial(views)
        for filling in fillings:
            flat = filling.flat
            encoded = self._encoded.get(flat.bucket.index)
            if encoded is not None:
                encoded.start(flat.grads, flat.grads[flat.shard]).wait()
                self._changed(flat)
                continue
            wire = self._on_wire(flat.grads)
            self._comm.reduce_scatter(wire[flat.shard], wire, flat.bucket.spread.sharding, "gradients").wait()
            self._changed(flat)
            if wire is not flat.grads:
                flat.grads[flat.shard].copy_(wire[flat.shard])


def _blank(full: Tensor, filling: _Filling) -> None:
    """Zeroes the slots without a gradient and the padding, because the norm reads both."""
    stop = 0
    for slot in filling.flat.bucket.slots:
        if slot.name in filling.summed:
            if stop < slot.start:
                full[stop : slot.start].zero_()
            stop = slot.stop
    if stop < len(full):
        full[stop:].zero_()
