"""``accelerate.Accelerator`` for a user's own training loop over the engine.

prepare               makes the engine from a model and its optimizer; loaders return the rows of a data rank
accumulate, backward  accelerate's, with the engine's backward
clip_grad_norm_       the norm over all ranks; the next step clips to it
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from accelerate.scheduler import AcceleratedScheduler
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from engine.api import initialize
from engine.config import ConfigSource, load_raw
from engine.engine import Engine
from engine.errors import CheckpointError, ConfigError, EngineError
from engine.hosting.arguments import conflict
from engine.hosting.hosted_model import HostedModel, remove_earlier_saves
from engine.hosting.loop_settings import of_accelerator, part_rows
from engine.huggingface.accelerator import EngineAccelerator, HostedScheduler
from engine.parallel.comm.world import read_world
from engine.program.batch_rows import Name

_STATE = "engine"
"""Folder of the engine's checkpoint inside accelerate's."""
_STEP = "accumulated"
"""Key of the microbatches that accelerate has counted."""
_RANKS = "data_ranks"
"""Key of the number of data ranks, which accelerate's schedules count."""


class SavedState(EngineAccelerator):
    """Accelerator with ``save_state`` and ``load_state``, which save model and optimizer as an engine checkpoint."""

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """Returns the full state dict of the engine's model on rank 0, and {} on other ranks. Collective over the
        world.

        For any other model, it returns the result of accelerate's method; only then ``unwrap`` has an effect.
        """
        if self.hosted is None or model not in (self.hosted, self.hosted.module):
            return super().get_state_dict(model, unwrap)
        return self.trained.full_state_dict()

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs: Any) -> Any:
        """Writes accelerate's files into ``output_dir``, and weights and optimizer state into its subfolder ``engine``;
        returns the path of ``output_dir``. Collective.

        The user's save hooks get an empty list of weights.
        """
        models, hooks = self._models, self._save_model_state_pre_hook
        with self._without_engine():
            folder = super().save_state(output_dir, safe_serialization, **kwargs)
        for hook in hooks.values():
            hook(models, [], folder)
        client = {_STEP: self.step, _RANKS: self.num_processes}
        saved = self.trained.save_checkpoint(Path(folder, _STATE), client).wait()
        remove_earlier_saves(self.trained, saved)
        return folder

    def load_state(self, input_dir: str | None = None, load_kwargs: Any = None, **kwargs: Any) -> None:
        """Loads model, optimizer, schedules and step number from a folder written by ``save_state``. Collective. The
        grid of ranks may differ from the saved run's.

        ``input_dir=None``: the newest folder, if accelerate names checkpoints automatically. ``load_kwargs``: passed to
        accelerate.

        Raises:
            CheckpointError: the folder has no checkpoint of the engine.
        """
        if input_dir is None and self.project_configuration.automatic_checkpoint_naming:
            input_dir = _newest(Path(self.project_dir, "checkpoints"))
        if input_dir is not None and not Path(input_dir, _STATE).is_dir():
            raise CheckpointError(
                f'{input_dir} has no subfolder "{_STATE}", from which training restores the state of the engine; pass '
                "a folder that save_state of this Accelerator has written."
            )
        models, hooks = self._models, self._load_model_state_pre_hook
        with self._without_engine():
            super().load_state(input_dir, load_kwargs, **kwargs)
        for hook in hooks.values():
            hook(models, input_dir)
        found: Any = self.trained.load_checkpoint(Path(str(input_dir), _STATE))
        self.step = found[_STEP]
        for each in self._schedulers:
            schedule = each.scheduler
            if isinstance(each, HostedScheduler):
                each.move_from(found.get(_RANKS, self.num_processes))
            for group, rate in zip(schedule.optimizer.param_groups, schedule.get_last_lr(), strict=True):
                group["lr"] = rate

    @contextmanager
    def _without_engine(self) -> Iterator[None]:
        """Hides model and optimizer from accelerate inside the context, because the engine saves and loads them."""
        names = ("_models", "_optimizers", "_save_model_state_pre_hook", "_load_model_state_pre_hook")
        kept = {name: getattr(self, name) for name in names}
        for name, value in kept.items():
            setattr(self, name, type(value)())
        try:
            yield
        finally:
            for name, value in kept.items():
                setattr(self, name, value)


def _newest(folder: Path) -> str:
    """Returns the checkpoint with the largest number, in a folder of automatic names."""
    return str(max(folder.iterdir(), key=lambda each: int(each.name.rpartition("_")[2])))


class Accelerator(SavedState):
    """``accelerate.Accelerator`` that runs forward, backward and update of a user's training loop on the engine.

    ``num_processes`` is the number of data ranks (ranks with different rows), and ``process_index`` is this rank's
    index among them. Batch size, accumulation, clipping, optimizer and schedule come from the loop.

    Args:
        engine_config: grid of ranks, ZeRO and other settings, as a dict or the path of a file.
        whole: names of the tensors in a batch that are not divided into rows.
        kwargs: keyword arguments of ``accelerate.Accelerator``.

    Raises:
        ConfigError: the configuration contradicts the loop, or a plugin of accelerate shards the model.
    """

    def __init__(self, *, engine_config: ConfigSource, whole: Name | Sequence[Name] = (), **kwargs: Any) -> None:
        self._raw, self._settings = load_raw(engine_config), of_accelerator(kwargs, os.environ)
        world = read_world()
        grid = self._settings.configuration(self._raw, world.size).grid(world.rank)
        self._clipped, self._whole = False, whole
        super().__init__(**kwargs)
        self.begin(grid, "Accelerator", "cpu")

    @property
    def trained(self) -> Engine:
        """Engine that trains the model.

        Raises:
            EngineError: ``prepare`` has not been called.
        """
        if self.hosted is None:
            raise EngineError(
                "the engine is made by accelerator.prepare(model, optimizer), which was not called; call it first."
            )
        return self.hosted.trained

    @property
    def engine(self) -> Engine:
        """Engine that trains the model.

        Raises:
            EngineError: ``prepare`` has not been called.
        """
        return self.trained

    # ------------------------------------------------------------------ prepare

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Returns the wrapped objects, as ``accelerate.Accelerator.prepare`` does; makes the engine for a trainable
        model and its optimizer. Collective over the world.

        Weights are broadcast from rank 0. The batch size of a DataLoader becomes the number of rows of a microbatch.

        Raises:
            ConfigError: a trainable model comes without its optimizer, there are several trainable models or
                optimizers, or the batch size differs from the configuration's.
        """
        models: list[Any] = [each for each in args if isinstance(each, nn.Module) and _is_trained(each)]
        if models and models != [self.hosted]:
            self._place(models, args)
        placed = [self.hosted if each in models else each for each in args]
        return super().prepare(*placed, device_placement=device_placement)

    def _place(self, models: list[nn.Module], args: tuple[Any, ...]) -> None:
        optimizers = [each for each in args if isinstance(each, torch.optim.Optimizer)]
        if len(models) > 1 or self.hosted is not None:
            raise ConfigError(
                "prepare was given a second model with trainable parameters, but an Accelerator trains one; put both "
                "models into one module, or call requires_grad_(False) on the other model."
            )
        if len(optimizers) != 1:
            raise ConfigError(
                f"prepare was given a model with trainable parameters and {len(optimizers)} optimizers; pass the model "
                "and its one optimizer in the same call."
            )
        micro = next((_rows(each, self) for each in args if isinstance(each, DataLoader)), None)
        config = replace(self._settings, micro=micro).configuration(self._raw, self.grid.world_size)
        placed = initialize(models[0], config, optimizer=optimizers[0], whole=self._whole)
        self.hosted = HostedModel(placed, part_rows(self._raw))

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Returns ``model``; a model that the engine does not train is first moved to this rank's device.

        ``device_placement=False`` prevents the move.

        Raises:
            ConfigError: ``model`` has trainable parameters, so it must be passed to ``prepare``.
        """
        if model is self.hosted:
            if model not in self._models:
                self._models.append(model)
            return model
        if _is_trained(model):
            raise ConfigError(
                "prepare_model was given a model with trainable parameters, but the engine takes such a model only "
                "together with its optimizer; call accelerator.prepare(model, optimizer) instead."
            )
        self._models.append(model)
        moves = self.device_placement if device_placement is None else device_placement
        return model.to(self.device) if moves else model

    def prepare_scheduler(self, scheduler: LRScheduler) -> AcceleratedScheduler:
        """Returns a wrapper of ``scheduler`` that makes as many scheduler steps after an update as there are data
        ranks; only one with accelerate's ``split_batches=True``.
        """
        if isinstance(scheduler, AcceleratedScheduler):
            return super().prepare_scheduler(scheduler)
        own = [each for each in self._optimizers if each.optimizer is getattr(scheduler, "optimizer", None)]
        linked = self.step_scheduler_with_optimizer
        prepared = HostedScheduler(scheduler, own or self._optimizers, linked, self.split_batches, self.num_processes)
        self._schedulers.append(prepared)
        return prepared

    def free_memory(self, *objects: Any) -> Any:
        """Closes the engine, and returns the result of ``accelerate.Accelerator.free_memory(*objects)``."""
        self._close()
        return super().free_memory(*objects)

    def end_training(self) -> None:
        """Closes the engine, then calls ``accelerate.Accelerator.end_training``."""
        self._close()
        super().end_training()

    def _close(self) -> None:
        hosted, self.hosted = self.hosted, None
        if hosted is not None:
            hosted.trained.close()

    # ------------------------------------------------------------------ a step

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Runs the backward of a microbatch's 0-dim ``loss``, divided by ``gradient_accumulation_steps``, on the
        engine.

        ``kwargs`` may have ``retain_graph``, as in ``Tensor.backward``.
        """
        super().backward(loss / self.gradient_accumulation_steps, **kwargs)

    def finish_step(self) -> bool:
        """Lets the engine clip gradients and update the weights; returns True if a non-finite gradient prevents the
        update.

        Raises:
            EngineError: no ``backward`` has run since the last step.
        """
        if not self.weighed:
            raise EngineError(
                "optimizer.step() was called without accelerator.backward(loss) since the last step; call it in place "
                "of loss.backward(), for every microbatch."
            )
        self._clipped = False
        return super().finish_step()

    def drop_gradients(self) -> None:
        """Drops the gradients accumulated since the last update."""
        self._clipped = False
        super().drop_gradients()

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        """Returns the L2 norm of the full gradient as a 0-dim tensor; the next ``optimizer.step()`` clips to
        ``max_norm``. Collective over the world.

        Args:
            parameters: all trainable parameters of the engine's model.

        Raises:
            ConfigError: ``norm_type`` is not 2, or ``max_norm`` differs from ``gradient_clipping`` of the
                configuration.
            EngineError: a microbatch of the step is missing, the call is the second in a step, or parameters are
                missing.
        """
        given = self.trained.config.gradient_clipping
        if float(norm_type) != 2:
            raise ConfigError(
                f"clip_grad_norm_ was given norm_type {norm_type}, but the engine clips by the L2 norm; leave "
                "norm_type out."
            )
        if given and given != max_norm:
            raise conflict("gradient_clipping", given, "max_norm of clip_grad_norm_", max_norm, "the loop")
        if not self.sync_gradients:
            raise EngineError(
                "clip_grad_norm_ was called inside an accumulation, before its gradients are complete; call it under "
                "`if accelerator.sync_gradients:`."
            )
        if self._clipped:
            raise EngineError(
                "clip_grad_norm_ was called twice in a step, but a step clips once; remove one of the calls."
            )
        self._check_all(parameters)
        norm = self.trained.clip_gradients(float(max_norm))
        self._clipped = True
        return torch.tensor(norm, device=self.device)

    def _check_all(self, parameters: Any) -> None:
        given = {id(each) for each in ([parameters] if isinstance(parameters, Tensor) else parameters)}
        missing = [
            name
            for name, each in self.trained.module.named_parameters()
            if each.requires_grad and id(each) not in given
        ]
        if missing:
            raise EngineError(
                f"clip_grad_norm_ was given parameters without {missing[0]!r}, but a step clips by the norm of all; "
                "pass model.parameters() of the prepared model."
            )

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Raises ConfigError, because the engine clips only by norm."""
        raise ConfigError(
            "clip_grad_value_ clips each element, but the engine clips by the norm; call clip_grad_norm_."
        )

    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> NoReturn:
        """Raises ConfigError, because on the engine all ranks make equally many steps."""
        raise ConfigError(
            "join_uneven_inputs lets data ranks stop at different steps, but the engine needs the same number of steps "
            "on all of them; remove it, and keep even_batches."
        )


def _is_trained(model: nn.Module) -> bool:
    return any(each.requires_grad for each in model.parameters())


def _rows(loader: Any, accelerator: Accelerator) -> int | None:
    """Returns a data rank's rows in a batch of a loader, which may be prepared; None if the loader has no size."""
    count = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    if count is None or not accelerator.split_batches:
        return count
    return int(count) // accelerator.num_processes
