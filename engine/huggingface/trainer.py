"""``transformers.Trainer`` with a model on the engine.

transformers provides loop, data, logs, callbacks, optimizer and schedule. The subclass overrides accelerator, wrapped
model, step and checkpoints.

    checkpoint-N/                  weights, configuration and tokenizer for from_pretrained, transformers' files
    checkpoint-N/engine/step-N/    the engine's checkpoint, which a run resumes from on any grid

On a pipeline, a step is one ``eng.train_batch`` over the stored microbatches. Its loss equals transformers', also for a
model that receives the number of items:

    transformers    sums microbatches, and multiplies each by the number of data ranks, over which it is averaged
    engine          averages over microbatches and data ranks, so each loss is multiplied by both numbers

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
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import transformers
from torch import nn

from engine.api import initialize
from engine.config import ConfigSource, load_config, load_raw
from engine.engine import Engine
from engine.errors import CheckpointError, ConfigError
from engine.hosting.arguments import (
    GENERATING,
    checked_metrics,
    refuse_arguments,
    refuse_best_metric,
    refuse_trl,
    refuse_unlike,
    settled,
)
from engine.hosting.hosted_model import HostedModel
from engine.huggingface.accelerator import EngineAccelerator
from engine.huggingface.trl_loop import TrlLoop, plan_inputs
from engine.parallel.model.adapters import is_peft_model
from engine.program.batch_rows import Name

_COUNT = "num_items_in_batch"
_LACKS = "the host has no such microbatch"
"""Key of a microbatch with a loss that is multiplied by zero."""
_NO_LABEL = -100

OwnLoss = Callable[[Any, Tensor | None, Tensor | None], Tensor]
"""Loss function ``(output, labels, number of items) -> loss`` that replaces the model's."""


class WholeSteps:
    """Training steps of transformers' Trainer on a pipeline: stores the microbatches of a step, then runs all in one
    ``train_batch``.
    """

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
        """True if the method ``loss`` of this object must replace the model's own loss."""
        return self._own_loss is not None or self._counts or bool(self._summed)

    def drop(self) -> None:
        """Drops the microbatches of a step that has not run, such as those before an interrupt."""
        self._waiting.clear()

    def microbatch(self, inputs: Mapping[str, Any], count: Any) -> dict[str, Any]:
        """Returns ``inputs``, a batch of the Trainer's loop, as a microbatch for the engine.

        ``count``, the number of items (label tokens) of the whole step, is added if the loss needs it.
        """
        if count is None or not self._counts or "labels" not in inputs:
            return dict(inputs)
        return {**inputs, _COUNT: torch.as_tensor(count, dtype=torch.float32, device=self._accelerator.device)}

    def inputs(self, microbatch: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the keyword arguments of the model's forward, from a dict that the method :meth:`microbatch` has
        returned.

        ``labels`` are left out if the user's loss function replaces the model's loss.
        """
        if self._own_loss is not None:
            return {key: value for key, value in microbatch.items() if key not in ("labels", _COUNT, _LACKS)}
        given = {key: value for key, value in microbatch.items() if key != _LACKS}
        return given | {_COUNT: given[_COUNT].sum()} if _COUNT in given else given  # in evaluation by row

    def loss(self, output: Any, microbatch: Mapping[str, Any]) -> Tensor:
        """Returns the 0-dim loss of a microbatch, scaled so that the mean over the step's microbatches equals the loss
        of transformers' Trainer.

        Args:
            output: output of the model's last pipeline stage.
            microbatch: dict that the method :meth:`microbatch` has returned.
        """
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
        """Stores a microbatch and returns None; the last microbatch of a step runs the step, and returns its 0-dim
        loss.

        In an epoch's last step, copies of present rows replace missing ones, without effect on the loss.

        Args:
            inputs: batch of the Trainer's loop.
            count: number of items (label tokens) in the whole step; None: unknown.

        Raises:
            EngineError: the epoch ends in an incomplete step that cannot be filled up, for example because ``count`` is
                None.
        """
        self._waiting.append(self._filled(self.microbatch(inputs, count)))
        if not self._accelerator.sync_gradients:
            return None
        microbatches, self._waiting = self._waiting, []
        if lacking := self._accumulation - len(microbatches):
            if _COUNT not in microbatches[0]:
                raise self._incomplete(f"{len(microbatches)} of {self._accumulation} microbatches")
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
            raise self._incomplete(f"a microbatch of {rows} of {self._micro} rows")
        cut = {key: part for key, part in microbatch.items() if isinstance(part, Tensor) and part.ndim}
        more = {key: part[:1].expand(self._micro - rows, *part.shape[1:]) for key, part in cut.items()}
        filled = microbatch | {key: torch.cat([cut[key], part]) for key, part in _without_labels(more).items()}
        if self._fills is None:
            self._fills = self._is_sum(filled)
        if not self._fills:
            raise self._incomplete(f"a microbatch of {rows} of {self._micro} rows")
        return filled

    def _incomplete(self, what: str) -> EngineError:
        rows = self._accumulation * self._micro * self._accelerator.num_processes
        return EngineError(
            f"the last step of the epoch has {what}, but a pipeline runs full steps only, and added rows would change "
            f"this loss, which averages over rows; use a dataset of a multiple of {rows} rows, or set max_steps so "
            "that training ends before this step."
        )

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


def _without_parts(tensor: Tensor) -> Tensor:
    """Returns an output without the dim of microbatches that a prediction adds to a 0-dim output."""
    return tensor[0] if tensor.shape == (1,) else tensor


def _without_labels(microbatch: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a microbatch with a loss of zero, if the loss is a sum over labels."""
    return {**microbatch, "labels": torch.full_like(microbatch["labels"], _NO_LABEL)}


_STATE = "engine"
"""Folder of the engine's checkpoint inside the host's."""
_SCHEDULE = "schedule"


class Trainer(TrlLoop):
    """``transformers.Trainer`` that trains its model on the engine. Batch sizes, precision, optimizer, schedule and
    clipping come from ``TrainingArguments``; ``per_device_train_batch_size`` is the rows of a data rank's microbatch.

    Without a pipeline, a subclass may add a TRL trainer: ``class Tuner(Trainer, trl.GRPOTrainer)``.

    With a pipeline, the callback ``on_pre_optimizer_step`` is called after the update, unless a subclass overrides
    ``compute_loss`` or ``training_step``; the pipeline then runs one microbatch at a time.

    Args:
        engine_config: grid of ranks, ZeRO and other settings, as a dict or the path of a file.
        whole: names of the tensors in a batch that are not divided into rows, such as image patches.

    Raises:
        ConfigError: the configuration contradicts the arguments, or an argument shards the model.
    """

    def __init__(
        self, *args: Any, engine_config: ConfigSource, whole: Name | Sequence[Name] = (), **kwargs: Any
    ) -> None:
        given = (each for each in (*args, *kwargs.values()) if isinstance(each, transformers.TrainingArguments))
        refuse_trl(self.trl_kind(), kwargs, next(given, None))
        model = args[0] if args else kwargs.get("model")
        if self.trl_kind() is None and isinstance(model, str):
            raise ConfigError(
                f"Trainer was given model {model!r}, a name, but trains a module; pass "
                "AutoModelForCausalLM.from_pretrained of it."
            )
        self._raw, self._whole = load_raw(engine_config), whole
        self._steps: WholeSteps | None = None
        self._parameters = 0
        """Parameters of the full model without embeddings; counted before the engine places it."""
        with self._making_trl():
            super().__init__(*args, **kwargs)
        if self.compute_metrics is not None:
            self.compute_metrics = checked_metrics(self.compute_metrics)
        self._check_rewards()
        self._check_reference()

    @property
    def engine(self) -> Engine:
        """Engine that trains the model, made when training or evaluation begins.

        Raises:
            EngineError: neither has begun.
        """
        return self.accelerator.trained

    # ------------------------------------------------------------------ placing

    def create_accelerator_and_postprocess(self) -> None:
        """Sets ``self.accelerator`` to an accelerator that runs on the engine. The constructor of transformers' Trainer
        calls it.

        Raises:
            ConfigError: one of the ``TrainingArguments`` does not fit the engine.
        """
        refuse_arguments(self.args)
        super().create_accelerator_and_postprocess()
        config = load_config(settled(self._raw, self.args), self.args.world_size)
        self.accelerator = EngineAccelerator.around(self.accelerator, config.grid(self.args.process_index))
        self.gather_function = self.accelerator.gather_for_metrics
        self.accelerator.whole_steps = config.pp > 1 and not self._has_own_steps()
        self._check_trl(config)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Does nothing: the engine moves each rank's shards."""

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        hosted = self.accelerator.hosted
        if training and self._steps is not None:
            self._steps.drop()
        if hosted is not None and hosted.module is self.model:
            return hosted
        if hosted is not None:
            hosted.trained.close()  # model_init has made another model
        self.accelerator.hosted = self._place()
        return self.accelerator.hosted

    def _place(self) -> HostedModel:
        """Places the model on the grid, with the host's optimizer."""
        model: Any = self.model
        if hasattr(model, "num_parameters"):
            self._parameters = model.num_parameters(exclude_embeddings=True)
        optimizer: Any = self.create_optimizer()
        config, own = settled(self._raw, self.args), self._own_loss()
        if self.accelerator.whole_steps:
            given = self.compute_loss_func is not None
            scaled = getattr(self, "loss_is_scaled_for_ga", None)  # absent before transformers 5.23
            summed = True if scaled is None and given else scaled
            counts = bool(self.model_accepts_loss_kwargs) or given
            self._steps = WholeSteps(self.args, self.accelerator, own, counts, summed)
        self._prepare_trl_model(model)
        example = self._example()
        if self._steps is None or not self._steps.scales:
            placed = initialize(model, config, None, example, optimizer, whole=self._whole)
        else:
            loss, inputs = self._steps.loss, self._steps.inputs
            placed = initialize(model, config, loss, example, optimizer, inputs=inputs, whole=self._whole)
        rows = {name: _rows(getattr(self, name)) for name in ("train_dataset", "eval_dataset")}
        refuse_unlike(self.args, rows, placed.comm, placed.device)
        known = self._loss_shifts_labels or getattr(model, "loss_type", None) is not None
        shifts = self._loss_shifts_labels if known else None
        return HostedModel(placed, whole_steps=self.accelerator.whole_steps, shifts=shifts)

    def _example(self) -> Any:
        """Returns the dataset's first microbatch for the plan; None if it is not needed or cannot be indexed."""
        of_trl = self.trl_kind()
        if of_trl in GENERATING:  # generates before its first forward
            return self._plan_tokens()
        dataset: Any = self.train_dataset if self.train_dataset is not None else self.eval_dataset
        rows = self.args.per_device_train_batch_size
        if self.accelerator.grid.size("replica") == 1:
            return None
        indexed = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__") and not isinstance(dataset, Mapping)
        if not indexed or len(dataset) < rows:
            return None if of_trl is None else self._plan_tokens()
        with _unchanged_random_state():
            collate = self._get_collator_with_removed_columns(self.data_collator)
            inputs: Any = self._prepare_inputs(collate([dataset[index] for index in range(rows)]))
        if of_trl is not None:
            return plan_inputs(inputs)
        count = self._get_num_items_in_batch([inputs], self.args.device)
        if self._steps is not None:
            return self._steps.microbatch(inputs, count)
        counted = count is not None and self.model_accepts_loss_kwargs
        return dict(inputs) | ({"num_items_in_batch": count} if counted else {})

    def get_total_train_batch_size(self, args: Any) -> int:
        """Returns the number of rows in a training step, over all data ranks and microbatches."""
        return int(self._train_batch_size * args.gradient_accumulation_steps * self.accelerator.num_processes)

    def floating_point_ops(self, inputs: Any) -> int:
        """Returns an estimate of this rank's FLOPs of forward and backward for a microbatch; 0 if ``inputs`` lacks the
        model's main input, such as ``input_ids``.
        """
        name = getattr(self.model, "main_input_name", "input_ids")
        main: Any = inputs.get(name) if isinstance(inputs, Mapping) else None  # TRL's prompts are a list
        if main is None:
            return 0
        return int(6 * main.numel() * self._parameters / self.accelerator.grid.size("replica"))

    # ------------------------------------------------------------------ a step

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Runs forward and backward of the microbatch ``inputs``, and returns its 0-dim loss.

        On a pipeline, the last microbatch of a step runs the whole step, with the update, and returns its loss; earlier
        calls return 0.

        Args:
            num_items_in_batch: number of label tokens in the whole step; None: unknown.
        """
        if self._steps is None:
            return super().training_step(model, inputs, num_items_in_batch)
        model.train()
        found = self._steps.add(self._prepare_inputs(inputs), num_items_in_batch)
        return torch.zeros((), device=self.args.device) if found is None else found

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        """Returns the tensor of the step's norm, which the engine fills when it clips and updates."""
        return self.accelerator.grad_norm

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Tensor:
        return self.accelerator.grad_norm

    def _own_loss(self) -> OwnLoss | None:
        """Returns the loss in place of the model's: ``compute_loss_func``, or label smoothing."""
        given, smoother = self.compute_loss_func, self.label_smoother
        if given is not None:
            return lambda output, labels, count: given(output, labels, num_items_in_batch=count)
        if smoother is None:
            return None
        shifts = bool(self._loss_shifts_labels)
        return lambda output, labels, count: smoother(output, labels, shift_labels=shifts, num_items_in_batch=count)

    def _has_own_steps(self) -> bool:
        """Returns True if a subclass overrides the loss or the step."""
        names = ("compute_loss", "training_step")
        owners = (next(kind for kind in type(self).__mro__ if name in vars(kind)) for name in names)
        return any(owner not in (Trainer, transformers.Trainer) for owner in owners)

    # ------------------------------------------------------------------ checkpoints

    def _determine_best_metric(self, metrics: dict[str, Any], trial: Any) -> bool:
        refuse_best_metric(self.args, metrics)
        return bool(super()._determine_best_metric(metrics, trial))

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes the full model, as ``from_pretrained`` reads it, and the Trainer's tokenizer or processor into
        ``output_dir``. Collective.

        Writes only the adapters of a ``PeftModel``, and only the state dict of a model that is not of transformers. If
        ``TrainingArguments.push_to_hub`` is set, also pushes the model to the hub.
        """
        if self.accelerator.hosted is None:
            super().save_model(output_dir, _internal_call)
            return
        folder = output_dir if output_dir is not None else str(self.args.output_dir)
        model: Any = self.model
        if isinstance(model, transformers.PreTrainedModel) or is_peft_model(model):
            self.engine.save_pretrained(folder)
            if self.args.should_save:
                self._save_beside_weights(folder)
        else:
            state = self.engine.full_state_dict()
            if self.args.should_save:
                self._save(folder, state_dict=state)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_beside_weights(self, folder: str) -> None:
        processing: Any = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if processing is not None:
            processing.save_pretrained(folder)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        schedule: Any = self.lr_scheduler
        self.engine.save_checkpoint(Path(output_dir, _STATE), {_SCHEDULE: schedule.state_dict()}).wait()

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Checks the folder; weights and optimizer state are read once the model is placed."""
        if not Path(resume_from_checkpoint, _STATE).is_dir():
            raise CheckpointError(
                f'{resume_from_checkpoint} has no subfolder "{_STATE}", from which training restores the state of the '
                "engine; pass a checkpoint that this Trainer has written without save_only_model=True."
            )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        found: Any = self.engine.load_checkpoint(Path(checkpoint, _STATE))
        schedule: Any = self.lr_scheduler
        schedule.load_state_dict(found[_SCHEDULE])
        for group, rate in zip(schedule.optimizer.param_groups, schedule.get_last_lr(), strict=True):
            group["lr"] = rate

    def _save_scaler(self, output_dir: str) -> None:
        """Does nothing: the engine's checkpoint has its loss scale."""

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Does nothing, like :meth:`_save_scaler`."""

    def _load_best_model(self) -> None:
        best: Any = self.state.best_model_checkpoint
        self.engine.load_checkpoint(Path(os.fspath(best), _STATE), load_module_only=True)


def _rows(dataset: Any) -> int | None:
    """Returns the number of rows; None for a dataset without a length."""
    return len(dataset) if hasattr(dataset, "__len__") else None


@contextmanager
def _unchanged_random_state() -> Iterator[None]:
    """Restores the random state, so that reading the example draws no number that training would draw."""
    kept = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(kept[0])
            np.random.set_state(kept[1])
