"""The sharded optimizer step: one norm, one decision, update the owned weights, gather the parameters."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from engine.errors import ConfigError
from engine.kernels.dispatch import REFERENCE, Kernels
from engine.kernels.ops.adamw import DeviceDecision, fits_adamw_kernel
from engine.parallel.comm.comm import Comm
from engine.zero.flat_buckets import FlatBucket
from engine.zero.optim.bf16_updates import RoundedUpdates
from engine.zero.optim.flat_optimizers import FlatAdam, FlatOptimizer, FusedAdam
from engine.zero.optim.master_weights import sync_masters

OptimizerFactory = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


# Optimizers of torch whose update of an element reads nothing but that element's own history, so that
# a shard is updated as the whole tensor would be.
_ELEMENTWISE = frozenset(
    {"Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"}
)


@dataclass(frozen=True, slots=True)
class GroupOptions:
    """What an optimizer group overrides; None leaves the optimizer's own value."""

    lr: float | None = None
    weight_decay: float | None = None

    def as_kwargs(self) -> dict[str, float]:
        """The overrides as keys of a torch parameter group."""
        values = {"lr": self.lr, "weight_decay": self.weight_decay}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True)
class OptimizerTensor:
    """A tensor that the inner optimizer updates, and which elements of a bucket it is."""

    parameter: nn.Parameter
    grads: Tensor
    flat: FlatBucket
    part: slice

    def narrow(self) -> Tensor | None:
        """Where its elements go in the dtype of the computation; None where it is the master of none."""
        if self.flat.master is None:
            return None
        start = self.flat.owned.start
        return self.flat.kept[self.part.start - start : self.part.stop - start].view(self.parameter.shape)

    def names(self) -> list[str]:
        """The parameters of which it has elements."""
        part = self.part
        return [s.name for s in self.flat.bucket.slots if max(s.start, part.start) < min(s.stop, part.stop)]


class ShardedOptimizer:
    """Updates the owned weights of every bucket and makes the parameters whole again.

    Args:
        buckets: the flat buckets of this rank.
        groups: overrides by group index.
        factory: makes the inner optimizer from torch parameter groups.
        comm: communication; label "parameters" on axis dp, one all-gather a bucket and step.
        sharded: update shards only (ZeRO 1); at ZeRO 0 every rank updates everything.
        shaped: give the inner optimizer parameters in their shapes instead of flat runs. Only at ZeRO 0, where
            an optimizer that looks at a whole matrix (LAMB, Muon) then works, unless tensor ranks cut it.

    Raises:
        ConfigError: the inner optimizer does not work element by element and sharding is asked.
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
        """In the order of the buckets."""
        for flat in buckets:
            for group, part, shape in collect(flat):
                weights = flat.weights[part.start - flat.owned.start : part.stop - flat.owned.start].view(shape)
                parameter = nn.Parameter(weights)
                members[group].append(parameter)
                self.places.append(OptimizerTensor(parameter, flat.gradient(part).view(shape), flat, part))
        self._rounding: RoundedUpdates | None = None
        self._kernels = REFERENCE
        self._make = partial(_make, factory, groups, members)
        self.inner = self._make()
        self._begins_with_state = bool(self.inner.state)
        if sharded:
            check_elementwise(self.inner, "zero_optimization.stage 1 or more")

    def round(self, rounding: RoundedUpdates) -> None:
        """Update bf16 weights that have no master through ``rounding``.

        Raises:
            ConfigError: the inner optimizer is not one of ours.
        """
        if not isinstance(self.inner, FlatOptimizer):
            raise ConfigError(
                f"bf16.bf16_master_weights_and_grads with optimizer {type(self.inner).__name__}: only the built-in "
                "ones round stochastically; name AdamW, Adam, SGD or Lion in the config."
            )
        for place in self.places:
            if place.parameter.dtype == torch.bfloat16:
                rounding.add(place.parameter, place.flat, place.part)
        self._rounding = self.inner.rounding = rounding

    def use(self, kernels: Kernels) -> None:
        """Update by these from now on, where they have a kernel for the optimizer."""
        self._kernels = kernels

    @property
    def decides_on_device(self) -> bool:
        """Whether ``launch`` can be called: Adam or AdamW, and a kernel for some bucket.

        The same on all ranks of axis dp, whose shards are of equal sizes.
        """
        return type(self.inner) is FlatAdam and any(
            fits_adamw_kernel(flat.weights, self._kernels) for flat in self._buckets
        )

    @torch.no_grad()
    def launch(self, decision: DeviceDecision) -> None:
        """As ``step``, for a decision that the host does not know yet. No host synchronization.

        Buckets are gathered over dp whatever the decision is: after a step that is not made they bring the values that
        are there. ``settle`` ends an update that was made; ``Bookkeeping`` puts back what was counted for another. The
        gradients that the inner optimizer sees are the reduced sums themselves: kernels multiply what they read.
        """
        assert isinstance(self.inner, FlatAdam)
        narrow: dict[Tensor, Tensor | None] = {place.parameter: place.narrow() for place in self.places}
        self._give_gradients()
        self.inner.fused = FusedAdam(self._kernels, decision, narrow, self._rounding)
        try:
            self.inner.step()
        finally:
            self.inner.fused = None
        self._gather(rounded=True)

    def forget(self) -> None:
        """Let the state be that of a new optimizer; some (Adagrad) make it at once and not in their first step."""
        self.inner.state.clear()
        if self._begins_with_state:
            self.inner.state.update(self._make().state)
        for group in self.inner.param_groups if isinstance(self.inner, FlatOptimizer) else ():
            group.pop("step", None)

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """Multiply the reduced gradients by ``scale``, update, and gather every bucket over dp (not at ZeRO 3)."""
        for flat in self._buckets:
            sync_masters(flat)
            if self._rounding is None or flat.grads.dtype != torch.bfloat16:
                flat.gradient(flat.owned).mul_(scale)
        if self._rounding is not None:
            self._rounding.scale = scale
        self._give_gradients()
        self.inner.step()
        self._gather(rounded=False)
        self.settle()

    def settle(self) -> None:
        """Tell autograd that parameters have changed."""
        # our writes went past autograd, which has to refuse a backward through a graph of the old weights
        torch.autograd.graph.increment_version([p for flat in self._buckets for p in flat.parameters])
        torch.clear_autocast_cache()  # an autocast around several steps would go on with copies of the old weights

    def _give_gradients(self) -> None:
        for place in self.places:
            place.parameter.grad = (
                place.grads
            )  # anew each time: zero_grad() on the inner optimizer must not end the training

    def _gather(self, rounded: bool) -> None:
        """``rounded``: masters have been written into ``kept`` already."""
        gathers = []
        for flat in self._buckets:
            if flat.master is not None and not rounded:
                flat.kept.copy_(flat.master)
            if self._sharded and not flat.sharded:
                gathers.append(self._comm.all_gather(flat.params, flat.kept, "dp", "parameters"))
        for gather in gathers:
            gather.wait()


def _make(
    factory: OptimizerFactory, groups: Sequence[GroupOptions], members: Mapping[int, list[nn.Parameter]]
) -> torch.optim.Optimizer:
    return factory([{"params": members[index], **group.as_kwargs()} for index, group in enumerate(groups)])


def _segments(flat: FlatBucket) -> Iterator[tuple[int, slice, tuple[int, ...]]]:
    """(group, elements, shape) of each run of equal group, flat: an update is then a few long kernels."""
    for segment in flat.bucket.segments(flat.owned):
        yield segment.group, slice(segment.start, segment.stop), (segment.stop - segment.start,)


def _whole_parameters(flat: FlatBucket) -> Iterator[tuple[int, slice, tuple[int, ...]]]:
    """(group, elements, shape) of each parameter."""
    for slot in flat.bucket.slots:
        yield slot.group, slice(slot.start, slot.stop), slot.shape


def check_elementwise(optimizer: torch.optim.Optimizer, by: str) -> None:
    """Refuse an optimizer that looks at more than one element at a time, where ``by`` gives it parts of parameters."""
    kind = type(optimizer)
    known = kind.__module__.startswith("torch.optim") and kind.__name__ in _ELEMENTWISE
    if not known and not getattr(kind, "elementwise", False):
        raise ConfigError(
            f"optimizer {kind.__name__} is given parts of parameters by {by}, which needs an optimizer that works "
            "element by element: leave that out, or set `elementwise = True` on its class if it does."
        )
