"""Optimizer of a site whose store updates the weights: it copies what was pulled, and has no state."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

from engine.zero.optim.flat_optimizers import FlatOptimizer
from engine.zero.optim.optimizer_tensors import OptimizerTensor


class PulledWeights(FlatOptimizer):
    """Optimizer that replaces weights by the values of the store; without new values, it leaves them."""

    def __init__(self, params: ParamsT, lr: float = 0.0, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self._pulled: dict[Tensor, Tensor] = {}

    def give(self, places: Sequence[OptimizerTensor], owned: dict[int, Tensor]) -> None:
        """Stores the next weights of every bucket, fp32 [owned] by bucket number, for the next update."""
        for place in places:
            start = place.flat.owned.start
            values = owned[place.flat.bucket.index][place.part.start - start : place.part.stop - start]
            self._pulled[place.parameter] = values.view(place.parameter.shape)

    def _update_group(self, weights: list[Tensor], group: dict[str, Any]) -> None:
        # also parameters that this site has not used: another site may have
        for weight in weights:
            if (values := self._pulled.pop(weight, None)) is not None:
                weight.copy_(values)
