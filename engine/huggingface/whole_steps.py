"""Steps that run as one, ``eng.train_batch``, since the stages of a pipeline have one schedule.

The Trainer gives its microbatches one by one; they wait here until the step is complete. Its loss is that of the host:
summed over the step's microbatches and averaged over data ranks, where the engine averages over both.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from engine.accelerate.accelerator import Accelerator, Placing
from engine.errors import EngineError

_COUNT = "num_items_in_batch"


class WholeSteps:
    """The unfinished step of a Trainer over a pipeline."""

    def __init__(self, trainer: Any, accelerator: Accelerator) -> None:
        self._trainer, self._accelerator = trainer, accelerator
        self._accumulation = int(trainer.args.gradient_accumulation_steps)
        counted = trainer.args.average_tokens_across_devices
        self._factor = self._accumulation * (accelerator.num_processes if counted else 1)
        """By what a loss over the number of items is multiplied, so that the engine's average is the host's sum."""
        self._waiting: list[dict[str, Any]] = []

    def placing(self, example: Mapping[str, Any] | None) -> Placing:
        """The loss of the stages: the model's own, that of ``compute_loss_func``, or label smoothing."""
        sample = self._microbatch(example, torch.ones(())) if example is not None else None
        if self._own_loss:
            return Placing(loss_fn=self._loss, inputs=self._given, example=sample)
        return Placing(example=sample)

    def add(self, inputs: Mapping[str, Any], count: Any) -> Tensor | None:
        """Take a microbatch; the mean loss of the step after its last one, whose update is then made.

        Raises:
            EngineError: the last step of an epoch lacks microbatches, and the loss is a mean, so none can be added.
        """
        self._waiting.append(self._microbatch(inputs, count))
        if not self._accelerator.sync_gradients:
            return None
        microbatches, self._waiting = self._waiting, []
        lacking = self._accumulation - len(microbatches)
        if lacking and _COUNT not in microbatches[0]:
            raise EngineError(
                f"the last step of the epoch has {len(microbatches)} of {self._accumulation} microbatches, and a "
                "pipeline's step has all of them; give dataloader_drop_last and a dataset of whole steps, or max_steps."
            )
        microbatches += [_without_labels(microbatches[0])] * lacking
        report = self._accelerator._running("training_step").train_batch(iter(microbatches))
        self._accelerator.heard(report)
        return torch.tensor(report.loss, device=self._accelerator.device)

    @property
    def _own_loss(self) -> bool:
        return self._trainer.compute_loss_func is not None or self._trainer.label_smoother is not None

    def _microbatch(self, inputs: Mapping[str, Any], count: Any) -> dict[str, Any]:
        takes = self._trainer.model_accepts_loss_kwargs or self._trainer.compute_loss_func is not None
        if count is None or not takes or "labels" not in inputs:
            return dict(inputs)
        count = torch.as_tensor(count, dtype=torch.float32, device=self._accelerator.device)
        return {**inputs, _COUNT: count if self._own_loss else count / self._factor}

    def _given(self, microbatch: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in microbatch.items() if key not in ("labels", _COUNT)}

    def _loss(self, output: Any, microbatch: Mapping[str, Any]) -> Tensor:
        trainer, count = self._trainer, microbatch.get(_COUNT)
        if trainer.compute_loss_func is not None:
            loss = trainer.compute_loss_func(output, microbatch.get("labels"), num_items_in_batch=count)
        else:
            shifts = bool(trainer._loss_shifts_labels)
            loss = trainer.label_smoother(output, microbatch["labels"], shift_labels=shifts, num_items_in_batch=count)
        return loss if count is None else loss * self._factor


def _without_labels(microbatch: Mapping[str, Any]) -> dict[str, Any]:
    """A microbatch whose loss, a sum, is zero."""
    return {**microbatch, "labels": torch.full_like(microbatch["labels"], -100)}
