"""Built-in optimizers over flat tensors: Adam, AdamW, SGD and Lion, as ordinary torch optimizers.

Their state is the moments alone; the step count of a group is a Python int in the group.

Adam can also update through kernels that read the decision on the device (``kernels/ops/adamw.py``):

    control sums agreed -> factor, go: scalars on the device -> updates and gathers are launched -> the host reads

If the host then finds that the update was skipped, it restores what it has counted in advance (``Bookkeeping``).

An update may go bucket by bucket (``UpdateOrder``), so that each bucket is gathered while the next one is updated.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import unwrap
from types import MappingProxyType
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from engine.kernels.dispatch import REFERENCE, Kernels
from engine.kernels.ops.adamw import AdamRun, DeviceDecision, adamw_
from engine.kernels.optim.host_update import update_adam_, update_lion_
from engine.kernels.optim.update_rules import AdamRule, LionRule, SGDRule, sgd_
from engine.zero.optim.bf16_updates import RoundedUpdates


class UpdatePiece(NamedTuple):
    """Slice ``part`` of a flat optimizer tensor. ``missed``: number of earlier updates in which the slice's parameters
    had no gradient. Their step count is the step count of the parameter group minus ``missed``.
    """

    part: slice
    missed: int


@dataclass(frozen=True, slots=True)
class UpdateOrder:
    """Order in which an update visits sets of optimizer tensors, usually one set per bucket, with callbacks before and
    after each set.
    """

    sets: Sequence[Sequence[Tensor]]
    begins: Callable[[int], bool] | None
    """Function called with the number of a set of tensors before its update; returns False to skip the set."""
    updated: Callable[[int], None]
    """Function called with the number of a set once its update is computed or started."""
    later: Callable[[Callable[[], None]], None] | None = None
    """Function that receives the counted update to run it once, on any thread; None: the update runs at once."""


class FlatOptimizer(torch.optim.Optimizer):
    """Base class of the built-in optimizers over flat tensors. For each parameter group, ``step`` passes the tensors
    that have gradients to ``_update``, which subclasses define.
    """

    elementwise = True
    encodes = False
    """True if moments are stored encoded: ``values`` decodes and ``keep`` encodes them."""
    counted: tuple[str, ...] = ("step",)
    """Group options that updates change and checkpoints restore."""
    kernels: Kernels = REFERENCE
    pieces: Mapping[Tensor, tuple[UpdatePiece, ...]] = MappingProxyType({})
    """Slices to update, for tensors that are updated in part."""
    rounding: RoundedUpdates | None = None
    """Update of bf16 weights with stochastic rounding; None if all weights have masters."""
    order: UpdateOrder | None = None
    """Order in which sets of tensors are updated; None: group by group."""

    @property
    def moment_names(self) -> tuple[str, ...]:
        """Names of the state tensors with one value per weight, such as "exp_avg", that this optimizer makes in its
        first step.
        """
        return ()

    @property
    def kind(self) -> str:
        """Name of the optimizer in checkpoints."""
        return type(self).__name__.removeprefix("Flat")

    def values(self, weight: Tensor, device: torch.device | None = None) -> dict[str, Tensor]:
        """Returns the moments of ``weight`` by name, such as "exp_avg", in the shape of ``weight``; {} before the first
        step. Encoded moments are decoded to copies on ``device`` (default: the device of ``weight``); others are the
        live tensors.
        """
        own = self.state.get(weight, {})
        return {name: kept for name, kept in own.items() if isinstance(kept, Tensor) and kept.shape == weight.shape}

    def encoded(self, weight: Tensor) -> bool:
        """Returns True if the moments of ``weight`` are stored encoded, such as in 8 bits."""
        return self.encodes

    def keep(self, weight: Tensor, values: Mapping[str, Tensor]) -> None:
        """Replaces the moments of ``weight`` by ``values`` (moment name -> tensor in the shape of ``weight``), for
        example after a load.
        """
        self.state[weight] = dict(values)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group. Skips torch's wrapper of this method, which would import torch.compile."""
        unwrap(torch.optim.Optimizer.add_param_group)(self, param_group)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Updates every parameter group once; tensors without a gradient do not change. Returns the loss that
        ``closure`` returns, or None without a closure.
        """
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            self.count(group)
        if self.order is None:
            for group in self.param_groups:
                self._update_group([weight for weight in group["params"] if weight.grad is not None], group)
            return loss
        if self.order.later is not None:  # the options of this update; a schedule may change them while it is made
            self.order.later(partial(self._update_sets, self.order, [dict(group) for group in self.param_groups]))
        else:
            self._update_sets(self.order, self.param_groups)
        return loss

    def count(self, group: dict[str, Any]) -> None:
        """Increments the step count ``group["step"]`` of a parameter group. ``step`` calls it before the group's
        update.
        """
        group["step"] = group.get("step", 0) + 1

    @torch.no_grad()
    def _update_sets(self, order: UpdateOrder, groups: Sequence[dict[str, Any]]) -> None:
        group_of = {weight: group for group in groups for weight in group["params"]}
        for number, chosen in enumerate(order.sets):
            goes_on = order.begins is None or order.begins(number)
            for group in groups if goes_on else ():
                weights = [weight for weight in chosen if weight.grad is not None and group_of[weight] is group]
                if weights:
                    self._update_group(weights, group)
            order.updated(number)

    def _update_group(self, weights: list[Tensor], group: dict[str, Any]) -> None:
        rounded = self.rounding is not None
        for weight in [w for w in weights if w in self.pieces and not (rounded and w.dtype == torch.bfloat16)]:
            self._update_pieces(weight, group)
        weights = [w for w in weights if w not in self.pieces or (rounded and w.dtype == torch.bfloat16)]
        if self.rounding is not None:
            for weight in [weight for weight in weights if weight.dtype == torch.bfloat16]:
                self._update_rounded(weight, group, self.rounding)
            weights = [weight for weight in weights if weight.dtype != torch.bfloat16]
        if weights:
            self._update(weights, [weight.grad for weight in weights if weight.grad is not None], group)

    def _update_pieces(self, weight: Tensor, group: dict[str, Any]) -> None:
        """Applies the update to each piece, with its own step count; the piece is also the key of its state.

        A tensor without a piece gets its moments all the same, because a checkpoint has them for every parameter.
        """
        assert weight.grad is not None
        known = self.state[weight]
        for part, missed in self.pieces[weight] or (UpdatePiece(slice(0, 0), 0),):
            age, piece = group["step"] - missed, weight.detach().view(-1)[part]
            self.state[piece] = {name: moment.view(-1)[part] for name, moment in known.items()} if age > 1 else {}
            self._update([piece], [weight.grad.view(-1)[part]], {**group, "step": age})
            for name, moment in self.state.pop(piece).items():
                if name not in known:
                    known[name] = torch.zeros_like(weight, dtype=moment.dtype)
                known[name].view(-1)[part].copy_(moment)

    def _update_rounded(self, weight: Tensor, group: dict[str, Any], rounding: RoundedUpdates) -> None:
        """Applies the same update to fp32 copies, one piece after another."""
        known = dict(self.state[weight])
        # State is keyed by tensor, so the fp32 copy gets the piece's moments for the time of its update.
        of_weight = self.pieces.get(weight)
        for piece in rounding.pieces(weight):
            missed = _missed_at(of_weight, piece.part.start)
            if missed is None:  # an empty piece, so that the moments exist
                piece, missed = piece._replace(part=slice(0, 0), places=piece.places[:0]), 0
            wide, age = weight[piece.part].float(), group["step"] - missed
            fresh = missed and age == 1
            self.state[wide] = {} if fresh else {name: moment[piece.part].float() for name, moment in known.items()}
            assert weight.grad is not None
            grad = weight.grad[piece.part].float().mul_(rounding.scale)
            self._update([wide], [grad], {**group, "step": age})
            for kind, (name, values) in enumerate(sorted(self.state.pop(wide).items()), start=1):
                if name not in self.state[weight]:
                    self.state[weight][name] = torch.zeros_like(weight, dtype=rounding.moments)
                rounding.store(self.state[weight][name], piece, values, group["step"], kind)
            rounding.store(weight, piece, wide, group["step"], kind=0)

    def _update(self, weights: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> None:
        raise NotImplementedError

    def _moments(self, weights: list[Tensor], name: str, dtype: torch.dtype | None = None) -> list[Tensor]:
        for weight in weights:
            if name not in self.state[weight]:
                self.state[weight][name] = torch.zeros_like(weight, dtype=dtype)
        return [self.state[weight][name] for weight in weights]


@dataclass(frozen=True, slots=True)
class FusedAdam:
    """Launcher of the fused Adam kernels of one optimizer step. The kernels read ``decision`` from device memory: a
    flag to update or skip, and the factor applied to gradients.
    """

    kernels: Kernels
    decision: DeviceDecision
    narrow: Mapping[Tensor, Tensor | None]
    """Low-precision weights that receive the rounded values of each optimizer tensor; None if the tensor is no
    master.
    """
    rounding: RoundedUpdates | None
    """Update of bf16 weights with stochastic rounding; None if all weights have masters."""

    def moments(self, weights: Tensor) -> torch.dtype:
        """Returns the dtype of the moments of ``weights``: the configured dtype for bf16 ``weights`` with stochastic
        rounding, otherwise the dtype of ``weights``.
        """
        rounded = self.rounding is not None and weights.dtype == torch.bfloat16
        return self.rounding.moments if rounded and self.rounding is not None else weights.dtype

    def update(
        self,
        weights: Tensor,
        moments: tuple[Tensor, Tensor],
        step: int,
        rule: AdamRule,
        pieces: Sequence[UpdatePiece] | None,
    ) -> None:
        """Launches Adam's update of ``weights`` and ``moments`` (first, second) from ``weights.grad``.

        ``step``: number of this update, from 1. ``pieces``: slices to update; None: all elements.
        """
        assert weights.grad is not None
        narrow = self.narrow[weights]
        run = AdamRun(weights.detach(), weights.grad, *moments, narrow)
        if self.rounding is not None and weights.dtype == torch.bfloat16:
            for part, how in self.rounding.runs(weights, step):
                own = AdamRun(run.weights[part], run.gradient[part], run.first[part], run.second[part])
                missed = _missed_at(pieces, part.start)
                if missed is not None:
                    adamw_(own, rule, step - missed, self.decision, self.kernels, how)
            return
        if pieces is None:
            adamw_(run, rule, step, self.decision, self.kernels)
            return
        for part, missed in pieces:
            also = narrow if narrow is None else narrow.view(-1)[part]
            own = AdamRun(run.weights[part], run.gradient[part], run.first[part], run.second[part], also)
            adamw_(own, rule, step - missed, self.decision, self.kernels)


def _missed_at(pieces: Sequence[UpdatePiece] | None, place: int) -> int | None:
    """Returns the number of updates that an element has missed; None if it is not updated now."""
    if pieces is None:
        return 0
    return next((missed for part, missed in pieces if part.start <= place < part.stop), None)


class FlatAdam(FlatOptimizer):
    """Adam, or AdamW if ``decoupled`` is True, over flat tensors. It stores two moments per weight."""

    fused: FusedAdam | None = None
    """Launcher of fused kernels, during a step that may be skipped by a decision on the device; otherwise None."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        decoupled: bool = False,
        bias_correction: bool = True,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults | {"decoupled": decoupled, "bias_correction": bias_correction})

    @property
    def moment_names(self) -> tuple[str, ...]:
        """Names of the two moments: "exp_avg" and "exp_avg_sq"."""
        return ("exp_avg", "exp_avg_sq")

    def _update_group(self, weights: list[Tensor], group: dict[str, Any]) -> None:
        if self.fused is None:
            super()._update_group(weights, group)
            return
        for weight in weights:
            dtype = self.fused.moments(weight)
            (first,), (second,) = (self._moments([weight], name, dtype) for name in ("exp_avg", "exp_avg_sq"))
            self.fused.update(weight, (first, second), group["step"], adam_rule(group), self.pieces.get(weight))

    def _update(self, weights: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> None:
        rule = adam_rule(group)
        first, second = self._moments(weights, "exp_avg"), self._moments(weights, "exp_avg_sq")
        update_adam_(weights, grads, first, second, group["step"], rule)


def adam_rule(group: Mapping[str, Any]) -> AdamRule:
    """Returns Adam's hyperparameters from the options of a parameter group."""
    return AdamRule(
        lr=float(group["lr"]),
        betas=tuple(group["betas"]),
        eps=group["eps"],
        weight_decay=group["weight_decay"],
        decoupled=group["decoupled"],
        bias_correction=group.get("bias_correction", True),  # a group of a checkpoint may be older than the option
    )


class FlatSGD(FlatOptimizer):
    """SGD over flat tensors. It stores a momentum buffer with one value per weight, or nothing without momentum."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay}
        super().__init__(params, defaults | {"nesterov": nesterov})

    @property
    def moment_names(self) -> tuple[str, ...]:
        """Name of the momentum buffer, "momentum_buffer"; () if the momentum of every parameter group is 0."""
        return ("momentum_buffer",) if any(group["momentum"] for group in self.param_groups) else ()

    def _update(self, weights: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> None:
        rule = SGDRule(
            float(group["lr"]), group["momentum"], group["dampening"], group["weight_decay"], group["nesterov"]
        )
        buffers = sgd_(weights, grads, [self.state[w].get("momentum_buffer") for w in weights], rule)
        for weight, buffer in zip(weights, buffers, strict=True):
            if buffer is not None:
                self.state[weight]["momentum_buffer"] = buffer


class FlatLion(FlatOptimizer):
    """Lion over flat tensors. It stores one momentum per weight."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @property
    def moment_names(self) -> tuple[str, ...]:
        """Name of the momentum tensor: "exp_avg"."""
        return ("exp_avg",)

    def _update(self, weights: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> None:
        rule = LionRule(float(group["lr"]), tuple(group["betas"]), group["weight_decay"])
        update_lion_(weights, grads, self._moments(weights, "exp_avg"), rule)


_COUNTED = ("step", "lr", "betas")
"""Keys of a group that an update, or the learning rate of an update, changes."""


@dataclass(frozen=True, slots=True)
class Bookkeeping:
    """Copy of an optimizer's step counts, learning rates and betas, to restore if an update is skipped or undone."""

    groups: tuple[Mapping[str, Any], ...]
    states: frozenset[Tensor]

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> "Bookkeeping":
        """Returns a copy of the step counts, learning rates and betas that the groups of ``optimizer`` have now."""
        groups = optimizer.param_groups
        return cls(
            tuple({key: group[key] for key in _COUNTED if key in group} for group in groups),
            frozenset(optimizer.state),
        )

    def put_back(self, optimizer: torch.optim.Optimizer) -> None:
        """Restores the step counts, learning rates and betas of this copy in ``optimizer``. Deletes the state of
        tensors that had no state when the copy was made.
        """
        for group, before in zip(optimizer.param_groups, self.groups, strict=True):
            for key in [key for key in _COUNTED if key in group and key not in before]:
                del group[key]
            group.update(before)
        for weights in [weights for weights in optimizer.state if weights not in self.states]:
            del optimizer.state[weights]
