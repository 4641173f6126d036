"""Configuration members of DeepSpeed's engine object, and the helper objects that scripts find on it."""

from typing import Any

import torch

from engine.config.sections import ZeroConfig
from engine.engine import Engine
from engine.precision.dtypes import NAMED_DTYPES


class Throughput:
    """``tput_timer``: measures nothing, because the step report has the figures."""

    def __init__(self) -> None:
        self.epoch_count = 0

    def update_epoch_count(self) -> None:
        """Counts an epoch."""
        self.epoch_count += 1

    def start(self) -> None:
        """Does nothing."""

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """Does nothing."""


class Timers:
    """``timers``: returns a timer that measures nothing, for any name."""

    def __call__(self, name: str) -> Throughput:
        """Returns a timer."""
        return Throughput()

    def log(self, *_: Any, **__: Any) -> None:
        """Does nothing."""


class DeepSpeedMonitor:
    """``monitor``: does nothing, because section ``monitor`` of the configuration writes the figures."""

    enabled = False

    def write_events(self, events: list[Any], flush: bool = True) -> None:
        """Does nothing."""


class AskedSettings:
    """Values of the configuration as methods with DeepSpeed's names."""

    engine: Engine

    def steps_per_print(self) -> int:
        """Returns the steps between two reports."""
        return self.engine.config.monitor.every

    def optimizer_name(self) -> str | None:
        """Returns the name of the configured optimizer in lower case."""
        section = self.engine.config.optimizer
        return section.type.lower() if section is not None else None

    def optimizer_params(self) -> dict[str, Any] | None:
        """Returns the options of the configured optimizer."""
        section = self.engine.config.optimizer
        return dict(section.params) if section is not None else None

    def scheduler_name(self) -> str | None:
        """Returns the name of the configured schedule."""
        section = self.engine.config.scheduler
        return section.type if section is not None else None

    def scheduler_params(self) -> dict[str, Any] | None:
        """Returns the options of the configured schedule."""
        section = self.engine.config.scheduler
        return dict(section.params) if section is not None else None

    def dynamic_loss_scale(self) -> bool:
        """Returns True if the loss scale is dynamic."""
        return self.engine.config.fp16.enabled and not self.engine.config.fp16.loss_scale

    def initial_dynamic_scale(self) -> float:
        """Returns the initial loss scale of dynamic scaling."""
        return float(2**self.engine.config.fp16.initial_scale_power)

    def managed_gradient_accumulation(self) -> bool:
        """Returns True if a step is due after ``gradient_accumulation_steps`` microbatches."""
        return self.engine.config.managed_gradient_accumulation

    def torch_autocast_enabled(self) -> bool:
        """Returns True if forwards run inside torch.autocast."""
        return self.engine.config.torch_autocast.enabled

    def torch_autocast_dtype(self) -> torch.dtype | None:
        """Returns the dtype of torch.autocast; None if it is off."""
        return torch.bfloat16 if self.torch_autocast_enabled() else None

    def zero_optimization_partition_gradients(self) -> bool:
        """Returns True if gradients are sharded."""
        return self.engine.config.zero_optimization.stage >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """Returns True if parameters are sharded."""
        return self.engine.config.zero_optimization.stage >= 3

    @property
    def _zero(self) -> ZeroConfig:
        return self.engine.config.zero_optimization

    def zero_reduce_scatter(self) -> bool:
        """Returns True: sharded gradients are reduce-scattered."""
        return True

    def zero_allgather_partitions(self) -> bool:
        """Returns True: updated shards are all-gathered, not broadcast."""
        return True

    def zero_overlap_comm(self) -> bool:
        """Returns True: buckets are reduced while backward runs."""
        return True

    def zero_contiguous_gradients(self) -> bool:
        """Returns True: the gradients of a bucket share one buffer."""
        return True

    def zero_reduce_bucket_size(self) -> int:
        """Returns the number of elements of a bucket."""
        return self._zero.bucket_elements

    zero_allgather_bucket_size = zero_reduce_bucket_size  # buckets are gathered as they are reduced

    def zero_param_persistence_threshold(self) -> int:
        """Returns 0: stage 3 shards parameters of every size."""
        return 0

    zero_model_persistence_threshold = zero_param_persistence_threshold

    def zero_hpz_partition_size(self) -> int | str:
        """Returns the number of data ranks of a node that share a secondary shard; 1: there is no secondary shard."""
        return self._zero.zero_hpz_partition_size

    def mics_shard_size(self) -> int:
        """Returns the number of data ranks in a shard group; -1: all data ranks."""
        return self._zero.shard_size or -1

    def zero_quantized_weights(self) -> bool:
        """Returns True if parameters are all-gathered in fewer bits."""
        return self._zero.zero_quantized_weights

    def zero_quantized_gradients(self) -> bool:
        """Returns True if gradients are reduced in fewer bits."""
        return self._zero.zero_quantized_gradients

    def zero_quantized_nontrainable_weights(self) -> bool:
        """Returns True if frozen weights are stored in fewer bits."""
        return self.engine.config.quantize_frozen is not None

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Returns True: ``save_16bit_model`` writes full weights at every stage."""
        return True

    def zero_ignore_unused_parameters(self) -> bool:
        """Returns True: a parameter without a gradient is not an error."""
        return True

    def zero_elastic_checkpoint(self) -> bool:
        """Returns True: a checkpoint loads on any number of data ranks."""
        return True

    def zero_load_from_fp32_weights(self) -> bool:
        """Returns True: masters are read from the fp32 weights of a checkpoint."""
        return True

    def zero_legacy_stage1(self) -> bool:
        """Returns False."""
        return False

    def zero_allow_untested_optimizer(self) -> bool:
        """Returns True: any optimizer whose update can be sharded is accepted, any other raises."""
        return True

    def zero_offload_optimizer(self) -> Any:
        """Returns the section for offloaded optimizer state; None: it stays on the device."""
        return self._zero.offload_optimizer if self._zero.offload_optimizer.device != "none" else None

    def zero_offload_param(self) -> Any:
        """Returns the section for offloaded parameters; None: they stay on the device."""
        return self._zero.offload_param if self._zero.offload_param.device != "none" else None

    def zero_use_cpu_optimizer(self) -> bool:
        """Returns True if the host runs the update, with moments in its memory or on a disk."""
        return self._zero.offload_optimizer.device != "none"

    def zero_cpu_offload(self) -> bool:
        """Returns True if the optimizer state is in host memory."""
        return self._zero.offload_optimizer.device == "cpu"

    def zero_nvme_offload_optimizer(self) -> bool:
        """Returns True if the moments are on a disk."""
        return self._zero.offload_optimizer.device == "nvme"

    def zero_partial_offload(self) -> float | str:
        """Returns the fraction of elements with offloaded optimizer state."""
        return self._zero.offload_optimizer.ratio

    def bf16_master_weights_and_gradients(self) -> bool:
        """Returns True if a bf16 run has no fp32 masters."""
        return self.engine.config.bf16.bf16_master_weights_and_grads

    def bf16_optimizer_states(self) -> bool:
        """Returns True if a bf16 run stores optimizer state in bf16."""
        return self.engine.config.bf16.bf16_optimizer_states

    def fp16_master_weights_and_gradients(self) -> bool:
        """Returns False: an fp16 run has fp32 masters."""
        return False

    def fp16_auto_cast(self) -> bool:
        """Returns True if floating inputs are cast to the dtype of the model."""
        return self.engine.config.cast_forward_inputs

    @property
    def communication_data_type(self) -> torch.dtype | None:
        """dtype of reduced gradients; None: the dtype of their accumulation."""
        return NAMED_DTYPES[self.engine.config.communication_data_type]

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """Returns (dtype of the model, dtype of its accumulated gradients)."""
        config = self.engine.config
        if config.bf16.enabled:
            held = config.bf16.bf16_master_weights_and_grads
            return torch.bfloat16, torch.bfloat16 if held else torch.float32
        return torch.float16 if config.fp16.enabled else torch.float32, torch.float32

    def amp_enabled(self) -> bool:
        """Returns False: ``amp`` is read as ``torch_autocast``."""
        return False

    def sparse_gradients_enabled(self) -> bool:
        """Returns False: gradients are dense."""
        return False

    @property
    def sparse_tensor_module_names(self) -> set[str]:
        """Modules with sparse gradients: always empty."""
        return set()

    def flops_profiler_enabled(self) -> bool:
        """Returns False: the step report has the figures."""
        return False

    def use_node_local_storage(self) -> bool:
        """Returns False: a checkpoint is one folder, which all nodes share."""
        return False

    def load_universal_checkpoint(self) -> bool:
        """Returns True: every checkpoint loads on any grid."""
        return True

    def autotp_size(self) -> int:
        """Returns the number of tensor ranks."""
        return self.engine.grid.tp

    def postscale_gradients(self) -> bool:
        """Returns True: gradients are divided after the reduction."""
        return True

    def gradient_predivide_factor(self) -> float:
        """Returns 1: gradients are not divided before the reduction."""
        return 1.0

    def wall_clock_breakdown(self) -> bool:
        """Returns False: the step report has these figures."""
        return False

    def memory_breakdown(self) -> bool:
        """Returns False: the step report has these figures."""
        return False

    def dump_state(self) -> bool:
        """Returns False."""
        return False

    def random_ltd_enabled(self) -> bool:
        """Returns False: no token is dropped."""
        return False

    def curriculum_learning_enabled(self) -> bool:
        """Returns False: ``data_efficiency`` is an error."""
        return False

    def eigenvalue_enabled(self) -> bool:
        """Returns False."""
        return False

    def autotuning_enabled(self) -> bool:
        """Returns False."""
        return False

    def data_efficiency_enabled(self) -> bool:
        """Returns False: the script provides the data."""
        return False
