"""Accelerate's loop over the engine.

prepare          model, optimizer -> engine.initialize; loaders cut over data ranks, equal on the ranks of a replica
backward         eng.backward; the last backward of an accumulation carries the weight of the step
clip_grad_norm_  the norm that the engine's update finds; it clips by ``gradient_clipping``
save_state       Accelerate's own files, and the engine's checkpoint in the folder ``engine`` beside them
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import accelerate
import torch
from accelerate.utils import recursively_apply
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import engine
from engine.accelerate.stepping import HostedOptimizer, HostedScheduler
from engine.config import ConfigSource, load_config, load_raw
from engine.errors import ConfigError, EngineError
from engine.hosts.hosted_model import HostedModel
from engine.parallel.grid import Grid
from engine.program.forward_inputs import Inputs
from engine.program.loss import LossFunction
from engine.reporting.step_report import StepReport

FOLDER = "engine"
"""Folder of the engine's checkpoint inside one of the host's."""
_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@dataclass(frozen=True, slots=True, kw_only=True)
class Placing:
    """What ``engine.initialize`` is given beside the model, the configuration and the optimizer."""

    loss_fn: LossFunction | None = None
    inputs: Inputs | None = None
    example: Any = None
    """One microbatch; None: the first one that comes."""


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """``accelerate.Accelerator`` whose model is on the grid of ``engine_config``, a dict or the path of a JSON file.

    ``num_processes`` and ``process_index`` count data ranks, for the ranks of a replica work on the same rows. The
    optimizer is the script's own, so the configuration has none; ``train_micro_batch_size_per_gpu`` is the batch size
    of the loader, and ``gradient_accumulation_steps`` that of this object, where they are "auto" or missing.
    """

    engine: engine.Engine | None = None
    hosted: HostedModel | None = None
    """What ``prepare`` has made of the model."""
    _grid: Grid | None = None

    def __init__(self, *args: Any, engine_config: ConfigSource, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        raw = dict(load_raw(engine_config))
        _own(raw, "gradient_accumulation_steps", self.gradient_accumulation_steps, "Accelerator")
        if raw.get("optimizer") or raw.get("scheduler"):
            raise ConfigError(
                "engine_config has an optimizer or a scheduler, and Accelerator.prepare is given the script's own; "
                "leave them out of engine_config."
            )
        if self.mixed_precision == "bf16" and "bf16" not in raw:
            raw.setdefault("torch_autocast", {"enabled": True})
        elif self.mixed_precision == "fp16":
            raw.setdefault("fp16", {"enabled": True})
        self._settle({"gradient_clipping": 0.0, "initial_weights": "rank0"} | raw)

    @classmethod
    def around(cls, host: accelerate.Accelerator, raw: Mapping[str, Any]) -> Self:
        """The accelerator that a library has made, over the engine; ``raw`` has all sizes."""
        made = cls.__new__(cls)
        vars(made).update(vars(host))
        made._settle(dict(raw))
        return made

    def _settle(self, raw: dict[str, Any]) -> None:
        self._raw = raw | {"optimizer": None}
        self._norm: Tensor | None = None
        apart = {key: value for key, value in self._raw.items() if key not in _SIZES}
        sizes = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
        self._grid = load_config(apart | sizes, self.state.num_processes).grid(self.state.process_index)
        self.register_save_state_pre_hook(self._save_beside)
        self.register_load_state_pre_hook(self._load_beside)

    # ------------------------------------------------------------------ ranks

    @property
    def num_processes(self) -> int:
        """Number of data ranks."""
        return self._grid.dp if self._grid is not None else int(self.state.num_processes)

    @property
    def process_index(self) -> int:
        """This process's data rank."""
        return self._grid.coord().dp if self._grid is not None else int(self.state.process_index)

    @property
    def grid(self) -> Grid:
        """The grid of the configuration."""
        assert self._grid is not None
        return self._grid

    def gather(self, tensor: Any) -> Any:
        """Rows of all data ranks, in their order; one all-gather over the world."""
        return recursively_apply(self._of_replicas, super().gather(tensor))

    def _of_replicas(self, gathered: Tensor) -> Tensor:
        if self.grid.size("replica") == 1:
            return gathered
        parts = gathered.chunk(self.grid.world_size)
        return torch.cat([parts[self.grid.rank_at(0, dp, 0)] for dp in range(self.grid.dp)])

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Sum or mean over data ranks; one all-reduce over the world."""
        share = scale / self.grid.size("replica") if reduction == "sum" else scale
        return recursively_apply(lambda part: part * share, super().reduce(tensor, reduction))

    # ------------------------------------------------------------------ prepare

    def prepare(self, *args: Any, device_placement: Any = None) -> Any:
        """Put the model on the grid, and give back what the script goes on with, in the order of the arguments.

        Raises:
            ConfigError: a second model; a model without its optimizer; no loader and no microbatch size.
        """
        models = [each for each in args if isinstance(each, nn.Module) and not isinstance(each, HostedModel)]
        optimizers = [each for each in args if isinstance(each, torch.optim.Optimizer)]
        loaders = [each for each in args if isinstance(each, DataLoader)]
        if models:
            if len(models) > 1 or len(optimizers) != 1:
                raise ConfigError(
                    f"prepare was given {len(models)} model(s) and {len(optimizers)} optimizer(s); an engine trains "
                    "one model with one optimizer: pass both in one call, with the loader, and make another "
                    "Accelerator for another model."
                )
            if loaders and loaders[0].batch_size:
                shared = self.num_processes if self.split_batches else 1
                _own(self._raw, "train_micro_batch_size_per_gpu", loaders[0].batch_size // shared, "the DataLoader")
            self.place(models[0], optimizers[0], Placing())
        return super().prepare(*args, device_placement=device_placement)

    def place(self, model: nn.Module, optimizer: torch.optim.Optimizer | None, placing: Placing) -> HostedModel:
        """Make the engine of this accelerator, and the module that the host calls."""
        if self.engine is not None:
            raise ConfigError(
                "prepare was given a second model, and an Accelerator has one engine; make another Accelerator for it."
            )
        self.engine = engine.initialize(
            model, self._raw, placing.loss_fn, placing.example, optimizer, inputs=placing.inputs
        )
        self.hosted = HostedModel(self.engine)
        return self.hosted

    def prepare_model(self, model: nn.Module, *_: Any, **__: Any) -> nn.Module:
        """The engine's model as a module that is called; any other model goes to the device as it is."""
        if self.hosted is None or model not in (self.hosted, self.hosted.module):
            return model.to(self.device)
        if not any(each is self.hosted for each in self._models):
            self._models.append(self.hosted)
        return self.hosted

    def prepare_data_loader(self, data_loader: DataLoader[Any], *args: Any, **kwargs: Any) -> Any:
        """A loader over this data rank's batches."""
        if isinstance(data_loader.dataset, IterableDataset) and self.grid.size("replica") > 1:
            self.dataloader_config.dispatch_batches = False  # rank 0 would send each rank other rows
        return super().prepare_data_loader(data_loader, *args, **kwargs)

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: Any = None) -> HostedOptimizer:
        """An optimizer whose step is the engine's."""
        if not isinstance(optimizer, HostedOptimizer):
            optimizer = HostedOptimizer(optimizer, self._step, self._drop)
        if not any(each is optimizer for each in self._optimizers):
            self._optimizers.append(optimizer)
        return optimizer

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """A scheduler that moves after the engine's updates."""
        if not isinstance(scheduler, HostedScheduler):
            times = 1 if self.split_batches or not self.step_scheduler_with_optimizer else self.num_processes
            scheduler = HostedScheduler(scheduler, self._optimizers, times)
            scheduler.step_with_optimizer = self.step_scheduler_with_optimizer
        self._schedulers.append(scheduler)
        return scheduler

    def unwrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """The user's model; its parameters are the engine's views."""
        return model.module if isinstance(model, HostedModel) else super().unwrap_model(model, *args, **kwargs)

    # ------------------------------------------------------------------ a step

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Backward of a microbatch: gradients add up to those of the sum of ``loss`` over the accumulation, divided by
        ``gradient_accumulation_steps``, and are averaged over data ranks.
        """
        running, last = self._running("backward"), bool(self.sync_gradients)
        running.set_gradient_accumulation_boundary(last)
        share = loss / self.gradient_accumulation_steps
        running.backward((share, 1.0 if last else 0.0), bool(kwargs.get("retain_graph")))
        if not last:
            running.step()

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        """The norm of the gradients, whose value is there after the step, in which the engine clips by it.

        Raises:
            ConfigError: the engine clips at another norm.
        """
        clipping = self._running("clip_grad_norm_").config.gradient_clipping
        if norm_type != 2 or (math.isfinite(max_norm) and not math.isclose(max_norm, clipping)):
            raise ConfigError(
                f"clip_grad_norm_({max_norm:g}, norm_type={norm_type:g}) and gradient_clipping {clipping:g} in "
                f'engine_config: the engine clips, in its step; give "gradient_clipping": {max_norm:g} there and the '
                "2-norm here."
            )
        self._norm = torch.full((), math.nan, device=self.device)
        return self._norm

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Refused.

        Raises:
            ConfigError: the engine clips by the norm of all gradients.
        """
        raise ConfigError(
            f"clip_grad_value_({clip_value:g}): the engine clips by the norm of all gradients; give gradient_clipping "
            "in engine_config, or change gradients with eng.gradients()."
        )

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Nothing: the engine divides by its loss scale itself."""

    def _step(self) -> StepReport | None:
        report = self._running("step").step()
        self.heard(report)
        return report

    def heard(self, report: StepReport | None) -> None:
        """Give the norm of a step to whoever has asked for it before."""
        if report is not None and self._norm is not None:
            self._norm.fill_(report.grad_norm)
            self._norm = None

    def _drop(self) -> None:
        self._running("zero_grad").zero_grad()

    def _running(self, call: str) -> engine.Engine:
        if self.engine is None:
            raise EngineError(f"{call} before prepare(model, optimizer), which makes the engine; call prepare first.")
        return self.engine

    # ------------------------------------------------------------------ state

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Tensor]:
        """The whole model on rank 0, an empty dict on others. Collective."""
        if isinstance(model, HostedModel):
            return model.engine.full_state_dict()
        return dict(super().get_state_dict(model, unwrap))

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        """Accelerate's files of loaders, schedulers and random state, and the engine's checkpoint. Collective."""
        with _without(self):
            return super().save_state(*args, **kwargs)

    def load_state(self, *args: Any, **kwargs: Any) -> None:
        """Go on from ``save_state``; the engine's part on any grid. Collective."""
        with _without(self):
            super().load_state(*args, **kwargs)
        for scheduler in self._schedulers:
            set_rates(scheduler)

    def _save_beside(self, models: Any, weights: Any, folder: str) -> None:
        self._running("save_state").save_checkpoint(Path(folder, FOLDER)).wait()

    def _load_beside(self, models: Any, folder: str) -> None:
        self._running("load_state").load_checkpoint(Path(folder, FOLDER))


def set_rates(scheduler: Any) -> None:
    """Give the optimizer the rates at which a scheduler has stopped, which its own loading leaves to the optimizer."""
    inner = getattr(scheduler, "scheduler", scheduler)
    for group, rate in zip(inner.optimizer.param_groups, inner.get_last_lr(), strict=True):
        group["lr"] = rate


class _without:  # noqa: N801, a block
    """Inside, the accelerator saves and loads no models and optimizers of its own: they are the engine's."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def __enter__(self) -> None:
        self._kept = self._accelerator._models, self._accelerator._optimizers
        self._accelerator._models, self._accelerator._optimizers = [], []

    def __exit__(self, *_: object) -> None:
        self._accelerator._models, self._accelerator._optimizers = self._kept


def _own(raw: dict[str, Any], key: str, value: int, owner: str) -> None:
    """Take a size from the host, or refuse another one in the configuration."""
    if raw.get(key, "auto") in ("auto", None):
        raw[key] = value
    elif raw[key] != value:
        raise ConfigError(
            f'{key} is {raw[key]} in engine_config and {value} in {owner}; give the same, or "auto" in engine_config.'
        )
