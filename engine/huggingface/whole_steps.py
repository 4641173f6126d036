"""Steps that run as one call, ``eng.train_batch``, because the stages of a pipeline have one schedule.

The Trainer passes its microbatches one by one, and they wait here until the step is complete. The step's loss equals
the host's, also for a model that takes the number of items and does not divide by it:

    host      sums microbatches, and multiplies each by the number of data ranks, over which it is averaged
    engine    averages over microbatches and data ranks, so each loss is multiplied by both numbers

    missing rows at the end of an epoch            are copies without labels, if the loss is a sum over labels
    missing microbatches at the end of an epoch    are copies with a loss multiplied by zero
"""

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from engine.errors import EngineError
from engine.program.loss import find_loss

if TYPE_CHECKING:  # importing accelerate takes a second, and this module does not need it
    from engine.huggingface.accelerator import EngineAccelerator

_COUNT = "num_items_in_batch"
_LACKS = "the host has no such microbatch"
"""Key of a microbatch with a loss that is multiplied by zero."""
_NO_LABEL = -100

OwnLoss = Callable[[Any, Tensor | None, Tensor | None], Tensor]
"""``(output, labels, number of items) -> loss``, in place of the model's own."""


class WholeSteps:
    """Unfinished step of a Trainer over a pipeline."""

    def __init__(
        self,
        args: Any,
        accelerator: "EngineAccelerator",
        own_loss: OwnLoss | None,
        counts: bool,
        summed: bool | None = None,
    ) -> None:
        """Starts without a microbatch.

        Args:
            args: the TrainingArguments.
            accelerator: the accelerator of the engine that makes the step.
            own_loss: loss in place of the model's.
            counts: True if model and loss take the number of items of the step.
            summed: True if the host sums losses over microbatches, False if it averages; None: it sums if it counts.
        """
        self._accelerator, self._own_loss, self._counts, self._summed = accelerator, own_loss, counts, summed
        self._accumulation, self._micro = args.gradient_accumulation_steps, args.per_device_train_batch_size
        self._over_ranks = accelerator.num_processes if args.average_tokens_across_devices else 1
        self._waiting: list[dict[str, Any]] = []
        self._fills: bool | None = None
        """True if rows without labels add nothing to the loss; None: unknown."""

    @property
    def scales(self) -> bool:
        """True if the loss of a microbatch is not the model's unchanged, so the engine needs :meth:`loss`."""
        return self._own_loss is not None or self._counts or bool(self._summed)

    def microbatch(self, inputs: Mapping[str, Any], count: Any) -> dict[str, Any]:
        """Returns the microbatch for the engine; ``count``: the number of items of the step, None if unknown."""
        if count is None or not self._counts or "labels" not in inputs:
            return dict(inputs)
        return {**inputs, _COUNT: torch.as_tensor(count, dtype=torch.float32, device=self._accelerator.device)}

    def inputs(self, microbatch: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the inputs of the model: without labels if the loss is not its own."""
        if self._own_loss is not None:
            return {key: value for key, value in microbatch.items() if key not in ("labels", _COUNT, _LACKS)}
        given = {key: value for key, value in microbatch.items() if key != _LACKS}
        return given | {_COUNT: given[_COUNT].sum()} if _COUNT in given else given  # in evaluation by row

    def loss(self, output: Any, microbatch: Mapping[str, Any]) -> Tensor:
        """Returns the loss of a microbatch on the last stage, multiplied so that the engine's mean is the host's
        loss."""
        count, loss = microbatch.get(_COUNT), self._plain_loss(output, microbatch)
        if _LACKS in microbatch:
            return loss * 0
        summed = count is not None if self._summed is None else self._summed
        return loss * ((self._accumulation if summed else 1) * (self._over_ranks if count is not None else 1))

    def _plain_loss(self, output: Any, microbatch: Mapping[str, Any]) -> Tensor:
        if self._own_loss is None:
            return find_loss(output, microbatch, None).sum
        return self._own_loss(output, microbatch.get("labels"), microbatch.get(_COUNT))

    def add(self, inputs: Mapping[str, Any], count: Any) -> Tensor | None:
        """Adds a microbatch; after the last one it runs the step, updates, and returns the step's loss.

        Raises:
            EngineError: the epoch ends without enough rows, and the loss is a mean over the present ones.
        """
        self._waiting.append(self._filled(self.microbatch(inputs, count)))
        if not self._accelerator.sync_gradients:
            return None
        microbatches, self._waiting = self._waiting, []
        if lacking := self._accumulation - len(microbatches):
            if _COUNT not in microbatches[0]:
                raise _incomplete(f"{len(microbatches)} of {self._accumulation} microbatches")
            microbatches += [microbatches[0] | {_LACKS: True}] * lacking
        report = self._accelerator.trained.train_batch(iter(microbatches))
        self._accelerator.record(report)
        return torch.tensor(report.loss, device=self._accelerator.device)

    def _filled(self, microbatch: dict[str, Any]) -> dict[str, Any]:
        """Returns ``microbatch`` filled up to full size with rows without labels."""
        known = self._accelerator.trained.batch_rows
        rows = known.count(microbatch)
        if rows in (0, self._micro):
            return microbatch
        if others := known.whole_names(microbatch):
            raise EngineError(
                f"the last step of the epoch has a microbatch of {rows} of {self._micro} rows, and it cannot be filled "
                f"up, because {others[0]} has no rows of the batch; set dataloader_drop_last=True."
            )
        if _COUNT not in microbatch:
            raise _incomplete(f"a microbatch of {rows} of {self._micro} rows")
        cut = {key: part for key, part in microbatch.items() if isinstance(part, Tensor) and part.ndim}
        more = {key: part[:1].expand(self._micro - rows, *part.shape[1:]) for key, part in cut.items()}
        filled = microbatch | {key: torch.cat([cut[key], part]) for key, part in _without_labels(more).items()}
        if self._fills is None:
            self._fills = self._is_sum(filled)
        if not self._fills:
            raise _incomplete(f"a microbatch of {rows} of {self._micro} rows")
        return filled

    def _is_sum(self, microbatch: dict[str, Any]) -> bool:
        """Returns True if the loss is a sum over labels, divided by the number of items. Collective.

        A model may take the number and ignore it, or use it in a part of its loss, which no signature shows.
        """
        engine, losses = self._accelerator.trained, []
        for times in (1, 2):
            asked = microbatch | {_COUNT: microbatch[_COUNT] * times}
            output = tree_map_only(Tensor, _without_parts, engine.predict(self.inputs(asked)))
            losses.append(float(self._plain_loss(output, asked)))
        return math.isclose(losses[0], 2 * losses[1], rel_tol=1e-6)


def _incomplete(what: str) -> EngineError:
    return EngineError(
        f"the last step of the epoch has {what}, but a pipeline's step needs all of them, and nothing can be added to "
        "its loss, a mean; set dataloader_drop_last=True and use a dataset of whole steps, or max_steps."
    )


def _without_parts(tensor: Tensor) -> Tensor:
    """Returns an output without the dim of microbatches that a prediction adds to a 0-dim output."""
    return tensor[0] if tensor.shape == (1,) else tensor


def _without_labels(microbatch: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a microbatch with a loss of zero, if the loss is a sum over labels."""
    return {**microbatch, "labels": torch.full_like(microbatch["labels"], _NO_LABEL)}
