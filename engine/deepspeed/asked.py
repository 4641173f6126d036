"""What scripts ask DeepSpeed's engine object about its configuration, and the objects that they find on it."""

from typing import Any

import torch

from engine.config.sections import ZeroConfig
from engine.engine import Engine
from engine.precision.dtypes import NAMED_DTYPES


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

    @property
    def _zero(self) -> ZeroConfig:
        return self.engine.config.zero_optimization

    def zero_reduce_scatter(self) -> bool:
        """True: sharded gradients are reduce-scattered."""
        return True

    def zero_allgather_partitions(self) -> bool:
        """True: updated shards are all-gathered, not broadcast."""
        return True

    def zero_overlap_comm(self) -> bool:
        """True: a bucket travels while backward goes on."""
        return True

    def zero_contiguous_gradients(self) -> bool:
        """True: gradients of a bucket lie in one buffer."""
        return True

    def zero_reduce_bucket_size(self) -> int:
        """Elements of a bucket."""
        return self._zero.bucket_elements

    zero_allgather_bucket_size = zero_reduce_bucket_size  # buckets are gathered as they are reduced

    def zero_param_persistence_threshold(self) -> int:
        """0: at stage 3 no parameter stays whole for its size."""
        return 0

    zero_model_persistence_threshold = zero_param_persistence_threshold

    def zero_hpz_partition_size(self) -> int | str:
        """Data ranks of a node that keep gathered parameters as shards; 1: none do."""
        return self._zero.zero_hpz_partition_size

    def mics_shard_size(self) -> int:
        """Data ranks that share one copy of what the stage shards; -1: all of them."""
        return self._zero.shard_size or -1

    def zero_quantized_weights(self) -> bool:
        """Whether parameters are gathered in fewer bits."""
        return self._zero.zero_quantized_weights

    def zero_quantized_gradients(self) -> bool:
        """Whether gradients are reduced in fewer bits."""
        return self._zero.zero_quantized_gradients

    def zero_quantized_nontrainable_weights(self) -> bool:
        """Whether frozen weights are held in fewer bits."""
        return self.engine.config.quantize_frozen is not None

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """True: ``save_16bit_model`` writes whole weights at every stage."""
        return True

    def zero_ignore_unused_parameters(self) -> bool:
        """True: a parameter without a gradient is left alone."""
        return True

    def zero_elastic_checkpoint(self) -> bool:
        """True: a checkpoint loads on any number of data ranks."""
        return True

    def zero_load_from_fp32_weights(self) -> bool:
        """True: masters are read from the fp32 weights of a checkpoint."""
        return True

    def zero_legacy_stage1(self) -> bool:
        """False."""
        return False

    def zero_allow_untested_optimizer(self) -> bool:
        """True: an optimizer in code is taken where its updates allow it, and refused otherwise."""
        return True

    def zero_offload_optimizer(self) -> Any:
        """Place of the optimizer's state; None: the device."""
        return self._zero.offload_optimizer if self._zero.offload_optimizer.device != "none" else None

    def zero_offload_param(self) -> Any:
        """Place of the parameters; None: the device."""
        return self._zero.offload_param if self._zero.offload_param.device != "none" else None

    def zero_use_cpu_optimizer(self) -> bool:
        """Whether the host updates, with moments in its memory or on a disk."""
        return self._zero.offload_optimizer.device != "none"

    def zero_cpu_offload(self) -> bool:
        """Whether the optimizer's state is in host memory."""
        return self._zero.offload_optimizer.device == "cpu"

    def zero_nvme_offload_optimizer(self) -> bool:
        """Whether the moments are on a disk."""
        return self._zero.offload_optimizer.device == "nvme"

    def zero_partial_offload(self) -> float | str:
        """Part of the elements whose state is placed there."""
        return self._zero.offload_optimizer.ratio

    def bf16_master_weights_and_gradients(self) -> bool:
        """Whether a bf16 run keeps no fp32 copies."""
        return self.engine.config.bf16.bf16_master_weights_and_grads

    def bf16_optimizer_states(self) -> bool:
        """Whether it keeps optimizer state in bf16."""
        return self.engine.config.bf16.bf16_optimizer_states

    def fp16_master_weights_and_gradients(self) -> bool:
        """False: an fp16 run keeps fp32 copies."""
        return False

    def fp16_auto_cast(self) -> bool:
        """Whether floating inputs are cast to the dtype of the model."""
        return self.engine.config.cast_forward_inputs

    @property
    def communication_data_type(self) -> torch.dtype | None:
        """dtype in which gradients travel; None: that in which they are summed."""
        return NAMED_DTYPES[self.engine.config.communication_data_type]

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """(dtype of the model, dtype in which its gradients are summed)."""
        config = self.engine.config
        if config.bf16.enabled:
            held = config.bf16.bf16_master_weights_and_grads
            return torch.bfloat16, torch.bfloat16 if held else torch.float32
        return torch.float16 if config.fp16.enabled else torch.float32, torch.float32

    def amp_enabled(self) -> bool:
        """False: ``amp`` acts as torch_autocast."""
        return False

    def sparse_gradients_enabled(self) -> bool:
        """False: gradients are dense."""
        return False

    @property
    def sparse_tensor_module_names(self) -> set[str]:
        """Modules whose gradients are sparse: none."""
        return set()

    def flops_profiler_enabled(self) -> bool:
        """False: the step report has the figures."""
        return False

    def use_node_local_storage(self) -> bool:
        """False: a checkpoint is in one folder, which all nodes share."""
        return False

    def load_universal_checkpoint(self) -> bool:
        """True: every checkpoint loads on any grid."""
        return True

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
