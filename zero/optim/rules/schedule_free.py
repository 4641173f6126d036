"""Schedule-free AdamW over flat tensors, and the average that it evaluates."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from engine.kernels.optim.update_rules import ScheduleFreeRule, averaged, count, schedule_free_
from engine.zero.flat_buckets import FlatBucket
from engine.zero.optim.composite import CompositeOptimizer, PlainComposite
from engine.zero.optim.flat_optimizers import FlatOptimizer
from engine.zero.optim.optimizer_tensors import OptimizerTensor

ITERATE, SQUARES = "z", "exp_avg_sq"


class FlatScheduleFreeAdamW(FlatOptimizer):
    """Schedule-free AdamW (Defazio et al. 2024) over flat tensors. The weights are y, where gradients are computed. The
    state has the iterate z and a mean square for each weight.
    """

    counted = ("step", "lr_max", "weight_sum")

    def __init__(self, params: ParamsT, **options: Any) -> None:
        """Takes ``options``: all params of the configuration."""
        super().__init__(params, options)

    @property
    def moment_names(self) -> tuple[str, ...]:
        """Names of the mean square ("exp_avg_sq") and of the iterate ("z")."""
        return (SQUARES, ITERATE)

    def count(self, group: dict[str, Any]) -> None:
        """Increments the step count of the parameter group ``group``. Sets ``group["newest"]``, the coefficient of the
        newest iterate z in the average of the iterates.
        """
        count(group)

    def _update_pieces(self, weight: Tensor, group: dict[str, Any]) -> None:
        self._kept(weight)  # parameters without a gradient begin where they are
        super()._update_pieces(weight, group)

    def _update(self, weights: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> None:
        rule = ScheduleFreeRule.of(group)
        for weight, grad in zip(weights, grads, strict=True):
            iterate, squares = self._kept(weight)
            schedule_free_(weight.detach(), grad, iterate, squares, group["step"], rule)

    def _kept(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        state = self.state[weight]
        if ITERATE not in state:
            state[ITERATE], state[SQUARES] = weight.detach().clone(), torch.zeros_like(weight)
        return state[ITERATE], state[SQUARES]


@torch.no_grad()
def take_averages(optimizer: torch.optim.Optimizer) -> None:
    """Replaces the weights of ``optimizer``, which must not be sharded, by their schedule-free averages x, in place.
    Weights of other types of optimizers do not change.
    """
    parts = optimizer.parts if isinstance(optimizer, PlainComposite) else [optimizer]
    for part in (part for part in parts if isinstance(part, FlatScheduleFreeAdamW)):
        for group in part.param_groups:
            for weight in (weight for weight in group["params"] if weight in part.state):
                weight.copy_(averaged(weight, part.state[weight][ITERATE], group["betas"]))


class ScheduleFreeAverage:
    """Source of the averaged weights of schedule-free optimizers, for evaluation. Weights of other types of optimizers
    are returned unchanged.
    """

    def __init__(self, places: Sequence[OptimizerTensor], inner: torch.optim.Optimizer) -> None:
        self._places, self._inner = places, inner
        parts = inner.parts.values() if isinstance(inner, CompositeOptimizer) else [inner]
        owned = [part for part in parts if isinstance(part, FlatScheduleFreeAdamW)]
        self._groups = [group for part in owned for group in part.param_groups]

    @torch.no_grad()
    def of(self, flat: FlatBucket) -> Tensor:
        """Returns the averaged weights of the elements of ``flat`` that this rank updates, as a 1-D tensor in the dtype
        of the weights.
        """
        betas = {id(weight): group["betas"] for group in self._groups for weight in group["params"]}
        found = flat.weights.clone()
        for place in self._places:
            state = self._inner.state.get(place.parameter, {})
            if place.flat is flat and id(place.parameter) in betas and ITERATE in state:
                part = slice(place.part.start - flat.owned.start, place.part.stop - flat.owned.start)
                average = averaged(place.parameter.detach(), state[ITERATE], betas[id(place.parameter)])
                found[part] = average.view(-1)
        return found

    @torch.no_grad()
    def forget(self) -> None:
        """Sets every iterate z to the present weights, which are then the average too."""
        owned = {id(weight) for group in self._groups for weight in group["params"]}
        for place in self._places:
            state = self._inner.state.get(place.parameter, {})
            if id(place.parameter) in owned and ITERATE in state:
                state[ITERATE].copy_(place.parameter.detach())
