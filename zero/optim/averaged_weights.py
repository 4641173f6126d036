"""The average of the weights in the place of the weights, until training goes on.

    train    | enter |  evaluate, save for others  | leave | train
    weights     average                               the same bits as before

For the moving average of a configuration, and for schedule-free optimizers, which evaluate at another point than where
they take gradients.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from engine.errors import EngineError
from engine.zero.flat_buckets import FlatBucket
from engine.zero.optim.master_weights import sync_masters
from engine.zero.optim.sharded_optimizer import ShardedOptimizer
from engine.zero.optim.weight_average import WeightAverage

_READERS = frozenset({
    "eval_batch", "predict", "generate", "eng(batch)", "full_state_dict", "save_pretrained", "timeline",
    "register_for_checkpointing",
})  # fmt: skip
"""Calls that read weights for others than the optimizer."""


class Average(Protocol):
    """Gives the averages of the weights of a bucket."""

    def of(self, flat: FlatBucket) -> Tensor:
        """The averages [owned]."""


class AveragedWeights:
    """Exchanges the trained weights of a rank for their average, and back."""

    def __init__(self, buckets: Sequence[FlatBucket], optimizer: ShardedOptimizer, average: Average) -> None:
        self._buckets, self._optimizer, self.average = buckets, optimizer, average
        self.moving = average if isinstance(average, WeightAverage) else None
        """The moving average of a configuration."""
        self._before: list[Tensor] | None = None

    @property
    def by_itself(self) -> bool:
        """Evaluations and exports take the average without being asked: that of a schedule-free optimizer."""
        return self.moving is None

    @property
    def inside(self) -> bool:
        """The model has the average."""
        return self._before is not None

    @torch.no_grad()
    def enter(self) -> None:
        """Put the average in place; a copy of this rank's weights waits. Gathers over dp, label "parameters"."""
        self._before = []
        for flat in self._buckets:
            sync_masters(flat)
            self._before.append(flat.weights.clone())
            flat.weights.copy_(self.average.of(flat))
        self._optimizer.refresh(self._buckets)

    @torch.no_grad()
    def leave(self) -> None:
        """Put the weights back, and drop what was written meanwhile. Gathers over dp, label "parameters"."""
        for flat, before in zip(self._buckets, self._before or (), strict=False):
            flat.weights.copy_(before)
        self._before = None
        self._optimizer.refresh(self._buckets)

    def refuse(self, call: str) -> None:
        """Refuse calls that need the weights of training, or would write the average over them.

        Raises:
            EngineError: the model has the average.
        """
        if self.inside and call not in _READERS:
            raise EngineError(
                f"{call} inside averaged_weights, where the model has the average and not the weights that are "
                "trained; leave the block first."
            )
