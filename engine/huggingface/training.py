"""``transformers.Trainer`` whose model is on the grid of an engine.

The host keeps its loop, data, logs, callbacks, optimizer and schedule. What is the engine's is entered where the host
lets its subclasses enter: the accelerator, the wrapped model, the step, and checkpoints.

    checkpoint-N/                  weights, configuration and tokenizer for from_pretrained, the host's own files
    checkpoint-N/engine/step-N/    the engine's checkpoint, from which a run goes on on any grid
"""

import copy
import os
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import engine
from engine.accelerate.accelerator import FOLDER, Accelerator, Placing, set_rates
from engine.config import ConfigSource, load_raw
from engine.errors import CheckpointError, ConfigError
from engine.hosts.hosted_model import HostedModel
from engine.huggingface.arguments import refuse_arguments, settled
from engine.huggingface.whole_steps import WholeSteps

_SCHEDULE = "scheduler.pt"


class EngineTraining:
    """What makes a subclass of ``transformers.Trainer`` train on an engine; it stands before that class."""

    args: Any
    model: Any
    accelerator: Any
    optimizer: Any
    lr_scheduler: Any

    def __init__(self, *args: Any, engine_config: ConfigSource, **kwargs: Any) -> None:
        self._raw = load_raw(engine_config)
        self._steps: WholeSteps | None = None
        super().__init__(*args, **kwargs)
        if self.accelerator.grid.pp > 1:
            self._refuse_own_loss()
            self._steps = WholeSteps(self, self.accelerator)

    @property
    def engine(self) -> engine.Engine:
        """The engine; it is made when training or evaluation begins."""
        return self._host_engine("engine")

    def _host_engine(self, call: str) -> engine.Engine:
        made: engine.Engine = self.accelerator._running(call)
        return made

    def _refuse_own_loss(self) -> None:
        for name in ("compute_loss", "training_step"):
            owner = next(kind for kind in type(self).__mro__ if name in vars(kind) and kind is not EngineTraining)
            if owner is not transformers.Trainer:
                raise ConfigError(
                    f"{owner.__name__}.{name} with parallel.pipeline {self.accelerator.grid.pp}: no stage alone has "
                    "the model's output; give compute_loss_func, or leave parallel.pipeline out."
                )

    # ------------------------------------------------------------------ placing

    def create_accelerator_and_postprocess(self) -> None:
        """Accelerate's object over the engine, in the place of the host's."""
        refuse_arguments(self.args)
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        self.accelerator = Accelerator.around(self.accelerator, settled(self._raw, self.args))
        gather = self.accelerator.gather_for_metrics
        self.gather_function = partial(gather, use_gather_object=self.args.eval_use_gather_object)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Nothing: the engine moves what a rank holds."""

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        if self.accelerator.engine is None:
            self.create_optimizer()  # type: ignore[attr-defined]
            example = self._example()
            placing = self._steps.placing(example) if self._steps is not None else Placing(example=example)
            self.accelerator.place(self.model, self.optimizer, placing)
        hosted: HostedModel = self.accelerator.hosted
        return hosted

    def _example(self) -> Any:
        """The first microbatch of the dataset, for the plan; None for data that cannot be indexed."""
        dataset = self.train_dataset if self.train_dataset is not None else self.eval_dataset  # type: ignore[attr-defined]
        if dataset is None or isinstance(dataset, IterableDataset | Mapping):
            return None
        if len(dataset) < self.args.per_device_train_batch_size:
            return None
        with _unchanged_random_state():
            loader = self._plain_loader(dataset)
            batch: Mapping[str, Any] = self._prepare_inputs(next(iter(loader)))  # type: ignore[attr-defined]
        batch = dict(batch)
        count = self._get_num_items_in_batch([batch], self.args.device)  # type: ignore[attr-defined]
        if count is not None and self.model_accepts_loss_kwargs:  # type: ignore[attr-defined]
            batch["num_items_in_batch"] = count
        return batch

    def _plain_loader(self, dataset: Any) -> DataLoader[Any]:
        """The host's loader, of which one batch is read, without workers and not cut over ranks."""
        described: Any = copy.copy(self)
        described.args = copy.copy(self.args)
        described.args.dataloader_num_workers = 0
        described.args.dataloader_persistent_workers = False
        described.args.dataloader_prefetch_factor = None
        described.accelerator = _Unprepared
        loader: DataLoader[Any] = described._get_dataloader(
            dataset, "Example", self.args.per_device_train_batch_size, torch.utils.data.SequentialSampler
        )
        return loader

    def get_total_train_batch_size(self, args: Any) -> int:
        """Rows of a step over all data ranks."""
        rows: int = self._train_batch_size * args.gradient_accumulation_steps  # type: ignore[attr-defined]
        return rows * int(self.accelerator.num_processes)

    # ------------------------------------------------------------------ a step

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Forward and backward of a microbatch; with a pipeline the whole step, after its last microbatch."""
        if self._steps is None:
            loss: Tensor = super().training_step(model, inputs, num_items_in_batch)  # type: ignore[misc]
            return loss
        model.train()
        found = self._steps.add(self._prepare_inputs(inputs), num_items_in_batch)  # type: ignore[attr-defined]
        return torch.zeros((), device=self.args.device) if found is None else found

    # ------------------------------------------------------------------ checkpoints

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write a folder for ``from_pretrained``, with the processing class and the arguments. Collective."""
        if self.accelerator.engine is None:
            super().save_model(output_dir, _internal_call)  # type: ignore[misc]
            return
        folder = output_dir if output_dir is not None else self.args.output_dir
        if isinstance(self.model, transformers.PreTrainedModel):
            self.engine.save_pretrained(folder)
            if self.args.should_save:
                self._save_beside_weights(folder)
        else:
            state = self.engine.full_state_dict()
            if self.args.should_save:
                self._save(folder, state_dict=state)  # type: ignore[attr-defined]
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)  # type: ignore[attr-defined]

    def _save_beside_weights(self, folder: str) -> None:
        processing = self.processing_class or getattr(self.data_collator, "tokenizer", None)  # type: ignore[attr-defined]
        if processing is not None:
            processing.save_pretrained(folder)
        torch.save(self.args, Path(folder, "training_args.bin"))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self.engine.save_checkpoint(Path(output_dir, FOLDER)).wait()
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, _SCHEDULE))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Nothing yet: weights and optimizer state are read once the model is placed."""
        if not Path(resume_from_checkpoint, FOLDER).is_dir():
            raise CheckpointError(
                f"{resume_from_checkpoint} has no folder {FOLDER!r} with the engine's state, from which training goes "
                "on; give a checkpoint that this Trainer has written without save_only_model."
            )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        self.engine.load_checkpoint(Path(checkpoint, FOLDER))
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint, _SCHEDULE), weights_only=True))
        if isinstance(self.lr_scheduler, torch.optim.lr_scheduler.LRScheduler):
            set_rates(self.lr_scheduler)

    def _save_scaler(self, output_dir: str) -> None:
        """Nothing: the engine's checkpoint has its loss scale."""

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Nothing, as :meth:`_save_scaler`."""

    def _load_best_model(self) -> None:
        best: Any = self.state.best_model_checkpoint  # type: ignore[attr-defined]
        self.engine.load_checkpoint(Path(os.fspath(best), FOLDER), load_module_only=True)


class Trainer(EngineTraining, transformers.Trainer):  # type: ignore[misc]
    """``transformers.Trainer`` with ``engine_config``, a dict or the path of a JSON file; all else is the host's.

    ``TrainingArguments`` own sizes, precision, optimizer, schedule and clipping; the configuration says the grid, ZeRO
    and what the arguments have no word for. ``per_device_train_batch_size`` counts rows of a data rank.

    With a pipeline a step runs as one: ``on_pre_optimizer_step`` is called after the update, and the loss is the
    model's, ``compute_loss_func``'s or that of label smoothing.

    Raises:
        ConfigError: the configuration contradicts the arguments; an argument that places the model in another way.
    """


class _Unprepared:
    """Gives back what it is given, where the host prepares a loader."""

    @staticmethod
    def prepare(loader: Any) -> Any:
        return loader


@contextmanager
def _unchanged_random_state() -> Iterator[None]:
    """Reading the example draws no number that training would draw."""
    kept = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(kept[0])
            np.random.set_state(kept[1])
