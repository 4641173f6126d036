"""Methods of DeepSpeed's engine object that return configuration values, and its helper objects."""

from typing import Any

import torch

from engine.config.sections import ZeroConfig
from engine.engine import Engine
from engine.precision.dtypes import NAMED_DTYPES


class Throughput:
    """Timer without effect, for DeepSpeed's attribute ``tput_timer``."""

    def __init__(self) -> None:
        self.epoch_count = 0

    def update_epoch_count(self) -> None:
        """Adds one to the attribute ``epoch_count``."""
        self.epoch_count += 1

    def start(self) -> None:
        """Does nothing; the ``StepReport`` of each step has the throughput."""

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """Does nothing; the ``StepReport`` of each step has the throughput."""


class Timers:
    """Timers without effect, for DeepSpeed's attribute ``timers``."""

    def __call__(self, name: str) -> Throughput:
        """Returns a timer."""
        return Throughput()

    def log(self, *_: Any, **__: Any) -> None:
        """Does nothing; the ``StepReport`` of each step has its duration."""


class DeepSpeedMonitor:
    """Monitor without effect, for DeepSpeed's attribute ``monitor``."""

    enabled = False

    def write_events(self, events: list[Any], flush: bool = True) -> None:
        """Drops ``events``. The engine logs only its own metrics, as the configuration section ``monitor`` sets."""


class AskedSettings:
    """Base class of ``DeepSpeedEngine`` with DeepSpeed's getters of configuration values."""

    engine: Engine

    def steps_per_print(self) -> int:
        """Returns the configuration value ``monitor.every``: the number of steps between two logged step reports."""
        return self.engine.config.monitor.every

    def optimizer_name(self) -> str | None:
        """Returns the type of the configured optimizer in lower case, such as "adamw"; None if none is configured."""
        section = self.engine.config.optimizer
        return section.type.lower() if section is not None else None

    def optimizer_params(self) -> dict[str, Any] | None:
        """Returns the section ``optimizer.params`` of the configuration, with defaults for absent keys; None if no
        optimizer is configured.
        """
        section = self.engine.config.optimizer
        return dict(section.params) if section is not None else None

    def scheduler_name(self) -> str | None:
        """Returns the type of the configured learning-rate schedule, such as "WarmupLR"; None if none is configured."""
        section = self.engine.config.scheduler
        return section.type if section is not None else None

    def scheduler_params(self) -> dict[str, Any] | None:
        """Returns the section ``scheduler.params`` of the configuration; None if no schedule is configured."""
        section = self.engine.config.scheduler
        return dict(section.params) if section is not None else None

    def dynamic_loss_scale(self) -> bool:
        """Returns True in an fp16 run without a fixed loss scale."""
        return self.engine.config.fp16.enabled and not self.engine.config.fp16.loss_scale

    def initial_dynamic_scale(self) -> float:
        """Returns the initial dynamic loss scale, 2 to the power of ``fp16.initial_scale_power``."""
        return float(2**self.engine.config.fp16.initial_scale_power)

    def managed_gradient_accumulation(self) -> bool:
        """Returns True if only every ``gradient_accumulation_steps``-th call of ``step`` updates the weights, False if
        every call does.
        """
        return self.engine.config.managed_gradient_accumulation

    def torch_autocast_enabled(self) -> bool:
        """Returns True if forwards run inside torch.autocast."""
        return self.engine.config.torch_autocast.enabled

    def torch_autocast_dtype(self) -> torch.dtype | None:
        """Returns ``torch.bfloat16`` if forwards run inside torch.autocast, otherwise None."""
        return torch.bfloat16 if self.torch_autocast_enabled() else None

    def zero_optimization_partition_gradients(self) -> bool:
        """Returns True if gradients are sharded over data ranks (ZeRO 2 and 3)."""
        return self.engine.config.zero_optimization.stage >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """Returns True if parameters are sharded over data ranks (ZeRO 3)."""
        return self.engine.config.zero_optimization.stage >= 3

    @property
    def _zero(self) -> ZeroConfig:
        return self.engine.config.zero_optimization

    def zero_reduce_scatter(self) -> bool:
        """Returns True, because sharded gradients are reduce-scattered."""
        return True

    def zero_allgather_partitions(self) -> bool:
        """Returns True, because updated shards are all-gathered, not broadcast."""
        return True

    def zero_overlap_comm(self) -> bool:
        """Returns True, because gradients are reduced during the backward."""
        return True

    def zero_contiguous_gradients(self) -> bool:
        """Returns True, because the gradients of a bucket share one buffer."""
        return True

    def zero_reduce_bucket_size(self) -> int:
        """Returns the number of elements of a bucket, the unit of gradient reductions and parameter gathers."""
        return self._zero.bucket_elements

    zero_allgather_bucket_size = zero_reduce_bucket_size  # buckets are gathered as they are reduced

    def zero_param_persistence_threshold(self) -> int:
        """Returns 0, because ZeRO 3 shards parameters of every size."""
        return 0

    zero_model_persistence_threshold = zero_param_persistence_threshold

    def zero_hpz_partition_size(self) -> int | str:
        """Returns the number of data ranks that share one secondary copy of the parameters (ZeRO++ hpZ), or "auto".

        0 or 1: no secondary copy; "auto": the data ranks of a node share one.
        """
        return self._zero.zero_hpz_partition_size

    def mics_shard_size(self) -> int:
        """Returns the number of data ranks that together have one copy of the ZeRO-sharded state (MiCS); -1: all data
        ranks.
        """
        return self._zero.shard_size or -1

    def zero_quantized_weights(self) -> bool:
        """Returns True if parameters are quantized for all-gathers (ZeRO++ qwZ)."""
        return self._zero.zero_quantized_weights

    def zero_quantized_gradients(self) -> bool:
        """Returns True if gradients are quantized for reductions (ZeRO++ qgZ)."""
        return self._zero.zero_quantized_gradients

    def zero_quantized_nontrainable_weights(self) -> bool:
        """Returns True if frozen weights are stored quantized, as the section ``quantize_frozen`` configures."""
        return self.engine.config.quantize_frozen is not None

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Returns True, because ``save_16bit_model`` writes full weights at every ZeRO stage."""
        return True

    def zero_ignore_unused_parameters(self) -> bool:
        """Returns True, because a parameter without a gradient is not an error."""
        return True

    def zero_elastic_checkpoint(self) -> bool:
        """Returns True, because a checkpoint loads on any number of data ranks."""
        return True

    def zero_load_from_fp32_weights(self) -> bool:
        """Returns True, because ``load_checkpoint`` restores master weights from the checkpoint's fp32 weights."""
        return True

    def zero_legacy_stage1(self) -> bool:
        """Returns False, because ZeRO 1 has no legacy implementation."""
        return False

    def zero_allow_untested_optimizer(self) -> bool:
        """Returns True, because ``initialize`` accepts optimizers outside DeepSpeed's list of tested ones."""
        return True

    def zero_offload_optimizer(self) -> Any:
        """Returns the section ``zero_optimization.offload_optimizer``; None if optimizer state is on the GPU."""
        return self._zero.offload_optimizer if self._zero.offload_optimizer.device != "none" else None

    def zero_offload_param(self) -> Any:
        """Returns the section ``zero_optimization.offload_param``; None if parameters are on the GPU."""
        return self._zero.offload_param if self._zero.offload_param.device != "none" else None

    def zero_use_cpu_optimizer(self) -> bool:
        """Returns True if the CPU runs the optimizer update."""
        return self._zero.offload_optimizer.device != "none"

    def zero_cpu_offload(self) -> bool:
        """Returns True if optimizer state is in host memory."""
        return self._zero.offload_optimizer.device == "cpu"

    def zero_nvme_offload_optimizer(self) -> bool:
        """Returns True if the optimizer's moments are offloaded to disk."""
        return self._zero.offload_optimizer.device == "nvme"

    def zero_partial_offload(self) -> float | str:
        """Returns the value of ``offload_optimizer.ratio``: the fraction, 0 to 1, of parameter elements with optimizer
        state offloaded (without offload 1, the default), or "auto".

        "auto": the engine chooses the smallest fraction with which the state on the GPU fits into ``memory_limit``.
        """
        return self._zero.offload_optimizer.ratio

    def bf16_master_weights_and_gradients(self) -> bool:
        """Returns the value of ``bf16.bf16_master_weights_and_grads``: True for bf16 training without fp32 master
        weights.
        """
        return self.engine.config.bf16.bf16_master_weights_and_grads

    def bf16_optimizer_states(self) -> bool:
        """Returns the value of ``bf16.bf16_optimizer_states``: True to store optimizer state in bf16."""
        return self.engine.config.bf16.bf16_optimizer_states

    def fp16_master_weights_and_gradients(self) -> bool:
        """Returns False, because an fp16 run always has fp32 master weights."""
        return False

    def fp16_auto_cast(self) -> bool:
        """Returns True if floating-point inputs of the forward are cast to the model's dtype."""
        return self.engine.config.cast_forward_inputs

    @property
    def communication_data_type(self) -> torch.dtype | None:
        """Dtype of gradient reductions over ranks; None: the dtype in which gradients are accumulated."""
        return NAMED_DTYPES[self.engine.config.communication_data_type]

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """Returns (dtype of the parameters in the forward, dtype of the accumulated gradients)."""
        config = self.engine.config
        if config.bf16.enabled:
            held = config.bf16.bf16_master_weights_and_grads
            return torch.bfloat16, torch.bfloat16 if held else torch.float32
        return torch.float16 if config.fp16.enabled else torch.float32, torch.float32

    def amp_enabled(self) -> bool:
        """Returns False, because ``torch_autocast`` replaces the section ``amp``."""
        return False

    def sparse_gradients_enabled(self) -> bool:
        """Returns False, because gradients are dense."""
        return False

    @property
    def sparse_tensor_module_names(self) -> set[str]:
        """Names of modules with sparse gradients: always empty."""
        return set()

    def flops_profiler_enabled(self) -> bool:
        """Returns False; the ``StepReport`` of each step has the FLOP/s."""
        return False

    def use_node_local_storage(self) -> bool:
        """Returns False, because all nodes share one checkpoint folder."""
        return False

    def load_universal_checkpoint(self) -> bool:
        """Returns True, because every checkpoint loads on any grid of ranks."""
        return True

    def autotp_size(self) -> int:
        """Returns the number of tensor-parallel ranks."""
        return self.engine.grid.tp

    def postscale_gradients(self) -> bool:
        """Returns True, because gradients are divided after the reduction."""
        return True

    def gradient_predivide_factor(self) -> float:
        """Returns 1, because gradients are not divided before the reduction."""
        return 1.0

    def wall_clock_breakdown(self) -> bool:
        """Returns False; the ``StepReport`` of each step has its duration."""
        return False

    def memory_breakdown(self) -> bool:
        """Returns False; the ``StepReport`` of each step has the peak memory."""
        return False

    def dump_state(self) -> bool:
        """Returns False, because a printout of the engine's state is not supported."""
        return False

    def random_ltd_enabled(self) -> bool:
        """Returns False, because random layerwise token dropping is not supported."""
        return False

    def curriculum_learning_enabled(self) -> bool:
        """Returns False, because curriculum learning in the section ``data_efficiency`` is not supported."""
        return False

    def eigenvalue_enabled(self) -> bool:
        """Returns False, because the section ``eigenvalue`` has no effect."""
        return False

    def autotuning_enabled(self) -> bool:
        """Returns False, because DeepSpeed's autotuning is not supported."""
        return False

    def data_efficiency_enabled(self) -> bool:
        """Returns False, because the section ``data_efficiency`` is not supported."""
        return False
