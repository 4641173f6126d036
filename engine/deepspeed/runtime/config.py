"""``deepspeed.runtime.config``: the configuration as an object with DeepSpeed's names."""

import os
from collections.abc import Mapping
from typing import Any

import torch

from engine.config import Config, load_config
from engine.errors import ConfigError
from engine.parallel.comm.world import read_world

DeepSpeedConfigError = ConfigError
ADAM_OPTIMIZER, ADAMW_OPTIMIZER, LAMB_OPTIMIZER = "adam", "adamw", "lamb"
ADAGRAD_OPTIMIZER, LION_OPTIMIZER, MUON_OPTIMIZER = "adagrad", "lion", "muon"


class DeepSpeedConfig:
    """Configuration with DeepSpeed's attribute names; absent batch sizes are computed from the number of data ranks.

    Args:
        config: dict, or path of a JSON file.
        mpu: object with a method ``get_data_parallel_world_size``; None: all ranks are data ranks.
        mesh_device: has no effect.

    Raises:
        ConfigError: the configuration has mistakes.
    """

    def __init__(self, config: str | os.PathLike[str] | Mapping[str, Any], mpu: Any = None, mesh_device: Any = None):
        size = read_world().size if mpu is None else int(mpu.get_data_parallel_world_size())
        self.resolved: Config = load_config(config, size, pass_strangers=True)
        given = self.resolved
        self.world_size = size
        self.train_batch_size = given.train_batch_size
        self.train_micro_batch_size_per_gpu = given.micro
        self.gradient_accumulation_steps = given.accumulation
        self.gradient_clipping = given.gradient_clipping
        self.gradient_allreduce_op = given.gradient_allreduce_op
        self.managed_gradient_accumulation = given.managed_gradient_accumulation
        self.zero_optimization_stage = given.zero_optimization.stage
        self.zero_enabled = self.zero_optimization_stage > 0
        self.zero_config = given.zero_optimization
        self.float16_config, self.bfloat16_config = given.fp16, given.bf16
        self.fp16_enabled, self.bfloat16_enabled = given.fp16.enabled, given.bf16.enabled
        self.torch_autocast_enabled = given.torch_autocast.enabled
        self.torch_autocast_dtype = torch.bfloat16 if given.torch_autocast.enabled else None
        self.optimizer_name = given.optimizer.type.lower() if given.optimizer is not None else None
        self.optimizer_params = dict(given.optimizer.params) if given.optimizer is not None else None
        self.scheduler_name = given.scheduler.type if given.scheduler is not None else None
        self.scheduler_params = dict(given.scheduler.params) if given.scheduler is not None else None

    def print(self, name: str) -> None:
        """Prints ``name``, a colon and the configuration as JSON values, with defaults for absent keys."""
        print(f"{name}: {self.resolved.to_json()}")
