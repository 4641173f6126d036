"""Module that the training loop of another library calls in place of the model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from engine.checkpoint.format.filesystem import Files
from engine.checkpoint.format.step_folders import retain
from engine.engine import Engine
from engine.parallel.comm.agreement import all_or_none
from engine.parallel.tensor.logits.sharded_logits import gather_logits
from engine.program.forward_inputs import batch_of_call
from engine.program.program import outside_inference_mode


class HostedModel(nn.Module):
    """Module that another library's training loop calls in place of the model; forwards run on the engine.

    Attributes that it lacks come from the model. With pipeline parallelism, every rank gets the output. In a loop that
    trains with the engine's ``train_batch``, ``forward`` is only for evaluation.
    """

    def __init__(
        self, trained: Engine, rows: int | None = None, whole_steps: bool = False, shifts: bool | None = None
    ) -> None:
        """Takes ``rows``, see :meth:`Engine.open_pipeline`; ``whole_steps``: the loop trains by ``eng.train_batch``;
        and ``shifts``: True if the model's loss skips the first label of each row, as in a causal language model;
        None: unknown.
        """
        super().__init__()
        self.module = trained.module
        self.trained, self._shifts = trained, shifts
        self._predicts = whole_steps
        if trained.config.pp > 1 and not whole_steps:
            trained.open_pipeline(rows)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    @outside_inference_mode()
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the model's output for the rows of this data-parallel rank, on all pipeline stages."""
        if torch.is_grad_enabled():
            return self.trained(*args, **kwargs)
        if not self._predicts:
            return gather_logits(self.trained(*args, **kwargs))
        batch = batch_of_call(self.module, args, kwargs)
        self.trained.complete(batch)
        rows, micro = self.trained.batch_rows, self.trained.config.micro or 1
        count = rows.count(batch)
        if rows.whole_names(batch):
            micro = max(count, 1)  # image patches belong to rows, and only the collator could split them
        if not isinstance(batch, Mapping):
            return self.trained.predict(batch, micro)
        shares = row_shares(batch, count, bool(self._shifts))
        if self._shifts is None and not torch.allclose(shares, row_shares(batch, count, True)):
            micro = max(count, 1)  # losses of parts could not be weighed
        return with_one_loss(self.trained.predict(with_share(batch, shares), micro), shares, micro)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients accumulated since the last update; ``set_to_none`` has no effect."""
        self.trained.zero_grad()


_COUNT = "num_items_in_batch"
_NO_LABEL = -100


def with_share(batch: Mapping[str, Any], shares: Tensor) -> Mapping[str, Any]:
    """Returns a copy of ``batch`` in which "num_items_in_batch" is divided among the rows, as a tensor [rows].

    A batch without this entry is returned itself. ``shares``: result of :func:`row_shares`.
    """
    if batch.get(_COUNT) is None:
        return batch
    positive = shares.clamp(min=torch.finfo(shares.dtype).eps)  # the loss is divided by it
    return {**batch, _COUNT: torch.as_tensor(batch[_COUNT], device=shares.device) * positive}


def with_one_loss(output: Any, shares: Tensor, micro: int) -> Any:
    """Replaces ``output["loss"]``, which has one loss per microbatch, by the loss of the whole batch; returns
    ``output``, changed in place.

    An output without a loss per microbatch is unchanged.

    Args:
        shares: result of :func:`row_shares`, which weighs the microbatches.
        micro: number of rows of a microbatch.
    """
    losses = output.get("loss") if isinstance(output, Mapping) else None
    if losses is None or not losses.ndim:
        return output
    weights = torch.stack([part.sum() for part in torch.split(shares, micro)]).to(losses.device)
    output["loss"] = torch.where(weights > 0, losses * weights, 0).sum()  # a mean over no label is nan
    return output


def row_shares(batch: Mapping[str, Any], rows: int, shifts: bool) -> Tensor:
    """Returns each row's share in the loss of the batch [rows], fp32 with sum 1.

    Shares are proportional to the rows' numbers of labels; without any label, all rows have equal shares. With
    ``shifts``, the first label of each row does not count. "shift_labels" are counted in place of "labels".
    """
    labels = batch.get("shift_labels", batch.get("labels"))
    if isinstance(labels, Tensor) and labels.shape[:1] == (rows,) and not labels.is_floating_point():
        counted = labels[..., 1:] if shifts and labels.ndim > 1 and "shift_labels" not in batch else labels
        counts = counted.ne(_NO_LABEL).reshape(rows, -1).sum(1).float()
        if counts.any():
            return counts / counts.sum()
    return torch.full((rows,), 1 / max(rows, 1))


def remove_earlier_saves(trained: Engine, saved: Path) -> None:
    """Deletes the engine's other checkpoints beside ``saved``, which earlier saves of a loop under the same name have
    left. Collective; a failure on rank 0 raises EngineError on all ranks.
    """
    with all_or_none(trained.comm, trained.device, f"could not remove an earlier save from {saved.parent.parent}"):
        if trained.grid.rank == 0:
            retain(Files(), saved.parent, 1)
