"""LAMB and LARS over flat shards of parameters: only norms are all-reduced.

    squares of own weights and of own updates (LAMB) or gradients (LARS)    -> summed over data, then tensor ranks
    steps on own weights, by the norms of whole parameters

One small sum a step on each axis, label "statistics": two numbers for each parameter. A parameter that is tied over
pipeline stages is whole on each of them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from engine.kernels.optim.update_rules import LambRule, LarsRule, LayerRule, Moments
from engine.parallel.comm.comm import Comm
from engine.parallel.comm.traffic import Traffic, sent_bytes
from engine.zero.optim.composite import CompositeOptimizer
from engine.zero.optim.flat_optimizers import FlatOptimizer
from engine.zero.optim.optimizer_tensors import OptimizerTensor, WholeShapes, WholeState
from engine.zero.optim.rules.counted_parts import LABEL, CountedPart, SummedUpdates, SumRoutes, counted_parts

_SUM = torch.float64


class FlatLayerwise(FlatOptimizer):
    """Base class of LAMB and LARS, in which the step size of a parameter depends on norms over the whole parameter.

    If tensors are full parameters, ``step`` updates them. If they are shards (``apart`` is True), ``step`` only records
    them; :class:`LayerwiseUpdates` then updates them across ranks.
    """

    rules: type[LayerRule]
    """Class of the update rule."""
    apart = False
    """True if tensors are shards of parameters, or contain several."""

    def __init__(self, params: ParamsT, **options: Any) -> None:
        """Takes ``options``: all params of the configuration."""
        super().__init__(params, options)
        self.due: set[Tensor] = set()
        """Tensors that wait for their update."""
        self._updates: dict[Tensor, int] = {}
        """Whole parameter -> updates that it has had."""

    @property
    def moment_names(self) -> tuple[str, ...]:
        """Names of the moments, such as "exp_avg", that the update rule of at least one parameter group uses."""
        return tuple(dict.fromkeys(name for group in self.param_groups for name in self.rule(group).moment_names))

    def rule(self, group: Mapping[str, Any]) -> LayerRule:
        """Returns the update rule with the hyperparameters of a parameter group."""
        return self.rules.of(group)

    def moments(self, weight: Tensor, group: Mapping[str, Any]) -> Moments:
        """Returns the moments of ``weight``, in its shape, ordered as ``moment_names`` of the group's update rule.
        Missing moments are made as zeros.
        """
        return [self._moments([weight], name)[0] for name in self.rule(group).moment_names]

    def _update_group(self, weights: list[Tensor], group: dict[str, Any]) -> None:
        for weight in weights:
            moments = self.moments(weight, group)
            if not self.apart:
                self._update_whole(weight, moments, self.rule(group))
        self.due.update(weights if self.apart else ())

    def _update_whole(self, weight: Tensor, moments: Moments, rule: LayerRule) -> None:
        assert weight.grad is not None
        step = self._updates[weight] = self._updates.get(weight, 0) + 1
        rule.take_in(weight.grad, moments)
        pair = (weight, rule.measured(weight, weight.grad, moments, step))
        norms = torch.stack([torch.linalg.vector_norm(each, dtype=_SUM) for each in pair])
        rule.apply_(weight, weight.grad, moments, step, norms)


class FlatLamb(FlatLayerwise):
    """LAMB over flat tensors. It stores Adam's two moments per weight."""

    rules = LambRule


class FlatLARS(FlatLayerwise):
    """LARS over flat tensors. It stores one momentum per weight."""

    rules = LarsRule


@dataclass(frozen=True, slots=True)
class LayerRoutes(SumRoutes):
    """Parameters that LAMB or LARS updates, and the axes over which their squared norms are all-reduced."""

    def traffic(self) -> tuple[Traffic, ...]:
        """Returns the traffic of a step: one all-reduce for each axis, with two sums for each parameter."""
        size = 2 * len(self.rows) * _SUM.itemsize
        return tuple(Traffic(axis, LABEL, 1, sent_bytes("all_reduce", size, ranks)) for axis, ranks in self.axes)


class LayerwiseUpdates(SummedUpdates):
    """Updates of sharded parameters by LAMB and LARS, once per step. Ranks all-reduce only norms of the parameters;
    each rank stores the moments of its own shards.

    Args:
        places: the optimizer's flat tensors, with this rank's shards of the parameters.
        inner: LAMB, LARS, or a composite of several optimizers. LAMB and LARS in it are set to leave their updates to
            this object.
    """

    families = frozenset[str]()

    def __init__(
        self, places: Sequence[OptimizerTensor], inner: torch.optim.Optimizer, routes: LayerRoutes, comm: Comm
    ) -> None:
        super().__init__(places, inner, routes, comm)
        parts = inner.parts.values() if isinstance(inner, CompositeOptimizer) else [inner]
        self._makers = [part for part in parts if isinstance(part, FlatLayerwise)]
        for maker in self._makers:
            maker.apart = True
        self.state: WholeState = {}
        self.shapes: WholeShapes = {}

    def forget(self) -> None:
        """Does nothing, because LAMB and LARS have no state other than moments."""

    def prepare(self) -> WholeState:
        """Returns {}, because LAMB and LARS have no state other than moments."""
        return self.state

    @torch.no_grad()
    def run(self, unused: frozenset[str], missed: Mapping[str, int]) -> Iterator[frozenset[str]]:
        """Updates the parameters of this object. Then yields one set: the names of all its parameters.

        ``unused``: names of parameters without a gradient, which are not updated. ``missed``: parameter name -> number
        of earlier updates without a gradient.
        """
        due = {weight: maker for maker in self._makers for weight in maker.due}
        parts = counted_parts(self._places, due.keys(), self._routes, self._comm.grid)
        used = [(part, *self._of(part, due, missed)) for part in parts if part.row.name not in unused]
        for maker in self._makers:
            maker.due.clear()
        squares = torch.zeros(len(self._routes.rows), 2, dtype=_SUM, device=self._device)
        for part, rule, moments, step in used:
            rule.take_in(part.grads, moments)
            squares[part.number, 0] += part.square(part.weights)
            squares[part.number, 1] += part.square(rule.measured(part.weights, part.grads, moments, step))
        self._reduce(squares)
        norms = squares.sqrt_()
        for part, rule, moments, step in used:
            rule.apply_(part.weights, part.grads, moments, step, norms[part.number])
        yield frozenset(self._numbers)

    def _of(
        self, part: CountedPart, makers: Mapping[Tensor, FlatLayerwise], missed: Mapping[str, int]
    ) -> tuple[LayerRule, Moments, int]:
        """Returns the rule of a part, its moments and the number of its update."""
        group, weight = self._inner.param_groups[part.row.group], part.place.parameter
        maker = makers[weight]
        moments = [each.view(-1)[part.part] for each in maker.moments(weight, group)]
        return maker.rule(group), moments, group["step"] - missed.get(part.row.name, 0)
