"""The exponential moving average of the weights, in the shards in which the optimizer updates them.

    first update     average = weights
    every later one  average = decay * average + (1 - decay) * weights

as ``torch.optim.swa_utils.AveragedModel`` with ``get_ema_multi_avg_fn`` makes it, from the masters. Nothing is sent.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from engine.zero.flat_buckets import FlatBucket
from engine.zero.optim.optimizer_tensors import OptimizerTensor

FAMILY = "ema"
"""Name of the average of a parameter in a checkpoint: "ema/NAME"."""


def average_dtype(weights: torch.dtype) -> torch.dtype:
    """The dtype of the average of weights: at least fp32, in which small steps are not lost."""
    return torch.promote_types(weights, torch.float32)


class WeightAverage:
    """The averages of the weights that this rank updates."""

    def __init__(self, places: Sequence[OptimizerTensor], decay: float) -> None:
        self._places, self._decay = places, decay
        self._values: dict[nn.Parameter, Tensor] = {}

    @torch.no_grad()
    def update(self) -> None:
        """Take the weights of an update in."""
        for place in self._places:
            weights = place.parameter.detach()
            weights = weights.to(average_dtype(weights.dtype))
            average = self._values.get(place.parameter)
            if average is None:
                self._values[place.parameter] = weights.clone()
            else:
                average.lerp_(weights, 1 - self._decay)

    def forget(self) -> None:
        """Begin anew with the weights of the next update."""
        self._values.clear()

    def tensors(self) -> dict[nn.Parameter, dict[str, Tensor]]:
        """The averages by updated parameter, as checkpoints store them; empty before the first update."""
        return {parameter: {FAMILY: average} for parameter, average in self._values.items()}

    def prepare(self, stored: Mapping[str, object]) -> dict[nn.Parameter, dict[str, Tensor]]:
        """Make room for the averages that a checkpoint has by "ema/NAME"; the others begin anew."""
        self.forget()
        for place in self._places:
            if all(f"{FAMILY}/{name}" in stored for name in place.names()):
                weights = place.parameter.detach()
                self._values[place.parameter] = weights.to(average_dtype(weights.dtype), copy=True)
        return self.tensors()

    @torch.no_grad()
    def of(self, flat: FlatBucket) -> Tensor:
        """The averages [owned] of a bucket; the weights themselves where there is none yet."""
        own = [place for place in self._places if place.flat is flat]
        if not own:  # frozen
            return flat.weights
        found = flat.weights.to(average_dtype(flat.weights.dtype), copy=True)
        for place in own:
            if place.parameter in self._values:
                part = slice(place.part.start - flat.owned.start, place.part.stop - flat.owned.start)
                found[part] = self._values[place.parameter].view(-1)
        return found
