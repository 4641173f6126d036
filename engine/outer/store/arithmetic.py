"""Arithmetic of merges: new weights of a fragment from the contributions of sites, in the order of their numbers.

    SUMS         weights = g_0 + g_1 + ..                       fp32, from left to right
    GRADIENTS    g = clip((g_0 + g_1 + ..) / sum of weights)    then the engine's optimizer, fp32
    DELTAS       g = sum of w_m d_m / sum of w_m                fp64; then SGD in fp64, or another optimizer in fp32

The order in which pushes come has no effect on any bit. For GRADIENTS, the operations and their order are those of an
engine that has the same optimizer: the sum is multiplied once by clipping factor / sum of weights.

SGD of DELTAS computes in fp64 and rounds weights and momentum once, to fp32: theta = theta - lr (g + mu v) with
Nesterov momentum, or theta - lr v, where v = mu v + g. One site with lr 1 gets its own weights, if it pushes fp64.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.config.optim_sections import OptimizerConfig
from engine.kernels.dispatch import REFERENCE
from engine.kernels.ops.norm import squared_norm
from engine.optim.built_in import built_in_optimizer
from engine.outer.messages import Content
from engine.outer.store.placement import Flats, FlatTensors
from engine.zero.optim.flat_optimizers import FlatOptimizer
from engine.zero.optim.master_weights import clip_factor, gradient_norm


@dataclass(frozen=True, slots=True)
class Contribution:
    """One site's push (gradients or weight differences) in a merge, with the push's weight and the site's learning
    rates.
    """

    finite: bool
    """True if every value is finite; other contributions have no effect, except on SUMS."""
    share: float
    """Weight of the site's difference, for DELTAS."""
    weight: float
    """Loss weight of the gradients."""
    rates: tuple[float, ...]
    """Learning rate of each group; empty: those of the store's optimizer."""
    values: Callable[[torch.dtype], Flats]
    """Function that returns the pushed values of whole tensors in a dtype."""


class FragmentUpdate(Protocol):
    """Interface of an optimizer that the store runs for one fragment (group of tensors)."""

    def update(self, weights: Flats, gradient: Flats, rates: Sequence[float]) -> Flats:
        """Returns new weights, fp32, one flat tensor for each parameter group; ``weights`` do not change.

        Args:
            gradient: gradient of each element, in flat tensors with the layout of ``weights``.
            rates: new learning rate of each parameter group; empty: no change.
        """

    def state(self) -> dict[str, Tensor]:
        """Returns the optimizer's state as tensors, by names such as "0.momentum" (group and tensor)."""

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restores the optimizer from a result of ``state``."""


class MergeArithmetic:
    """Computation of new weights from pushes (gradients or weight differences) for one fragment (group of tensors)."""

    def __init__(
        self, content: Content, settings: Mapping[str, Any], tensors: FlatTensors, groups: Sequence[Mapping[str, Any]]
    ) -> None:
        self._content, self._clipping, self._tensors = content, float(settings.get("clipping", 0.0)), tensors
        self._updates = None if content is Content.SUMS else _make_update(content, settings, tensors, groups)

    def merge(self, weights: Flats, contributions: Sequence[Contribution]) -> Flats:
        """Returns new weights, computed from ``weights`` and the pushes; does not modify ``weights``.

        If the sites run the optimizer (``Content.SUMS``), returns the sum of their gradients instead, in the same
        layout.

        Args:
            contributions: pushes, ordered by number of the site for a reproducible result.
        """
        if self._updates is None:
            return _sum(contributions)
        used = [each for each in contributions if each.finite]
        if self._content is Content.DELTAS:
            gradient = self._mean(used)
            return weights if gradient is None else self._updates.update(weights, gradient, ())
        gradient = self._average(used)
        return weights if gradient is None else self._updates.update(weights, gradient, used[0].rates)

    def state(self) -> dict[str, Tensor]:
        """Returns the state of the store's optimizer as tensors, by name; empty if there is none."""
        return {} if self._updates is None else self._updates.state()

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restores the store's optimizer from a result of ``state``."""
        if self._updates is not None:
            self._updates.load(state)

    def _average(self, used: Sequence[Contribution]) -> Flats | None:
        """Returns the clipped mean gradient, fp32; None if there is nothing to average, or it is not finite."""
        divisor = sum(each.weight for each in used)
        if not divisor:
            return None
        total = _sum(used)
        parts = [(values, True) for values in total if values.numel()]
        norm = gradient_norm(float(squared_norm(parts, REFERENCE)), divisor)
        if not isfinite(norm):
            return None
        factor = clip_factor(norm, self._clipping) / divisor
        for values in total:
            values.mul_(factor)
        return total

    def _mean(self, used: Sequence[Contribution]) -> Flats | None:
        """Returns the weighted mean of the differences, fp64; None if there is none."""
        whole = sum(each.share for each in used)
        if not whole:
            return None
        total: Flats | None = None
        for each in used:
            values = each.values(torch.float64)
            for mine in values:
                mine.mul_(each.share / whole)
            total = values if total is None else _add(total, values)
        return total


def _sum(contributions: Sequence[Contribution]) -> Flats:
    total = contributions[0].values(torch.float32)
    for each in contributions[1:]:
        total = _add(total, each.values(torch.float32))
    return total


def _add(total: Flats, values: Flats) -> Flats:
    for mine, theirs in zip(total, values, strict=True):
        mine.add_(theirs)
    return total


def _make_update(
    content: Content, settings: Mapping[str, Any], tensors: FlatTensors, groups: Sequence[Mapping[str, Any]]
) -> FragmentUpdate:
    kind, params = settings["optimizer"]["type"], settings["optimizer"]["params"]
    if content is Content.DELTAS and kind == "SGD":
        return _OuterSGD(params, tensors)
    own = [{}] * len(tensors.sizes) if content is Content.DELTAS else groups
    return _EngineUpdate(OptimizerConfig(type=kind, params=params), tensors, own)


class _OuterSGD:
    """SGD with momentum, computed in fp64 and rounded once."""

    def __init__(self, params: Mapping[str, Any], tensors: FlatTensors) -> None:
        self._params, self._tensors = params, tensors
        self._momentum: list[Tensor] = []

    def update(self, weights: Flats, gradient: Flats, rates: Sequence[float]) -> Flats:
        lr, momentum = float(self._params["lr"]), float(self._params["momentum"])
        decay, damping = float(self._params["weight_decay"]), float(self._params["dampening"])
        made, kept = [], []
        for index, (weight, mean) in enumerate(zip(weights, gradient, strict=True)):
            wide = weight.double()
            grad = mean + decay * wide if decay else mean
            step = grad
            if momentum:
                first = not self._momentum  # the first momentum is the gradient, as torch's
                step = grad.clone() if first else momentum * self._momentum[index].double() + (1 - damping) * grad
                kept.append(step.float())
                step = grad + momentum * step if self._params["nesterov"] else step
            made.append((wide - lr * step).float())
        self._momentum = kept
        return tuple(made)

    def state(self) -> dict[str, Tensor]:
        return {f"{index}.momentum": values for index, values in enumerate(self._momentum)}

    def load(self, state: Mapping[str, Tensor]) -> None:
        self._momentum = [state[f"{index}.momentum"] for index in range(len(state))]


class _EngineUpdate:
    """Built-in optimizer of the engine over one flat tensor for each group."""

    def __init__(self, config: OptimizerConfig, tensors: FlatTensors, groups: Sequence[Mapping[str, Any]]) -> None:
        self._own = [index for index, size in enumerate(tensors.sizes) if size]
        self._params = [torch.empty(tensors.sizes[index]) for index in self._own]
        given = zip(self._own, self._params, strict=True)
        made = built_in_optimizer(config)([{"params": [param], **groups[index]} for index, param in given])
        assert isinstance(made, FlatOptimizer)
        self._optimizer = made

    def update(self, weights: Flats, gradient: Flats, rates: Sequence[float]) -> Flats:
        made = tuple(values.clone() for values in weights)
        for index, param, group in zip(self._own, self._params, self._optimizer.param_groups, strict=True):
            param.data, param.grad = made[index], gradient[index].float()
            if rates:
                group["lr"] = rates[index]
        self._optimizer.step()
        for param in self._params:  # the version belongs to its readers now
            param.data, param.grad = torch.empty(0), None
        return made

    def state(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for index, param, group in zip(self._own, self._params, self._optimizer.param_groups, strict=True):
            found[f"{index}.step"] = torch.tensor(group.get("step", 0))
            found |= {f"{index}.{name}": values for name, values in self._optimizer.state.get(param, {}).items()}
        return found

    def load(self, state: Mapping[str, Tensor]) -> None:
        for index, param, group in zip(self._own, self._params, self._optimizer.param_groups, strict=True):
            own = {key.split(".", 1)[1]: values for key, values in state.items() if key.startswith(f"{index}.")}
            group["step"] = int(own.pop("step"))
            if own:
                self._optimizer.state[param] = own
