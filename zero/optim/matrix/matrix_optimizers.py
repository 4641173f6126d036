"""Muon, SOAP and Shampoo over flat tensors: directions computed on shards, updates on whole matrices."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from engine.kernels.optim.matrix_rule import MatrixRule, MuonRule, momentum_
from engine.kernels.optim.preconditioned_rules import SHAMPOO_STATE, SOAP_STATE, ShampooRule, SoapRule
from engine.zero.optim.flat_optimizers import FlatOptimizer


class FlatMatrixOptimizer(FlatOptimizer):
    """Base class of optimizers that need whole matrices: Muon, SOAP and Shampoo.

    If tensors are whole matrices, ``step`` updates them. If they are shards (``apart`` is True), ``step`` only stores
    update directions in ``directions``; :class:`MatrixUpdates` then computes the updates across ranks.
    """

    rules: type[MuonRule | SoapRule | ShampooRule]
    """Class of the update rule."""
    apart = False
    """True if a tensor is a shard of a matrix, or contains several matrices."""
    reads_weights = False
    """True if the update of a matrix needs its weights too."""
    families = frozenset[str]()
    """Names of the state tensors of full matrices."""

    def __init__(self, params: ParamsT, **options: Any) -> None:
        """Takes ``options``: all params of the configuration."""
        super().__init__(params, options)
        self.directions: dict[Tensor, Tensor] = {}
        """Tensor -> direction of its update, until that is made."""
        self._updates: dict[Tensor, int] = {}
        """Whole matrix -> updates that it has had."""

    def rule(self, group: Mapping[str, Any]) -> MatrixRule:
        """Returns the update rule with the hyperparameters of a parameter group."""
        return self.rules.of(group)

    def _direction(self, weight: Tensor, group: dict[str, Any]) -> Tensor:
        """Returns the direction [as weight]: the gradient."""
        assert weight.grad is not None
        return weight.grad

    def _update_group(self, weights: list[Tensor], group: dict[str, Any]) -> None:
        for weight in weights:
            direction = self._direction(weight, group)
            if self.apart:
                self.directions[weight] = direction
            else:
                self._update_whole(weight, direction, self.rule(group))

    def _update_whole(self, weight: Tensor, direction: Tensor, rule: MatrixRule) -> None:
        shape, state = tuple(weight.shape), self.state[weight]
        for name, own in rule.state_shapes(shape).items():
            if name not in state:
                state[name] = weight.new_zeros(own)
        step = self._updates[weight] = self._updates.get(weight, 0) + 1
        rule.apply_(weight, rule.update(direction, state, step), shape, step)


class FlatMuon(FlatMatrixOptimizer):
    """Muon. It stores one momentum per weight. The update of a matrix needs the momenta of all its weights."""

    rules = MuonRule

    @property
    def moment_names(self) -> tuple[str, ...]:
        """Name of the momentum tensor: "momentum_buffer"."""
        return ("momentum_buffer",)

    def _direction(self, weight: Tensor, group: dict[str, Any]) -> Tensor:
        """Returns the direction [as weight]; zero for parameters without a gradient, which keep their momenta."""
        (momentum,), rule = self._moments([weight], "momentum_buffer"), MuonRule.of(group)
        assert weight.grad is not None
        pieces = self.pieces.get(weight)
        if pieces is None:
            return momentum_(momentum, weight.grad, rule)
        direction = torch.zeros_like(weight)
        for part, _ in pieces:
            direction.view(-1)[part] = momentum_(momentum.view(-1)[part], weight.grad.view(-1)[part], rule)
        return direction


class FlatSOAP(FlatMatrixOptimizer):
    """SOAP. The update of a matrix needs its whole gradient, and state of the whole matrix, such as preconditioners.
    For shards, :class:`MatrixUpdates` stores this state.
    """

    rules = SoapRule
    families = SOAP_STATE


class FlatShampoo(FlatMatrixOptimizer):
    """Shampoo. The update of a matrix needs its whole gradient, and preconditioners of the whole matrix. For shards,
    :class:`MatrixUpdates` stores this state.
    """

    rules = ShampooRule
    families = SHAMPOO_STATE
