"""Strategy of Lightning's Trainer with a model on an engine's grid.

Lightning provides loop, data, logs, callbacks, optimizer and schedule; the strategy overrides ranks, backward, step and
checkpoints.

    FILE.ckpt/lightning.ckpt        Lightning's own: loops, callbacks, schedules, hyper-parameters
    FILE.ckpt/engine/step-N/        the engine's checkpoint, which a run continues from on any grid
    FILE.ckpt                       with save_weights_only, one file for load_from_checkpoint
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.distributed import group as group_of_ranks
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn

from engine.api import initialize
from engine.config import Config, ConfigSource, load_raw
from engine.engine import Engine
from engine.errors import CheckpointError, ConfigError, EngineError
from engine.hosting.arguments import conflict
from engine.hosting.hosted_model import HostedModel, remove_earlier_saves
from engine.hosting.loop_settings import move_others, of_lightning, part_rows, replace_child, trained_child
from engine.parallel.grid import Grid
from engine.program.batch_rows import Name

_STATE, _HOST = "engine", "lightning.ckpt"
"""Names of the entries of a checkpoint folder."""
_STEP = "trine_engine_step"
"""Key of the name of the engine's checkpoint in Lightning's file."""


class Strategy(DDPStrategy):  # type: ignore[misc]
    """Strategy of Lightning's Trainer that trains a submodule of the LightningModule on the engine.

    Accumulation, clipping and precision come from Trainer; optimizer and schedule from the LightningModule.

    Args:
        engine_config: grid of ranks, ZeRO and other settings, as a dict or the path of a file.
        module: name of the submodule that the engine shards; None: the only child with trainable parameters.
        whole: names of the tensors in a batch that are not divided into rows, such as image patches.
        more: ``cluster_environment`` and ``checkpoint_io``, as Lightning's strategies take them.

    Raises:
        ConfigError: the configuration contradicts Trainer; optimization is manual; or parameters outside the submodule
            are trainable.
    """

    precision_plugin: Any

    def __init__(
        self, engine_config: ConfigSource, module: str | None = None, whole: Name | Sequence[Name] = (), **more: Any
    ) -> None:
        if unknown := sorted(more.keys() - {"cluster_environment", "checkpoint_io"}):
            raise ConfigError(f"Strategy was given {unknown[0]}, which it does not have; set it in engine_config.")
        super().__init__(**more)
        self._raw, self._name, self._whole = load_raw(engine_config), module, whole
        self._config: Config | None = None
        self._hosted: HostedModel | None = None
        self._placed: nn.Module | None = None
        """LightningModule with its model on the grid."""
        self._accumulating = False
        """True if the next backward is not the last one of its step."""
        self._restored: Path | None = None

    @property
    def engine(self) -> Engine:
        """Engine that trains the submodule, made when Trainer sets up the strategy.

        Raises:
            EngineError: Trainer has not yet done so.
        """
        if self._hosted is None:
            raise EngineError("the engine was read before trainer.fit, which makes it; call trainer.fit first.")
        return self._hosted.trained

    @property
    def grid(self) -> Grid:
        """Grid of ranks, with the position of this rank."""
        assert self._config is not None, "Lightning sets up the environment first"
        return self._config.grid(self.global_rank)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Arguments of a distributed sampler: ``num_replicas`` is the number of data ranks (ranks with different rows),
        ``rank`` is this rank's index among them.
        """
        return {"num_replicas": self.grid.row_ranks, "rank": self.grid.row_rank}

    # ------------------------------------------------------------------ setup

    def setup_environment(self) -> None:
        """Reads the configuration, checks it against Trainer and LightningModule, and starts the process group.

        Raises:
            ConfigError: Trainer or LightningModule asks for something that the engine cannot do.
        """
        module: Any = self.lightning_module
        if self._layer_sync is not None:
            raise ConfigError(
                "sync_batchnorm is true in Trainer, but each data rank of the engine has its own running statistics; "
                "remove it, or use a layer without them (GroupNorm, LayerNorm)."
            )
        self._config = of_lightning(module.trainer).configuration(self._raw, self.world_size)
        self._refuse_module(module)
        super().setup_environment()

    def _refuse_module(self, module: Any) -> None:
        kind, fits = type(module).__name__, module.trainer.state.fn == TrainerFn.FITTING
        if fits and not module.automatic_optimization:
            raise ConfigError(
                f"{kind} optimizes manually, but the engine needs to know the last backward of a step before it runs; "
                "leave automatic_optimization on, or write the loop with engine.huggingface.Accelerator."
            )
        if fits and is_overridden("backward", module):
            raise ConfigError(
                f"{kind} overrides backward, which the engine runs; remove the override, and use on_before_backward or "
                "on_after_backward."
            )
        if self._placed is None:
            self._name = trained_child(module, self._name)
        elif module is not self._placed:
            raise ConfigError(
                f"Strategy has placed another {type(self._placed).__name__}; make a Trainer with its own Strategy for "
                "each."
            )
        elif fits:
            raise ConfigError(
                "fit was called on a Strategy with an engine, but a fit begins with a new optimizer; make a Trainer "
                "with a new Strategy, and pass ckpt_path to continue."
            )

    def setup(self, trainer: Any) -> None:
        """Makes the engine, which shards the submodule in place and steps the LightningModule's optimizer. Collective.

        Outside of ``fit``, the engine is made without the LightningModule's optimizer, and updates no weights.
        """
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        module: Any = self.lightning_module
        self.model, module._device = module, self.root_device
        if self._hosted is None:
            self._place(module, trainer)
        plugin: Any = self.precision_plugin
        plugin.clip_gradients = self._clip
        self.precision_plugin = plugin

    def _place(self, module: Any, trainer: Any) -> None:
        assert self._config is not None and self._name is not None, "the environment is set up"
        optimizer: Any = partial(torch.optim.SGD, lr=0.0)
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
            if len(self.optimizers) != 1 or not self.optimizers[0].param_groups:
                count = len([each for each in self.optimizers if each.param_groups])
                raise ConfigError(
                    f"configure_optimizers returned {count} optimizers, but the engine has one; return one."
                )
            optimizer = self.optimizers[0]
        move_others(module, self._name, self.root_device)
        inner = module.get_submodule(self._name)
        placed = initialize(inner, self._config, optimizer=optimizer, whole=self._whole)
        self._hosted = HostedModel(placed, part_rows(self._raw))
        replace_child(module, self._name, self._hosted)
        self._placed = module

    def model_to_device(self) -> None:
        """Does nothing, because the engine moves this rank's shards itself."""

    def teardown(self) -> None:
        """Tears down the plugins of Trainer, but leaves the model on its device."""
        assert self.accelerator is not None and self.cluster_environment is not None
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()
        self.cluster_environment.teardown()

    # ------------------------------------------------------------------ a step

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Returns a context manager in which ``backward`` accumulates gradients without an update."""
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Runs the backward of a microbatch's 0-dim loss on the engine, and returns the loss."""
        module, last = self.lightning_module, not self._accumulating
        loss = self.precision_plugin.pre_backward(closure_loss, module)
        self.engine.set_gradient_accumulation_boundary(last)
        self.engine.backward((loss, float(last)), bool(kwargs.get("retain_graph")))
        if not last:
            self.engine.step()
        done: Tensor = self.precision_plugin.post_backward(loss, module)
        return done

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Calls ``closure`` (forward and backward of the last microbatch), clips gradients and updates the weights;
        returns the loss.

        Raises:
            EngineError: ``training_step`` has returned None.
        """
        loss = closure()
        if loss is None:
            raise EngineError(
                "training_step returned None, but every rank makes every step; return a loss, such as the sum of the "
                "outputs times 0."
            )
        self.precision_plugin._after_closure(self.lightning_module, optimizer)
        self.engine.step()
        self.engine.guard_gradients(self.lightning_module)  # hooks read gradients until the next forward
        return loss

    def _clip(self, optimizer: Any, clip_val: float | None = None, gradient_clip_algorithm: Any = None) -> None:
        """Clips as ``clip_gradients`` of the precision plugin, which a LightningModule may call with its own value.

        Without such a call the step clips to Trainer's value.
        """
        given = self.engine.config.gradient_clipping
        if not clip_val or clip_val == given:
            return
        if given:
            raise conflict("gradient_clipping", given, "gradient_clip_val", clip_val, "configure_gradient_clipping")
        if str(getattr(gradient_clip_algorithm, "value", gradient_clip_algorithm) or "norm") != "norm":
            raise ConfigError(
                'clip_gradients was given gradient_clip_algorithm "value", but the engine clips by the norm; remove it.'
            )
        self.engine.clip_gradients(float(clip_val))

    # ------------------------------------------------------------------ values of all data ranks

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Returns ``tensor`` reduced over ``group``, as Lightning's DDP strategy does.

        Only a sum over the world differs: it counts ranks with the same rows once.

        Args:
            group: process group; None: the world.
            reduce_op: "mean", "sum" or another reduction of Lightning.
        """
        reduced, copies = super().reduce(tensor, group, reduce_op), self.grid.size("replica")
        if not _is_world(group) or copies == 1 or not isinstance(tensor, Tensor) or not _is_sum(reduce_op):
            return reduced
        return reduced / copies if reduced.is_floating_point() else reduced // copies

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Returns True on all ranks if ``decision`` is True on every rank, or with ``all=False`` on any rank.
        All-reduces over the world.
        """
        count = super().reduce(torch.tensor(int(decision), device=self.root_device), reduce_op="sum")
        return bool(count == self.world_size) if all else bool(count)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Returns the tensors of all ranks of ``group``, stacked as [ranks, ...] in rank order. For the world, the
        result has only one tensor for each data rank, from one of the ranks that share its rows. Collective over
        ``group``.

        Args:
            group: process group; None: the world.
            sync_grads: True: gradients flow back through the gather.
        """
        gathered: Tensor = super().all_gather(tensor, group, sync_grads)
        if not _is_world(group) or self.grid.size("replica") == 1:
            return gathered
        return gathered[list(self.grid.peers(self.grid.rows, 0))]

    # ------------------------------------------------------------------ checkpoints

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: Trainer loads a checkpoint after ``setup``."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """False: the engine, not Trainer, restores the optimizer state."""
        return False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns {}: the engine saves the weights, not Trainer."""
        return {}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Returns {}: the engine saves the optimizer state, not Trainer."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Writes the folder ``filepath`` with Lightning's state, ``checkpoint``, and the engine's weights and optimizer
        state. Collective.

        Without optimizer states in ``checkpoint`` (``save_weights_only``), writes one file with the full weights.
        ``storage_options``: passed to Lightning.
        """
        if "optimizer_states" not in checkpoint:
            super().save_checkpoint(checkpoint | {"state_dict": self._whole_state()}, filepath, storage_options)
            return
        saved = self.engine.save_checkpoint(Path(filepath, _STATE)).wait()
        host = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
        super().save_checkpoint(host | {_STEP: saved.name}, Path(filepath, _HOST), storage_options)
        remove_earlier_saves(self.engine, saved)  # of the same name, such as last.ckpt

    def _whole_state(self) -> dict[str, Tensor]:
        """Returns the LightningModule's state on rank 0, with names as without the engine. Collective."""
        module: Any = self.lightning_module
        assert self._hosted is not None and self._name is not None, "a checkpoint is of a model that is set up"
        replace_child(module, self._name, nn.Identity())  # keeps the engine's shards out of state_dict
        try:
            others: dict[str, Tensor] = module.state_dict()
        finally:
            replace_child(module, self._name, self._hosted)
        return others | {f"{self._name}.{key}": value for key, value in self.engine.full_state_dict().items()}

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Returns Lightning's state from a checkpoint folder of this strategy; ``load_model_state_dict`` then loads the
        weights.

        ``weights_only``: as in ``torch.load``.

        Raises:
            CheckpointError: the path is not a checkpoint folder of this strategy.
        """
        if not Path(checkpoint_path, _STATE).is_dir():
            raise CheckpointError(
                f"{checkpoint_path} has no folder {_STATE!r} with the engine's state; pass a checkpoint that this "
                "strategy has written without save_weights_only, or load a file of weights before fit, with "
                "load_from_checkpoint."
            )
        host = self.checkpoint_io.load_checkpoint(Path(checkpoint_path, _HOST), weights_only=weights_only)
        # a save that was interrupted may have left a later step of the engine
        self._restored = Path(checkpoint_path, _STATE, host.pop(_STEP, ""))
        return {**host, "state_dict": {}}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Loads weights, buffers and, in ``fit``, optimizer state from the folder last passed to ``load_checkpoint``.
        Collective.

        Args:
            checkpoint: not read.
            strict: True: requires all parameters and buffers in the checkpoint. False: missing ones are unchanged.
        """
        module: Any = self.lightning_module
        assert self._restored is not None, "load_checkpoint comes first"
        alone = module.trainer.state.fn != TrainerFn.FITTING
        self.engine.load_checkpoint(self._restored, load_module_only=alone, strict=strict)

    def on_train_start(self) -> None:
        """Sets the optimizer's learning rates to the restored schedules' rates, if Trainer has loaded a checkpoint."""
        for each in self.lr_scheduler_configs if self._restored is not None else ():
            schedule: Any = each.scheduler
            for group, rate in zip(schedule.optimizer.param_groups, schedule.get_last_lr(), strict=True):
                group["lr"] = rate


def _is_world(ranks: Any) -> bool:
    return ranks is None or ranks is group_of_ranks.WORLD


def _is_sum(operation: Any) -> bool:
    return str(operation).lower().rpartition(".")[2] == "sum"
