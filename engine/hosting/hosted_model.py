"""The engine as the module that the training loop of another library calls."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from engine.engine import Engine
from engine.parallel.tensor.logits.sharded_logits import gather_logits


class HostedModel(nn.Module):
    """Forwards of the engine under the calls of a module, as DistributedDataParallel has them.

    Attributes that it lacks are the model's. Over a pipeline a forward runs all stages, and every rank has its output;
    where steps run whole, it predicts only, since the stages train in one schedule.
    """

    def __init__(self, trained: Engine, rows: int | None = None, whole_steps: bool = False) -> None:
        """``rows``: see :meth:`Engine.open_pipeline`. ``whole_steps``: the loop trains by ``eng.train_batch``."""
        super().__init__()
        self.module = trained.module
        self.trained = trained
        self._predicts = whole_steps
        if trained.config.pp > 1 and not whole_steps:
            trained.open_pipeline(rows)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output for this data rank's rows, on every stage; plain tensors where no gradient is needed."""
        if torch.is_inference_mode_enabled():  # what the engine makes lazily would stay without gradients
            with torch.inference_mode(False), torch.no_grad():
                return self(*args, **kwargs)
        if torch.is_grad_enabled():
            return self.trained(*args, **kwargs)
        if not self._predicts:
            return gather_logits(self.trained(*args, **kwargs))
        batch = args[0] if len(args) == 1 and not kwargs else kwargs or args
        self.trained.complete(batch)
        rows, micro = self.trained.batch_rows, self.trained.config.micro or 1
        count = rows.count(batch)
        if rows.whole_names(batch):
            micro = max(count, 1)  # patches of pictures belong to rows, by which only their collator could cut them
        return with_one_loss(self.trained.predict(with_share(batch, count, micro), micro), batch, count, micro)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients since the last update."""
        self.trained.zero_grad()


_COUNT = "num_items_in_batch"
_NO_LABEL = -100


def with_share(batch: Any, rows: int, micro: int) -> Any:
    """``batch``, whose number of items is given as each row's share, so that a microbatch has that of its rows."""
    if not isinstance(batch, Mapping) or batch.get(_COUNT) is None:
        return batch
    shares = _row_shares(batch, rows, micro)
    return {**batch, _COUNT: torch.as_tensor(batch[_COUNT], device=shares.device) * shares}


def with_one_loss(output: Any, batch: Any, rows: int, micro: int) -> Any:
    """``output``, whose losses of microbatches are made the loss of the batch: their mean, weighted by labels or rows.

    It is exact for means over either, and for sums that are divided by the share of the items that a microbatch has.
    """
    losses = output.get("loss") if isinstance(output, Mapping) else None
    if losses is None or not losses.ndim:
        return output
    weights = torch.stack([part.sum() for part in torch.split(_row_shares(batch, rows, micro), micro)]).to(
        losses.device
    )
    output["loss"] = (losses * weights).sum()
    return output


def _row_shares(batch: Mapping[str, Any], rows: int, micro: int) -> Tensor:
    """Share of each row in the loss of the batch: of its labels, where each microbatch has some, else of its rows."""
    labels = batch.get("labels")
    first = next(part for part in batch.values() if isinstance(part, Tensor))
    if isinstance(labels, Tensor) and labels.shape[:1] == (rows,) and not labels.is_floating_point():
        counts = labels.ne(_NO_LABEL).reshape(rows, -1).sum(1).float()
        if all(part.sum() for part in torch.split(counts, micro)):
            return counts / counts.sum()
    return torch.full((rows,), 1 / rows, device=first.device)
