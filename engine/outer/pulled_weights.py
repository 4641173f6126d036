"""Optimizer of a site whose store updates the weights: it copies what was pulled, and has no state."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

from engine.zero.optim.flat_optimizers import FlatOptimizer
from engine.zero.optim.optimizer_tensors import OptimizerTensor


class PulledWeights(FlatOptimizer):
    """Optimizer that computes no updates, but copies the weights passed to :meth:`give` into the parameters."""

    def __init__(self, params: ParamsT, lr: float = 0.0, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self._pulled: dict[Tensor, Tensor] = {}

    def give(self, places: Sequence[OptimizerTensor], owned: dict[int, Tensor]) -> None:
        """Stores the weights that the next ``step`` copies over the parameters.

        Args:
            places: tensors that the optimizer updates, with their positions in buckets (flat tensors of many
                parameters).
            owned: new weights of this rank's shard of each bucket, by number of the bucket, fp32 [owned].
        """
        for place in places:
            start = place.flat.owned.start
            values = owned[place.flat.bucket.index][place.part.start - start : place.part.stop - start]
            self._pulled[place.parameter] = values.view(place.parameter.shape)

    def _update_group(self, weights: list[Tensor], group: dict[str, Any]) -> None:
        # also parameters that this site has not used: another site may have
        for weight in weights:
            if (values := self._pulled.pop(weight, None)) is not None:
                weight.copy_(values)
