"""Averaged weights in place of the trained weights until training continues.

    train    | enter |  evaluate, save for others  | leave | train
    weights     average                               the same bits as before

The average is that of a schedule-free optimizer, or an exponential moving average, stored like the optimizer's shards:

    first update     average = weights
    every later one  average = decay * average + (1 - decay) * weights

as in ``torch.optim.swa_utils.AveragedModel`` with ``get_ema_multi_avg_fn``, from the masters, without communication.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from engine.errors import EngineError
from engine.zero.flat_buckets import FlatBucket
from engine.zero.optim.master_weights import sync_masters
from engine.zero.optim.optimizer_tensors import OptimizerTensor
from engine.zero.optim.sharded_optimizer import ShardedOptimizer

FAMILY = "ema"
"""Prefix of averages in a checkpoint: "ema/" and the parameter's name."""


def average_dtype(weights: torch.dtype) -> torch.dtype:
    """Returns the dtype in which averages of weights of dtype ``weights`` are stored: fp64 for fp64, otherwise fp32."""
    return torch.promote_types(weights, torch.float32)


class WeightAverage:
    """Exponential moving averages (EMA) of the weights that this rank updates. Each rank stores the averages of its own
    shards.
    """

    def __init__(self, places: Sequence[OptimizerTensor], decay: float) -> None:
        self._places, self._decay = places, decay
        self._values: dict[nn.Parameter, Tensor] = {}

    @torch.no_grad()
    def update(self) -> None:
        """Moves each average towards the current weight: average = decay * average + (1 - decay) * weight. The first
        update sets the averages to the weights.
        """
        for place in self._places:
            weights = place.parameter.detach()
            weights = weights.to(average_dtype(weights.dtype))
            average = self._values.get(place.parameter)
            if average is None:
                self._values[place.parameter] = weights.clone()
            else:
                average.lerp_(weights, 1 - self._decay)

    def forget(self) -> None:
        """Discards the averages. The next update starts new averages from the weights at that time."""
        self._values.clear()

    def tensors(self) -> dict[nn.Parameter, dict[str, Tensor]]:
        """Returns the averages as optimizer parameter -> {"ema": average}, or {} before the first update."""
        return {parameter: {FAMILY: average} for parameter, average in self._values.items()}

    def prepare(self, stored: Mapping[str, object]) -> dict[nn.Parameter, dict[str, Tensor]]:
        """Allocates the averages that a checkpoint load fills. Returns parameter -> {"ema": average}. Discards earlier
        averages. ``stored``: entries of the checkpoint. Without any entry "ema/NAME" there are no averages. Otherwise a
        parameter NAME without an entry begins with its weights as the average.
        """
        self.forget()
        # all or none, independent of the parameters that share a tensor on this grid
        for place in self._places if any(name.startswith(f"{FAMILY}/") for name in stored) else ():
            weights = place.parameter.detach()
            self._values[place.parameter] = weights.to(average_dtype(weights.dtype), copy=True)
        return self.tensors()

    @torch.no_grad()
    def of(self, flat: FlatBucket) -> Tensor:
        """Returns the averages of the elements of the bucket ``flat`` that this rank updates, as a flat tensor.
        Elements without an average have the current weight.
        """
        own = [place for place in self._places if place.flat is flat]
        if not own:  # frozen
            return flat.weights
        found = flat.weights.to(average_dtype(flat.weights.dtype), copy=True)
        for place in own:
            if place.parameter in self._values:
                part = slice(place.part.start - flat.owned.start, place.part.stop - flat.owned.start)
                found[part] = self._values[place.parameter].view(-1)
        return found


_READERS = frozenset({
    "eval_batch", "predict", "generate", "generate_requests", "eng(batch)", "full_state_dict", "save_pretrained",
    "timeline", "register_for_checkpointing",
})  # fmt: skip
"""Calls that read weights for others than the optimizer."""


class Average(Protocol):
    """Interface of an object that returns averages of weights, such as an exponential moving average, by bucket."""

    def of(self, flat: FlatBucket) -> Tensor:
        """Returns the averages of the elements of the bucket ``flat`` that this rank updates, as a flat tensor."""

    def forget(self) -> None:
        """Discards or restarts the averages, after the weights were replaced."""


class AveragedWeights:
    """Switch of a rank's model between its trained weights and their average, for evaluation and export."""

    def __init__(self, buckets: Sequence[FlatBucket], optimizer: ShardedOptimizer, average: Average) -> None:
        self._buckets, self._optimizer, self.average = buckets, optimizer, average
        self.moving = average if isinstance(average, WeightAverage) else None
        """The moving average of a configuration."""
        self._before: list[Tensor] | None = None

    @property
    def by_itself(self) -> bool:
        """True if evaluations and exports always use the average, as for schedule-free optimizers."""
        return self.moving is None

    @property
    def inside(self) -> bool:
        """True between :meth:`enter` and :meth:`leave`, while the model's parameters have the averaged values."""
        return self._before is not None

    @torch.no_grad()
    def enter(self) -> None:
        """Stores a copy of this rank's trained weights, and writes the average into the model. All-gathers over dp,
        label "parameters".
        """
        self._before = []
        for flat in self._buckets:
            sync_masters(flat)
            self._before.append(flat.weights.clone())
            flat.weights.copy_(self.average.of(flat))
        self._optimizer.refresh(self._buckets)

    @torch.no_grad()
    def leave(self) -> None:
        """Writes the trained weights back into the model; changes made since :meth:`enter` are lost. All-gathers over
        dp, label "parameters".
        """
        for flat, before in zip(self._buckets, self._before or (), strict=False):
            flat.weights.copy_(before)
        self._before = None
        self._optimizer.refresh(self._buckets)

    def refuse(self, call: str) -> None:
        """Raises between :meth:`enter` and :meth:`leave`, unless the public method named ``call`` only reads weights
        for evaluation or export.

        Raises:
            EngineError: the model has its averaged weights now.
        """
        if self.inside and call not in _READERS:
            raise EngineError(
                f"{call} was called inside averaged_weights, where the model has the average and not the trained "
                "weights; leave the `with` block first."
            )
