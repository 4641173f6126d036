"""Module that the training loop of another library calls in place of the model."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from engine.engine import Engine
from engine.parallel.tensor.logits.sharded_logits import gather_logits


class HostedModel(nn.Module):
    """Module that another library's training loop calls in place of the model; forwards run on the engine.

    Attributes that it lacks come from the model. With pipeline parallelism, every rank gets the output. In a loop that
    trains with the engine's ``train_batch``, ``forward`` is only for evaluation.
    """

    def __init__(self, trained: Engine, rows: int | None = None, whole_steps: bool = False) -> None:
        """Takes ``rows``, see :meth:`Engine.open_pipeline`, and ``whole_steps``: the loop trains by
        ``eng.train_batch``."""
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
        """Returns the model's output for the rows of this data-parallel rank, on all pipeline stages."""
        if torch.is_inference_mode_enabled():  # tensors that the engine creates lazily would never have gradients
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
            micro = max(count, 1)  # image patches belong to rows, and only the collator could split them
        return with_one_loss(self.trained.predict(with_share(batch, count, micro), micro), batch, count, micro)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients accumulated since the last update; ``set_to_none`` has no effect."""
        self.trained.zero_grad()


_COUNT = "num_items_in_batch"
_NO_LABEL = -100


def with_share(batch: Any, rows: int, micro: int) -> Any:
    """Returns a copy of ``batch`` in which "num_items_in_batch" is divided among the rows, as a tensor [rows].

    The shares are proportional to the rows' numbers of labels. If any microbatch has no labels, all rows of the batch
    have equal shares.

    A batch without this entry is returned itself.

    Args:
        rows: number of rows of the batch.
        micro: number of rows of a microbatch.
    """
    if not isinstance(batch, Mapping) or batch.get(_COUNT) is None:
        return batch
    shares = _row_shares(batch, rows, micro)
    return {**batch, _COUNT: torch.as_tensor(batch[_COUNT], device=shares.device) * shares}


def with_one_loss(output: Any, batch: Any, rows: int, micro: int) -> Any:
    """Replaces ``output["loss"]``, which has one loss per microbatch, by the loss of the whole batch; returns
    ``output``, changed in place.

    The loss is the microbatches' mean, weighted by their numbers of labels. If any microbatch has no labels, the
    weights are numbers of rows. An output without a loss per microbatch is unchanged.

    Args:
        rows: number of rows of the batch.
        micro: number of rows of a microbatch.
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
    """Returns each row's share in the loss of the batch: by labels if every microbatch has some, else by rows."""
    labels = batch.get("labels")
    first = next(part for part in batch.values() if isinstance(part, Tensor))
    if isinstance(labels, Tensor) and labels.shape[:1] == (rows,) and not labels.is_floating_point():
        counts = labels.ne(_NO_LABEL).reshape(rows, -1).sum(1).float()
        if all(part.sum() for part in torch.split(counts, micro)):
            return counts / counts.sum()
    return torch.full((rows,), 1 / rows, device=first.device)
