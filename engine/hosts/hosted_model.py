"""The engine as the module that a training loop of another library calls."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from engine.engine import Engine


class HostedModel(nn.Module):
    """Forwards of the engine under the calls of a module, as DistributedDataParallel has them.

    Attributes that it lacks are the model's. With a pipeline it predicts only, since its stages train in one schedule.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.module = engine.module
        self.engine = engine

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output for this data rank's rows; on every stage of a pipeline, outside of training."""
        if self.engine.config.pp == 1 or torch.is_grad_enabled():
            return self.engine(*args, **kwargs)
        batch = args[0] if len(args) == 1 and not kwargs else kwargs or args
        self.engine.complete(batch)
        return _with_one_loss(self.engine.predict(batch), batch, self.engine.config.micro)

    def generate(self, inputs: Tensor, **options: Any) -> Any:
        """Generate with the engine's weights, see :meth:`engine.Engine.generate`."""
        return self.engine.generate(inputs, **options)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients since the last update."""
        self.engine.zero_grad()


def _with_one_loss(output: Any, batch: Any, micro: int) -> Any:
    """``output``, whose losses of microbatches are made the loss of the batch.

    Losses divided by the number of items of the whole batch are added up; means are weighted by their rows.
    """
    losses = output.get("loss") if isinstance(output, Mapping) else None
    if losses is None or not losses.ndim:
        return output
    if isinstance(batch, Mapping) and batch.get("num_items_in_batch") is not None:
        loss = losses.sum()
    else:
        rows = next(len(part) for part in batch.values() if isinstance(part, Tensor) and part.ndim)
        weights = torch.tensor([min(micro, rows - first) for first in range(0, rows, micro)], device=losses.device)
        loss = (losses * weights).sum() / rows
    output["loss"] = loss
    return output
