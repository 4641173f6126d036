"""A strategy of Lightning's Trainer whose model is on the grid of an engine.

Lightning keeps its loop, data, logs, callbacks, optimizer and schedule. What is the engine's is entered where Lightning
lets its strategies enter: ranks, backward, step, and checkpoints.

    FILE.ckpt/lightning.ckpt        Lightning's own: loops, callbacks, schedules, hyper-parameters
    FILE.ckpt/engine/step-N/        the engine's checkpoint, from which a run goes on on any grid
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
from engine.hosting.hosted_model import HostedModel
from engine.hosting.loop_settings import move_others, of_lightning, part_rows, replace_child, trained_child
from engine.parallel.grid import Grid
from engine.program.batch_rows import Name

_STATE, _HOST = "engine", "lightning.ckpt"
"""Parts of a checkpoint."""


class Strategy(DDPStrategy):  # type: ignore[misc]
    """A strategy with ``engine_config``, a dict or the path of a file.

    Trainer owns accumulation, clipping and precision, the LightningModule optimizer and schedule; the configuration
    says the grid, ZeRO and what they have no word for. Batches of the data loaders are those of a data rank.

    Args:
        engine_config: the engine's configuration.
        module: name of the module of the LightningModule that is placed; None: its only child with parameters.
        whole: names of tensors of a batch that have no rows (patches of pictures), as ``initialize`` takes them.
        more: ``cluster_environment`` and ``checkpoint_io``, as Lightning's strategies take them.

    Raises:
        ConfigError: the configuration contradicts Trainer; manual optimization; parameters beside the module.
    """

    precision_plugin: Any

    def __init__(
        self, engine_config: ConfigSource, module: str | None = None, whole: Name | Sequence[Name] = (), **more: Any
    ) -> None:
        if unknown := sorted(more.keys() - {"cluster_environment", "checkpoint_io"}):
            raise ConfigError(f"Strategy was given {unknown[0]}, which it does not have; say it in engine_config.")
        super().__init__(**more)
        self._raw, self._name, self._whole = load_raw(engine_config), module, whole
        self._config: Config | None = None
        self._hosted: HostedModel | None = None
        self._placed: nn.Module | None = None
        """The LightningModule whose model is on the grid."""
        self._accumulating = False
        """The backward to come is not the last one of its step."""
        self._restored: Path | None = None

    @property
    def engine(self) -> Engine:
        """The engine.

        Raises:
            EngineError: Trainer has not set it up.
        """
        if self._hosted is None:
            raise EngineError("the engine is made when Trainer begins, and it has not; call trainer.fit before.")
        return self._hosted.trained

    @property
    def grid(self) -> Grid:
        """The grid, with this rank's position."""
        assert self._config is not None, "Lightning sets up the environment first"
        return self._config.grid(self.global_rank)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Rows are of data ranks."""
        return {"num_replicas": self.grid.row_ranks, "rank": self.grid.row_rank}

    # ------------------------------------------------------------------ setup

    def setup_environment(self) -> None:
        """Read the configuration, then join the ranks."""
        module: Any = self.lightning_module
        if self._layer_sync is not None:
            raise ConfigError(
                "sync_batchnorm is true in Trainer, and each data rank of the engine has its own running statistics; "
                "leave it out, or use a layer without them (GroupNorm, LayerNorm)."
            )
        self._config = of_lightning(module.trainer).configuration(self._raw, self.world_size)
        self._refuse_module(module)
        super().setup_environment()

    def _refuse_module(self, module: Any) -> None:
        kind, fits = type(module).__name__, module.trainer.state.fn == TrainerFn.FITTING
        if fits and not module.automatic_optimization:
            raise ConfigError(
                f"{kind} optimizes manually, and the engine has to know the last backward of a step before it runs; "
                "leave automatic_optimization on, or write the loop with engine.huggingface.Accelerator."
            )
        if fits and is_overridden("backward", module):
            raise ConfigError(
                f"{kind} overrides backward, which is the engine's; leave it out, and use on_before_backward or "
                "on_after_backward."
            )
        if self._placed is None:
            self._name = trained_child(module, self._name)
        elif module is not self._placed:
            raise ConfigError(
                f"Strategy has placed another {type(self._placed).__name__}; make a Trainer with a Strategy for each."
            )
        elif fits:
            raise ConfigError(
                "fit was called on a Strategy whose engine is made, and a fit begins with a new optimizer; make a "
                "Trainer with a new Strategy for it, and give ckpt_path to go on."
            )

    def setup(self, trainer: Any) -> None:
        """Put the model on the grid, with the optimizer of the LightningModule. Collective."""
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
                raise ConfigError(f"configure_optimizers gave {count} optimizers, and the engine has one; return one.")
            optimizer = self.optimizers[0]
        move_others(module, self._name, self.root_device)
        inner = module.get_submodule(self._name)
        placed = initialize(inner, self._config, optimizer=optimizer, whole=self._whole)
        self._hosted = HostedModel(placed, part_rows(self._raw))
        replace_child(module, self._name, self._hosted)
        self._placed = module

    def model_to_device(self) -> None:
        """Nothing: the engine moves what a rank holds."""

    def teardown(self) -> None:
        """Lightning's, without moving the model: the engine lives on, so that ``test`` may follow ``fit``."""
        assert self.accelerator is not None and self.cluster_environment is not None
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()
        self.cluster_environment.teardown()

    # ------------------------------------------------------------------ a step

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Inside, backwards are of an accumulation that goes on."""
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Backward of a microbatch, whose loss Lightning has divided by their number; the last one has the weight."""
        module, last = self.lightning_module, not self._accumulating
        loss = self.precision_plugin.pre_backward(closure_loss, module)
        self.engine.set_gradient_accumulation_boundary(last)
        self.engine.backward((loss, float(last)), bool(kwargs.get("retain_graph")))
        if not last:
            self.engine.step()
        done: Tensor = self.precision_plugin.post_backward(loss, module)
        return done

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Forward and backward of the last microbatch, Lightning's hooks, then the engine's update."""
        loss = closure()
        if loss is None:
            raise EngineError(
                "training_step returned None, and every rank makes every step; return a loss, such as the sum of the "
                "outputs times 0."
            )
        self.precision_plugin._after_closure(self.lightning_module, optimizer)
        self.engine.step()
        self.engine.guard_gradients(self.lightning_module)  # hooks look for them until the next forward
        return loss

    def _clip(self, optimizer: Any, clip_val: float | None = None, gradient_clip_algorithm: Any = None) -> None:
        """``clip_gradients`` of the precision plugin, which a hook of the LightningModule may call with its own value.

        The step clips to Trainer's own value without it.
        """
        given = self.engine.config.gradient_clipping
        if not clip_val or clip_val == given:
            return
        if given:
            raise conflict("gradient_clipping", given, "gradient_clip_val", clip_val, "configure_gradient_clipping")
        if str(getattr(gradient_clip_algorithm, "value", gradient_clip_algorithm) or "norm") != "norm":
            raise ConfigError(
                'clip_gradients was given gradient_clip_algorithm "value", and the engine clips by the norm; leave it '
                "out."
            )
        self.engine.clip_gradients(float(clip_val))

    # ------------------------------------------------------------------ values of all data ranks

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Lightning's, of data ranks: each counts once, whatever the number of ranks of a replica."""
        reduced, copies = super().reduce(tensor, group, reduce_op), self.grid.size("replica")
        if not _is_world(group) or copies == 1 or not isinstance(tensor, Tensor) or not _is_sum(reduce_op):
            return reduced
        return reduced / copies if reduced.is_floating_point() else reduced // copies

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Lightning's, of all ranks."""
        count = super().reduce(torch.tensor(int(decision), device=self.root_device), reduce_op="sum")
        return bool(count == self.world_size) if all else bool(count)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Lightning's, of data ranks [data ranks, ...]."""
        gathered: Tensor = super().all_gather(tensor, group, sync_grads)
        if not _is_world(group) or self.grid.size("replica") == 1:
            return gathered
        return gathered[list(self.grid.peers(self.grid.rows, 0))]

    # ------------------------------------------------------------------ checkpoints

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """The engine reads into the placed model."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """The engine's checkpoint has its state."""
        return False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Nothing yet: weights are gathered when a file of weights is written."""
        return {}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Nothing, as :meth:`lightning_module_state_dict`."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a folder to go on from, or a file of weights alone. Collective."""
        if "optimizer_states" not in checkpoint:
            super().save_checkpoint(checkpoint | {"state_dict": self._whole_state()}, filepath, storage_options)
            return
        self.engine.save_checkpoint(Path(filepath, _STATE)).wait()
        host = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
        super().save_checkpoint(host, Path(filepath, _HOST), storage_options)

    def _whole_state(self) -> dict[str, Tensor]:
        """State of the LightningModule as it is without the engine, on rank 0."""
        module: Any = self.lightning_module
        assert self._hosted is not None and self._name is not None, "a checkpoint is of a model that is set up"
        replace_child(module, self._name, nn.Identity())  # whose shards have no state of their own
        try:
            others: dict[str, Tensor] = module.state_dict()
        finally:
            replace_child(module, self._name, self._hosted)
        return others | {f"{self._name}.{key}": value for key, value in self.engine.full_state_dict().items()}

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Lightning's part of a checkpoint; the engine's is read with the weights.

        Raises:
            CheckpointError: the path is no folder that this strategy has written.
        """
        if not Path(checkpoint_path, _STATE).is_dir():
            raise CheckpointError(
                f"{checkpoint_path} has no folder {_STATE!r} with the engine's state; give a checkpoint that this "
                "strategy has written without save_weights_only, or load a file of weights before, with "
                "load_from_checkpoint."
            )
        self._restored = Path(checkpoint_path)
        host = self.checkpoint_io.load_checkpoint(Path(checkpoint_path, _HOST), weights_only=weights_only)
        return {**host, "state_dict": {}}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Read the engine's checkpoint: all of it to train, weights and buffers alone otherwise. Collective."""
        module: Any = self.lightning_module
        assert self._restored is not None, "load_checkpoint comes first"
        alone = module.trainer.state.fn != TrainerFn.FITTING
        self.engine.load_checkpoint(self._restored / _STATE, load_module_only=alone, strict=strict)

    def on_train_start(self) -> None:
        """Rates of the schedules that Lightning has restored."""
        for each in self.lr_scheduler_configs if self._restored is not None else ():
            schedule: Any = each.scheduler
            for group, rate in zip(schedule.optimizer.param_groups, schedule.get_last_lr(), strict=True):
                group["lr"] = rate


def _is_world(ranks: Any) -> bool:
    return ranks is None or ranks is group_of_ranks.WORLD


def _is_sum(operation: Any) -> bool:
    return str(operation).lower().rpartition(".")[2] == "sum"
