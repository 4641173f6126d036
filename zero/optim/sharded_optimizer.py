"""Sharded optimizer step: updates the weights that this rank owns and gathers the parameters over axis dp.

    bucket 0   | update | gather ------>
    bucket 1            | update | gather ------>        the built-in optimizers; others update everything first
    bucket 2                     | update | gather ------> | wait

Where the kernels of Adam update a master, they also write its narrow weights, into the shard of the buffer that is
gathered: there is no pass that casts or copies.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from engine.errors import ConfigError, EngineError
from engine.kernels.dispatch import REFERENCE, Kernels
from engine.kernels.ops.adamw import DeviceDecision, fits_adamw_kernel
from engine.parallel.comm.comm import Comm, Pending
from engine.zero.flat_buckets import FlatBucket
from engine.zero.gather.encoded_gather import gather_masters
from engine.zero.layout import Slot
from engine.zero.optim.bf16_updates import RoundedUpdates
from engine.zero.optim.flat_optimizers import FlatAdam, FlatOptimizer, FusedAdam, UpdateOrder, UpdatePiece
from engine.zero.optim.master_weights import sync_masters

OptimizerFactory = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


# Optimizers of torch whose update of an element depends on that element's own history alone, so that updating a shard
# equals updating the full tensor.
_ELEMENTWISE = frozenset(
    {"Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"}
)


@dataclass(frozen=True, slots=True)
class GroupOptions:
    """Overrides of an optimizer group; None keeps the optimizer's own value."""

    lr: float | None = None
    weight_decay: float | None = None
    others: tuple[tuple[str, Any], ...] = ()
    """Options of a group of the user's own optimizer."""

    def as_kwargs(self) -> dict[str, Any]:
        """Return the overrides as keys of a torch parameter group."""
        values = {"lr": self.lr, "weight_decay": self.weight_decay}
        return {name: value for name, value in values.items() if value is not None} | dict(self.others)


@dataclass(frozen=True, slots=True)
class OptimizerTensor:
    """Tensor that the inner optimizer updates: the elements ``part`` of a bucket."""

    parameter: nn.Parameter
    grads: Tensor
    flat: FlatBucket
    part: slice

    def narrow(self) -> Tensor | None:
        """Return the narrow weights that receive its values; None if there are none, or a gather fills them."""
        if self.flat.master is None or self.flat.rounds_in_gathers:
            return None
        start = self.flat.owned.start
        return self.flat.kept[self.part.start - start : self.part.stop - start].view(self.parameter.shape)

    def slots(self) -> Iterator[tuple[Slot, slice]]:
        """Yield the parameters whose elements it contains, and which of its own elements those are."""
        for slot in self.flat.bucket.slots:
            start, stop = max(slot.start, self.part.start), min(slot.stop, self.part.stop)
            if start < stop:
                yield slot, slice(start - self.part.start, stop - self.part.start)

    def names(self) -> list[str]:
        """Return the names of the parameters whose elements it contains."""
        return [slot.name for slot, _ in self.slots()]


class ShardedOptimizer:
    """Updates the owned weights of every bucket and gathers the updated parameters.

    Args:
        buckets: the flat buckets of this rank.
        groups: overrides by group index.
        factory: builds the inner optimizer from torch parameter groups.
        comm: communication; label "parameters" on axis dp, one all-gather for each bucket and step.
        sharded: update shards only (ZeRO 1); at ZeRO 0 every rank updates everything.
        shaped: give the inner optimizer parameters in their shapes instead of flat runs. Only at ZeRO 0, where
            an optimizer that needs full matrices (LAMB, Muon) then works, unless tensor ranks cut them.

    Raises:
        ConfigError: the optimizer is to be sharded and does not work element by element.
    """

    def __init__(
        self,
        buckets: Sequence[FlatBucket],
        groups: Sequence[GroupOptions],
        factory: OptimizerFactory,
        comm: Comm,
        sharded: bool,
        shaped: bool = False,
    ) -> None:
        self._buckets = buckets
        self._comm = comm
        self._sharded = sharded
        collect = _whole_parameters if shaped and not sharded else _segments
        members: dict[int, list[nn.Parameter]] = {index: [] for index in range(len(groups))}
        self.places: list[OptimizerTensor] = []
        """Optimizer tensors in the order of the buckets."""
        for flat in buckets:
            for group, part, shape in collect(flat):
                weights = flat.weights[part.start - flat.owned.start : part.stop - flat.owned.start].view(shape)
                parameter = nn.Parameter(weights)
                members[group].append(parameter)
                self.places.append(OptimizerTensor(parameter, flat.gradient(part).view(shape), flat, part))
        self._bucket_tensors = [tuple(p.parameter for p in self.places if p.flat is flat) for flat in buckets]
        """The optimizer tensors of each bucket."""
        self._rounding: RoundedUpdates | None = None
        self._kernels = REFERENCE
        self._make = partial(_make, factory, groups, members)
        self.inner = self._make()
        self.configured = tuple(_options(group) for group in self.inner.param_groups)
        """Options of each group as the inner optimizer was built with."""
        self._stepping = False
        self.unused = frozenset[str]()
        """Parameters that had no gradient on any rank in the last step that was looked at: an update leaves them."""
        self.missed: dict[str, int] = {}
        """Number of updates that left a parameter as it was; the same on all ranks."""
        self.inner.register_step_pre_hook(self._refuse_own_step)
        self._begins_with_state = bool(self.inner.state)
        if sharded:
            check_elementwise(self.inner, "zero_optimization.stage 1 or more")

    def round(self, rounding: RoundedUpdates) -> None:
        """Update bf16 weights without masters through ``rounding``.

        Raises:
            ConfigError: the inner optimizer is not a built-in one.
        """
        if not isinstance(self.inner, FlatOptimizer):
            raise ConfigError(
                f"bf16.bf16_master_weights_and_grads was given optimizer {type(self.inner).__name__}, but only the "
                "built-in optimizers round stochastically; choose AdamW, Adam, SGD or Lion in the config."
            )
        for place in self.places:
            if place.parameter.dtype == torch.bfloat16:
                rounding.add(place.parameter, place.flat, place.part)
        self._rounding = self.inner.rounding = rounding

    def use(self, kernels: Kernels) -> None:
        """Update with these kernels from now on, where they support the optimizer."""
        self._kernels = kernels

    @property
    def decides_on_device(self) -> bool:
        """True if ``launch`` can be called: the optimizer is Adam or AdamW and a kernel fits some bucket.

        The answer is the same on all ranks of axis dp, whose shards have equal sizes.
        """
        return type(self.inner) is FlatAdam and any(
            fits_adamw_kernel(flat.weights, self._kernels) for flat in self._buckets
        )

    @torch.no_grad()
    def launch(self, decision: DeviceDecision) -> None:
        """Make a step on a decision that only the device knows yet. No host synchronization.

        Buckets are gathered over dp in either case; after a skipped update they bring the unchanged values. ``settle``
        ends an update that was made, and ``Bookkeeping`` restores the counts of one that was skipped. The inner
        optimizer sees the reduced sums themselves, because the kernels apply the factor as they read.
        """
        assert isinstance(self.inner, FlatAdam)
        _sync_rounded(self._buckets)
        narrow: dict[Tensor, Tensor | None] = {place.parameter: place.narrow() for place in self.places}
        self._give_gradients()
        self.inner.fused = FusedAdam(self._kernels, decision, narrow, self._rounding)
        try:
            self._step_inner(rounded=True)
        finally:
            self.inner.fused = None

    def forget(self) -> None:
        """Reset the state to that of a new optimizer; some (Adagrad) create state in their constructor."""
        self.inner.state.clear()
        self.unused = frozenset()
        self.missed.clear()
        if self._begins_with_state:
            self.inner.state.update(self._make().state)
        for group in self.inner.param_groups if isinstance(self.inner, FlatOptimizer) else ():
            group.pop("step", None)

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """Multiply the reduced gradients by ``scale``, update, and gather every bucket over dp (not at ZeRO 3)."""
        for flat in self._buckets:
            sync_masters(flat)
            if self.scales_in_place(flat):
                flat.gradient(flat.owned).mul_(scale)
        if self._rounding is not None:
            self._rounding.scale = scale
        self._give_gradients()
        self._step_inner(rounded=False)
        self.settle()

    def settle(self) -> None:
        """Count the update for each parameter, and tell autograd that the parameters have changed."""
        for name in self.unused:
            self.missed[name] = self.missed.get(name, 0) + 1
        _tell_autograd(self._buckets)

    @torch.no_grad()
    def refresh(self, buckets: Sequence[FlatBucket]) -> None:
        """Round written masters into the parameters of all data ranks, with the gathers that follow an update."""
        _wait([self._start_gather(flat, rounded=False) for flat in buckets])
        _tell_autograd(buckets)

    def scales_in_place(self, flat: FlatBucket) -> bool:
        """True if ``step`` multiplies the gradients of this bucket by its factor before the inner optimizer runs."""
        return self._rounding is None or flat.grads.dtype != torch.bfloat16

    @property
    def state_names(self) -> list[str]:
        """Names of the states that have a value for each element on this rank, such as "exp_avg", sorted."""
        states = ((place.parameter, self.inner.state.get(place.parameter, {})) for place in self.places)
        return sorted(
            {
                name
                for parameter, state in states
                for name, value in state.items()
                if isinstance(value, Tensor) and value.shape == parameter.shape
            }
        )

    def unexpected(self, unused: frozenset[str], among: frozenset[str]) -> int:
        """Count the parameters of this rank, ``among``, of which this step makes another use than the last one."""
        return len(unused ^ (self.unused & among))

    def _step_inner(self, rounded: bool) -> None:
        """Step and gather; parameters without a gradient keep values and moments, and built-in optimizers their count.

        ``rounded``: the step itself writes the values of masters into the narrow weights.
        """
        if not isinstance(self.inner, FlatOptimizer):
            self._step_other()
            _wait([self._start_gather(flat, rounded) for flat in self._buckets])
            return
        apart = self.unused.union(self.missed)
        several = [place for place in self.places if not apart.isdisjoint(place.names())] if apart else []
        self.inner.pieces = {place.parameter: tuple(self._pieces(place)) for place in several}
        gathers: list[Pending | None] = []
        self.inner.order = UpdateOrder(
            self._bucket_tensors, lambda number: gathers.append(self._start_gather(self._buckets[number], rounded))
        )
        try:
            self._call_step()
        finally:
            self.inner.order = None
        _wait(gathers)

    def _step_other(self) -> None:
        """Step of an optimizer of the user's, which updates everything at once."""
        kept = [(part, part.clone()) for place in self.places for part in self._unused_parts(place)]
        self._call_step()
        for part, before in kept:
            part.copy_(before)

    def _call_step(self) -> None:
        self._stepping = True
        try:
            self.inner.step()
        finally:
            self._stepping = False

    def _pieces(self, place: OptimizerTensor) -> Iterator[UpdatePiece]:
        """Yield runs of parameters that are updated and have missed the same number of updates."""
        run: UpdatePiece | None = None
        for slot, part in place.slots():
            missed = None if slot.name in self.unused else self.missed.get(slot.name, 0)
            if run is not None and missed == run.missed:
                run = UpdatePiece(slice(run.part.start, part.stop), run.missed)
                continue
            if run is not None:
                yield run
            run = None if missed is None else UpdatePiece(part, missed)
        if run is not None:
            yield run

    def _unused_parts(self, place: OptimizerTensor) -> Iterator[Tensor]:
        """Yield the values and moments that the step of an optimizer of the user's must leave."""
        parts = [part for slot, part in place.slots() if slot.name in self.unused]
        if not parts:
            return
        weights = place.parameter.detach()
        for value in (weights, *self.inner.state.get(place.parameter, {}).values()):
            if isinstance(value, Tensor) and value.shape == weights.shape:
                yield from (value.view(-1)[part] for part in parts)

    def _refuse_own_step(self, *_: object) -> None:
        if not self._stepping:
            refuse_own_step()

    def _give_gradients(self) -> None:
        for place in self.places:
            # set in every step: zero_grad() on the inner optimizer must not end the training
            place.parameter.grad = place.grads

    def _start_gather(self, flat: FlatBucket, rounded: bool) -> Pending | None:
        """Start the gather of a bucket, if it has one; ``rounded``: its master is in ``kept`` already."""
        if flat.rounds_in_gathers:
            return gather_masters(flat, self._comm, "parameters")
        if flat.master is not None and not rounded:
            flat.kept.copy_(flat.master)
        if self._sharded and not flat.sharded:
            return self._comm.all_gather(flat.params, flat.kept, "dp", "parameters")
        return None


def _sync_rounded(buckets: Sequence[FlatBucket]) -> None:
    """Take what the user has written where the kernel cannot tell it from what a gather has left."""
    for flat in filter(lambda each: each.rounds_in_gathers, buckets):
        sync_masters(flat)


def _wait(gathers: Sequence[Pending | None]) -> None:
    for gather in gathers:
        if gather is not None:
            gather.wait()


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def refuse_own_step(*_: object) -> None:
    """Refuse a step that the user makes: its gradients are unreduced sums, and no parameter would be gathered.

    Raises:
        EngineError: always.
    """
    raise EngineError(
        "step() on the engine's optimizer, which would update from gradients that are not reduced and leave "
        "the parameters as they are; call eng.step() after eng.backward(loss), or eng.train_batch(batch)."
    )


def _tell_autograd(buckets: Sequence[FlatBucket]) -> None:
    """Writes bypassed autograd, which must refuse a backward through a graph of the old weights."""
    torch.autograd.graph.increment_version([parameter for flat in buckets for parameter in flat.parameters])
    torch.clear_autocast_cache()  # an autocast around several steps would go on using copies of the old weights


def _make(
    factory: OptimizerFactory, groups: Sequence[GroupOptions], members: Mapping[int, list[nn.Parameter]]
) -> torch.optim.Optimizer:
    return factory([{"params": members[index], **group.as_kwargs()} for index, group in enumerate(groups)])


def _segments(flat: FlatBucket) -> Iterator[tuple[int, slice, tuple[int, ...]]]:
    """Yield (group, elements, shape) of each run of one group, flat, so that an update is a few long kernels."""
    for segment in flat.bucket.segments(flat.owned):
        yield segment.group, slice(segment.start, segment.stop), (segment.stop - segment.start,)


def _whole_parameters(flat: FlatBucket) -> Iterator[tuple[int, slice, tuple[int, ...]]]:
    """Yield (group, elements, shape) of each parameter."""
    for slot in flat.bucket.slots:
        yield slot.group, slice(slot.start, slot.stop), slot.shape


def check_elementwise(optimizer: torch.optim.Optimizer, by: str) -> None:
    """Refuse an optimizer that is not elementwise, where ``by`` gives it parts of parameters.

    Raises:
        ConfigError: the optimizer is neither a known one nor marked ``elementwise``.
    """
    kind = type(optimizer)
    known = kind.__module__.startswith("torch.optim") and kind.__name__ in _ELEMENTWISE
    if not known and not getattr(kind, "elementwise", False):
        raise ConfigError(
            f"optimizer {kind.__name__} is given parts of parameters by {by}, which needs an optimizer that works "
            "element by element: choose another optimizer, or set `elementwise = True` on its class if it does."
        )
