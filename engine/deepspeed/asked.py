"""What scripts ask DeepSpeed's engine object about its configuration, and the objects that they find on it."""

from typing import Any

import torch

from engine.engine import Engine


class Throughput:
    """``tput_timer``: the step report has the figures, so it measures nothing."""

    def __init__(self) -> None:
        self.epoch_count = 0

    def update_epoch_count(self) -> None:
        """Count an epoch."""
        self.epoch_count += 1

    def start(self) -> None:
        """Nothing."""

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """Nothing."""


class Timers:
    """``timers``: any name gives a timer that measures nothing."""

    def __call__(self, name: str) -> Throughput:
        """A timer."""
        return Throughput()

    def log(self, *_: Any, **__: Any) -> None:
        """Nothing."""


class DeepSpeedMonitor:
    """``monitor``: ``monitor`` of the configuration writes the figures of the engine itself."""

    enabled = False

    def write_events(self, events: list[Any], flush: bool = True) -> None:
        """Nothing."""


class AskedSettings:
    """Values of the configuration by DeepSpeed's names for them, each a call."""

    engine: Engine

    def steps_per_print(self) -> int:
        """Steps between two reports."""
        return self.engine.config.monitor.every

    def optimizer_name(self) -> str | None:
        """Name of the configured optimizer, in small letters."""
        section = self.engine.config.optimizer
        return section.type.lower() if section is not None else None

    def optimizer_params(self) -> dict[str, Any] | None:
        """Options of the configured optimizer."""
        section = self.engine.config.optimizer
        return dict(section.params) if section is not None else None

    def scheduler_name(self) -> str | None:
        """Name of the configured schedule."""
        section = self.engine.config.scheduler
        return section.type if section is not None else None

    def scheduler_params(self) -> dict[str, Any] | None:
        """Options of the configured schedule."""
        section = self.engine.config.scheduler
        return dict(section.params) if section is not None else None

    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale moves."""
        return self.engine.config.fp16.enabled and not self.engine.config.fp16.loss_scale

    def initial_dynamic_scale(self) -> float:
        """Loss scale at the start, where it moves."""
        return float(2**self.engine.config.fp16.initial_scale_power)

    def managed_gradient_accumulation(self) -> bool:
        """Whether a step is due after ``gradient_accumulation_steps`` microbatches."""
        return self.engine.config.managed_gradient_accumulation

    def torch_autocast_enabled(self) -> bool:
        """Whether forwards run inside torch.autocast."""
        return self.engine.config.torch_autocast.enabled

    def torch_autocast_dtype(self) -> torch.dtype | None:
        """Its dtype."""
        return torch.bfloat16 if self.torch_autocast_enabled() else None

    def zero_optimization_partition_gradients(self) -> bool:
        """Whether gradients are sharded."""
        return self.engine.config.zero_optimization.stage >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """Whether parameters are sharded."""
        return self.engine.config.zero_optimization.stage >= 3

    def zero_reduce_scatter(self) -> bool:
        """True: sharded gradients are reduce-scattered."""
        return True

    def zero_offload_optimizer(self) -> Any:
        """Place of the optimizer's state; None: the device."""
        place = self.engine.config.zero_optimization.offload_optimizer
        return place if place.device != "none" else None

    def zero_offload_param(self) -> Any:
        """Place of the parameters; None: the device."""
        place = self.engine.config.zero_optimization.offload_param
        return place if place.device != "none" else None

    def zero_cpu_offload(self) -> bool:
        """Whether the optimizer's state is on the host."""
        return self.engine.config.zero_optimization.offload_optimizer.device == "cpu"

    def autotp_size(self) -> int:
        """Tensor ranks."""
        return self.engine.grid.tp

    def postscale_gradients(self) -> bool:
        """True: gradients are divided after their sum."""
        return True

    def gradient_predivide_factor(self) -> float:
        """1: nothing is divided before the sum."""
        return 1.0

    def wall_clock_breakdown(self) -> bool:
        """False: the step report has these figures."""
        return False

    def memory_breakdown(self) -> bool:
        """False: the step report has these figures."""
        return False

    def dump_state(self) -> bool:
        """False."""
        return False

    def random_ltd_enabled(self) -> bool:
        """False: no token is dropped."""
        return False

    def curriculum_learning_enabled(self) -> bool:
        """False: ``data_efficiency`` is refused."""
        return False

    def eigenvalue_enabled(self) -> bool:
        """False."""
        return False

    def autotuning_enabled(self) -> bool:
        """False."""
        return False

    def data_efficiency_enabled(self) -> bool:
        """False: the data is the script's."""
        return False
