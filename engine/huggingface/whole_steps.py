"""Steps that run as one, ``eng.train_batch``, since the stages of a pipeline have one schedule.

The Trainer gives its microbatches one by one; they wait here until the step is complete. Its loss is that of the host:
summed over the step's microbatches and averaged over data ranks, where the engine averages over both.

    rows or microbatches that lack at the end of an epoch     are copies without labels, whose loss, a sum, is zero
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engine.errors import EngineError

if TYPE_CHECKING:  # importing accelerate takes a second, and this module needs none of it
    from engine.huggingface.accelerator import EngineAccelerator

_COUNT = "num_items_in_batch"
_NO_LABEL = -100

OwnLoss = Callable[[Any, Tensor | None, Tensor | None], Tensor]
"""``(output, labels, number of items) -> loss``, in place of the model's own."""


class WholeSteps:
    """The unfinished step of a Trainer over a pipeline."""

    def __init__(self, args: Any, accelerator: "EngineAccelerator", own_loss: OwnLoss | None, counts: bool) -> None:
        """``counts``: the loss is divided by the number of items of the step, which it is given."""
        self._accelerator, self._own_loss, self._counts = accelerator, own_loss, counts
        self._accumulation, self._micro = args.gradient_accumulation_steps, args.per_device_train_batch_size
        over_ranks = accelerator.num_processes if args.average_tokens_across_devices else 1
        self._factor = self._accumulation * over_ranks
        """By what a loss over the number of items is multiplied, so that the engine's average is the host's sum."""
        self._waiting: list[dict[str, Any]] = []

    def microbatch(self, inputs: Mapping[str, Any], count: Any) -> dict[str, Any]:
        """What the engine is given of a microbatch; ``count``: the number of items of the step, if it is known."""
        if count is None or not self._counts or "labels" not in inputs:
            return dict(inputs)
        items = torch.as_tensor(count, dtype=torch.float32, device=self._accelerator.device)
        return {**inputs, _COUNT: items if self._own_loss is not None else items / self._factor}

    def inputs(self, microbatch: Mapping[str, Any]) -> dict[str, Any]:
        """What the model is given where the loss is not its own."""
        return {key: value for key, value in microbatch.items() if key not in ("labels", _COUNT)}

    def loss(self, output: Any, microbatch: Mapping[str, Any]) -> Tensor:
        """The loss of a microbatch on the last stage where it is not the model's own."""
        assert self._own_loss is not None
        count = microbatch.get(_COUNT)
        loss = self._own_loss(output, microbatch.get("labels"), count)
        return loss if count is None else loss * self._factor

    def add(self, inputs: Mapping[str, Any], count: Any) -> Tensor | None:
        """Take a microbatch; the loss of the step after its last one, whose update is then made.

        Raises:
            EngineError: the end of the epoch lacks rows, and the loss is a mean over those that are there.
        """
        self._waiting.append(self._filled(self.microbatch(inputs, count)))
        if not self._accelerator.sync_gradients:
            return None
        microbatches, self._waiting = self._waiting, []
        if lacking := self._accumulation - len(microbatches):
            if _COUNT not in microbatches[0]:
                raise _incomplete(f"{len(microbatches)} of {self._accumulation} microbatches")
            microbatches += [_without_labels(microbatches[0])] * lacking
        report = self._accelerator.trained.train_batch(iter(microbatches))
        self._accelerator.record(report)
        return torch.tensor(report.loss, device=self._accelerator.device)

    def _filled(self, microbatch: dict[str, Any]) -> dict[str, Any]:
        """``microbatch`` with as many rows as every other, of which the further ones have no labels."""
        rows = next((len(part) for part in microbatch.values() if isinstance(part, Tensor) and part.ndim), 0)
        if rows in (0, self._micro):
            return microbatch
        if _COUNT not in microbatch:
            raise _incomplete(f"a microbatch of {rows} of {self._micro} rows")
        cut = {key: part for key, part in microbatch.items() if isinstance(part, Tensor) and part.ndim}
        more = {key: part[:1].expand(self._micro - rows, *part.shape[1:]) for key, part in cut.items()}
        return microbatch | {key: torch.cat([cut[key], part]) for key, part in _without_labels(more).items()}


def _incomplete(what: str) -> EngineError:
    return EngineError(
        f"the last step of the epoch has {what}, and a pipeline's step has all of them, while its loss is a mean that "
        "none can be added to; give dataloader_drop_last=True and a dataset of whole steps, or max_steps."
    )


def _without_labels(microbatch: Mapping[str, Any]) -> dict[str, Any]:
    """A microbatch whose loss, a sum, is zero."""
    return {**microbatch, "labels": torch.full_like(microbatch["labels"], _NO_LABEL)}
