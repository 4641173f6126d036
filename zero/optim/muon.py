"""Muon over flat tensors: momenta of parts of matrices here, whole matrices where they are gathered."""

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from engine.kernels.optim.muon_rule import MuonRule, apply_, momentum_, orthogonal
from engine.zero.optim.flat_optimizers import FlatOptimizer


class FlatMuon(FlatOptimizer):
    """Muon; one momentum an element.

    Over whole matrices it updates at once. Over parts of them (``apart``) a step adds gradients to momenta and leaves
    the directions of the update in ``directions``, from which ``MatrixUpdates`` makes the update of all ranks.
    """

    apart = False
    """Tensors are parts of matrices, or runs of several."""

    def __init__(self, params: ParamsT, **options: Any) -> None:
        """``options``: all params of the configuration."""
        super().__init__(params, options)
        self.directions: dict[Tensor, Tensor] = {}
        """Tensor -> direction of its update, until that is made."""

    @property
    def moment_names(self) -> tuple[str, ...]:
        """The momentum."""
        return ("momentum_buffer",)

    def _update_group(self, weights: list[Tensor], group: dict[str, Any]) -> None:
        rule = MuonRule.of(group)
        for weight, momentum in zip(weights, self._moments(weights, "momentum_buffer"), strict=True):
            assert weight.grad is not None
            if self.apart:
                self.directions[weight] = self._direction(weight, momentum, rule)
            else:
                update = orthogonal(momentum_(momentum, weight.grad, rule), rule)
                apply_(weight, update, tuple(weight.shape), rule)

    def _direction(self, weight: Tensor, momentum: Tensor, rule: MuonRule) -> Tensor:
        """The direction [as weight]; zero for parameters without a gradient, whose momenta stay."""
        assert weight.grad is not None
        pieces = self.pieces.get(weight)
        if pieces is None:
            return momentum_(momentum, weight.grad, rule)
        direction = torch.zeros_like(weight)
        for part, _ in pieces:
            direction.view(-1)[part] = momentum_(momentum.view(-1)[part], weight.grad.view(-1)[part], rule)
        return direction
