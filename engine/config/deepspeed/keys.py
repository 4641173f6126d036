"""Table of DeepSpeed's own keys: each is honored, noted as without effect, or refused with the reason. Pure data.

Keys that Trine shares with DeepSpeed are declared in ``sections`` instead. The table covers DeepSpeed 0.19 and the
older spellings that its files still use.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from engine.config.rules import Choice, Flag, FrozenMap, Int, Rule, Text
from engine.config.wording import join_path


@dataclass(frozen=True, slots=True)
class Noted:
    """Treatment of a DeepSpeed key without effect in Trine: the user gets a note with the ``reason``.

    Values in ``idle`` get no note.
    """

    reason: str
    idle: tuple[object, ...] = ()
    rule: Rule | None = None
    """Rule that the value must obey, for keys with a few valid words."""


@dataclass(frozen=True, slots=True)
class Only:
    """Treatment of a DeepSpeed key for a feature that Trine lacks.

    Values in ``allowed`` are accepted; others are errors with the ``reason``.
    """

    allowed: tuple[object, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Moved:
    """Treatment of a DeepSpeed key that sets the Trine key ``target``. Values in ``idle`` have no effect.

    ``becomes``: a mapping from DeepSpeed's values to Trine's, or one Trine value for all.
    """

    target: str
    rule: Rule
    idle: tuple[object, ...] = (None,)
    becomes: Mapping[Any, Any] | str = field(default_factory=FrozenMap)


@dataclass(frozen=True, slots=True)
class Feature:
    """Treatment of a DeepSpeed section: ignored while its key ``switch`` is off, an error while it is on.

    A note replaces the error if ``noted`` is True (training is the same without the section), or if ``passed`` is True
    (``engine.deepspeed`` implements the section).
    """

    reason: str
    switch: str = "enabled"
    off: tuple[object, ...] = (False, None)
    noted: bool = False
    """True if training is the same without the section: a note names the replacement, in place of an error."""
    passed: bool = False
    """True if ``engine.deepspeed`` implements the section (``read_keywords``); a note explains it."""
    keys: Mapping[str, "Treatment"] = field(default_factory=FrozenMap)
    """Treatment of the section's keys while the switch is on; for all other keys, ``reason`` is the note."""


@dataclass(frozen=True, slots=True)
class WithMode:
    """Treatment of a DeepSpeed key in the section ``activation_checkpointing``.

    Values in ``idle`` are ignored. For any other value, the Trine key named in ``target`` gets the value ``becomes``.
    If ``target`` is empty or the section lacks ``mode``, a note says that the DeepSpeed key changes nothing.
    """

    idle: tuple[object, ...]
    reason: str
    target: str = ""
    becomes: str = ""


Treatment = Noted | Only | Moved | Feature | WithMode

_OWN_PLAN = "Trine plans its own messages"
_ALWAYS = "Trine always does this"
_REPORTED = "Trine's step report has these figures"
_NO_EFFECT = "only DeepSpeed's internals read it"

_NOTED = MappingProxyType({
    "": {
        _REPORTED: "wall_clock_breakdown memory_breakdown dump_state timers",
        _OWN_PLAN: "prescale_gradients gradient_predivide_factor disable_allgather allgather_size"
                   " seq_parallel_communication_data_type",
        _NO_EFFECT: "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer disable_python_gc"
                    " vocabulary_size graph_harvesting aio",
        "your data loader decides": "dataloader_drop_last",
        "DeepSpeed reads it nowhere; only its log of a configuration has such names": "comms_config monitor_config"
                   " activation_checkpointing_config aio_config autotuning_config checkpoint_config compile_config"
                   " flops_profiler_config nebula_config",
        "the environment variable of that name selects the GPUs of a process": "cuda_visible_devices",
    },
    "zero_optimization": {
        _OWN_PLAN: "overlap_comm contiguous_gradients reduce_scatter allgather_partitions"
                   " allgather_bucket_size use_multi_rank_bucket_allreduce round_robin_gradients"
                   " sub_group_size stage3_prefetch_bucket_size prefetch_bucket_size"
                   " stage3_param_persistence_threshold param_persistence_threshold"
                   " stage3_model_persistence_threshold"
                   " model_persistence_threshold"
                   " stage3_max_live_parameters max_live_parameters stage3_max_reuse_distance"
                   " max_reuse_distance stage3_module_granularity_threshold module_granularity_threshold"
                   " stage3_use_all_reduce_for_fetch_params use_all_reduce_for_fetch_params"
                   " stage3_allgather_sequential allgather_sequential parameter_alignment",
        _NO_EFFECT: "load_from_fp32_weights elastic_checkpoint legacy_stage1 memory_efficient_linear"
                    " pipeline_loading_checkpoint override_module_apply log_trace_cache_warnings leaf_module"
                    " fast_sharding_for_leaf_module"
                    " save_muon_momentum_buffer_in_memory enable_sanity_checks",
        _ALWAYS: "ignore_unused_parameters compute_grad_norm",
        "save_pretrained, and save_16bit_model of engine.deepspeed, write full weights":
                   "stage3_gather_16bit_weights_on_model_save"
                   " gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save",
    },
    "torch_autocast": {"torch's own list of operators decides the casts": "lower_precision_safe_modules"},
    "zero_optimization.offload_optimizer": {
        _NO_EFFECT: "pipeline_read pipeline_write fast_init super_offload"
                    " cpuadam_cores_perc",
    },
    "zero_optimization.offload_param": {
        "parameters are never on disk here, and a bucket is on the device while it is gathered": "nvme_path"
                    " buffer_count buffer_size max_in_cpu",
    },
    "bf16": {_NO_EFFECT: "immediate_grad_update"},
    "optimizer": {_NO_EFFECT: "legacy_fusion"},
    "optimizer.params": {
        _NO_EFFECT: "torch_adam fused foreach",
        "moments are never compressed; zero_optimization.zero_quantized_gradients sends gradients in fewer bits":
                   "freeze_step var_freeze_step var_update_scaler"
                   " local_step_scaler local_step_clipper cuda_aware comm_backend_name"
                   " coeff_beta factor_max factor_min factor_threshold",
    },
    "activation_checkpointing": {
        _NO_EFFECT: "profile synchronize_checkpoint_boundary",
    },
    "checkpoint": {
        "Trine's checkpoints are whole or absent and load on any grid": "load_universal"
                   " parallel_write writer checkpoint_serialization",
    },
    "pipeline": {
        _OWN_PLAN: "pipe_partitioned grad_partitioned",
        "recomputation here is never re-entrant, with the same result": "use_reentrant",
    },
    "tensor_parallel": {
        "Trine finds the styles from the model, or reads parallel.tensor_plan": "preset_model dtype partition_config"
                   " injection_policy_tuple tp_grain_size keep_module_on_host replace_with_kernel_inject",
        _OWN_PLAN: "tp_overlap_comm",
        "the tensor plan shards a head and its loss over the vocabulary where it can": "vocab_parallel_lm_head"
                   " vocab_parallel_ce_backend",
    },
    "tensor_parallel.tp": {"Trine finds the styles from the model": "tp_grain_size"},
    "flops_profiler": {
        _REPORTED: "enabled profile_step module_depth top_modules detailed output_file recompute_fwd_factor",
    },
    "comms_logger": {_REPORTED: "enabled verbose prof_all prof_ops debug"},
    "compile": {
        _NO_EFFECT: "free_activation offload_activation offload_opt_states offload_parameters double_buffer"
                    " symmetric_memory debug_log sync_before_reduce sync_after_reduce sync_before_allgather"
                    " sync_after_allgather keep_int_input_tensors keep_all_input_tensors passes"
                    " backend kwargs autoep_non_moe free_activation_threshold offload_activation_pin_memory",
    },
})  # fmt: skip

_OFF = (False, None)
_CURRICULUM = "Trine does not change the data; order or cut it in your data loader"
_SCRIPT = "as in DeepSpeed, only a call in the script applies it; make that call before engine.initialize"
_LOGGERS = "Trine writes monitor.jsonl, csv, tensorboard, wandb and mlflow; use those"
_GRID = "parallel.tensor sets the number of ranks that shard a layer; remove it"
_EXPERTS = "parallel.expert shares experts among data ranks; without it each holds all, with equal results"
_OTHER_ADAM = "AdamW and Adam here are torch's; pass optimizer=... to engine.initialize"

_TECHNIQUES = ("weight_quantization", "activation_quantization", "sparse_pruning", "row_pruning", "head_pruning",
               "channel_pruning")  # fmt: skip
_COMPRESSION: Mapping[str, Mapping[str, Treatment]] = MappingProxyType({
    f"compression_training.{technique}": {
        "shared_parameters": Feature(_SCRIPT, noted=True),
        "different_groups": Noted(_SCRIPT),
    }
    for technique in _TECHNIQUES
})  # fmt: skip
_TREATED: Mapping[str, Mapping[str, Treatment]] = MappingProxyType({
    "": {
        "steps_per_print": Moved("monitor.every", Int(low=1), (None, float("inf"))),
        "fp32_allreduce": Moved("communication_data_type", Flag(), _OFF, MappingProxyType({True: "fp32"})),
        "data_parallel_size": Moved("parallel.data", Int(low=1)),
        "sparse_gradients": Only(_OFF, "gradients are dense here; remove it"),
        "use_data_before_expert_parallelism": Only(_OFF, "ranks that share experts are neighbors; remove it"),
        "comet": Feature(_LOGGERS, noted=True),
        "autotuning": Feature("nothing is tuned by trial runs; `trine plan --search` ranks layouts", noted=True),
        "nebula": Feature("checkpoints are written in the background anyway", noted=True),
        "hybrid_engine": Feature("eng.generate uses the weights that are trained", noted=True),
        "expert_parallel": Feature(
            "Trine finds the experts of the model by their structure, and its own forward computes them",
            keys=MappingProxyType({
                "autoep_size": Moved("parallel.expert", Int(low=1)),
                "expert_tensor_parallel_size": Only((1, None), "parallel.expert_tensor cuts experts; remove it"),
            }),
        ),
        "moe": Feature(_EXPERTS, noted=True),
        "curriculum_learning": Feature("curriculum_seqlen", passed=True),
        "data_efficiency": Feature(_CURRICULUM),
        "progressive_layer_drop": Feature("progressive_layer_drop and pld_theta", passed=True),
        "quantize_training": Feature("DeepSpeed reads it nowhere; its section is compression_training", noted=True),
        "eigenvalue": Feature("DeepSpeed computes it for a quantized training alone", noted=True),
        "sparse_attention": Noted(_SCRIPT, (None,)),
    },
    "compression_training": {"layer_reduction": Feature(_SCRIPT, noted=True)},
    "zero_optimization": {
        "zero_quantized_nontrainable_weights": Noted(
            "quantize_frozen stores frozen weights in 8 or 4 bits, and stage 3 then gathers their codes", _OFF
        ),
        "zeropp_loco_param": Noted("zero_optimization.zero_gradient_error_feedback keeps residuals", (None,)),
        "cpu_offload_use_pin_memory": Moved(
            "zero_optimization.offload_optimizer.pin_memory", Flag(), (None,)
        ),
        "cpu_offload": Moved(
            "zero_optimization.offload_optimizer.device", Flag(), _OFF, MappingProxyType({True: "cpu"})
        ),
        **dict.fromkeys(("cpu_offload_params", "cpu_offload_param"), Moved(
            "zero_optimization.offload_param.device", Flag(), _OFF, MappingProxyType({True: "cpu"})
        )),
        "mics_shard_size": Moved("zero_optimization.shard_size", Int(low=1), (-1, None)),
        "mics_hierarchical_params_gather": Noted(
            "zero_optimization.zero_hpz_partition_size gathers within nodes where a shard group spans several", _OFF
        ),
        "zenflow": Noted("every step updates every parameter", (None,)),
    },
    "fp16": {
        "fp16_master_weights_and_grads": Only(_OFF, "fp16 training keeps fp32 copies here; remove it"),
        "auto_cast": Moved("cast_forward_inputs", Flag(), _OFF),
    },
    "optimizer.params": {
        "amsgrad": Only(_OFF, _OTHER_ADAM),
        "max_grad_norm": Only((0, None), "clipping is not the optimizer's; give gradient_clipping"),
    },
    "scheduler.params": {
        "last_batch_iteration": Only((-1, None), "a checkpoint restores the position; remove it"),
    },
    "tensor_parallel": {
        "autotp_size": Moved("parallel.tensor", Int(low=0), (None, 0)),
        "enabled": Only((True, None), "the size decides; leave parallel.tensor at 1 instead"),
    },
    "tensor_parallel.tp": {
        "tp_size": Moved("parallel.tensor", Int(low=1), (None, 1)),
        "mpu": Only((None,), _GRID),
        "tp_group": Only((None,), _GRID),
    },
    "pipeline": {
        "stages": Moved("parallel.pipeline", Int(low=1), (None, "auto")),
        "partition": Noted("DeepSpeed reads it nowhere; parallel.balance sets the measure that stages share equally",
                           ("best", "auto", None)),
        "seed_layers": Noted("DeepSpeed reads it nowhere; PipelineModule(seed_layers=True) seeds layers", _OFF),
        "activation_checkpoint_interval": Moved("activation_checkpointing.mode", Int(low=0), (0, None), "full"),
    },
    "activation_checkpointing": {
        "partition_activations": WithMode(_OFF, "parallel.sequence_parallel shards activations over tensor ranks"),
        "number_checkpoints": WithMode((None, 0), "each block is a checkpoint; every n-th only with mode selective"
                                       " and every"),
        "contiguous_memory_optimization": WithMode(_OFF, "torch's allocator places the activations"),
        "cpu_checkpointing": WithMode(_OFF, "it concerns the inputs of recomputed blocks",
                                      "activation_checkpointing.inputs", "host"),
    },
    "checkpoint": {
        "tag_validation": Noted("all ranks save under one tag, or none does", (),
                                Choice(options=("Ignore", "Warn", "Fail"), noun="a reaction", fold=True)),
        "use_node_local_storage": Only(_OFF, "checkpoints need a folder that all nodes share; remove it"),
    },
    "compile": {
        "enabled": Moved("compile", Flag(), _OFF),
        "deepcompile": Noted('Trine plans its own messages, and compiles blocks with "compile": true', _OFF),
    },
    "data_types": {
        "grad_accum_dtype": Noted("gradients are summed in fp32, which is exact enough for all", ("fp32", None),
                                  Choice(options=("fp32", "bf16", "fp16"), noun="a dtype", null=True)),
        "buffer_dtype": Moved("buffer_dtype", Choice(options=("fp32", "bf16", "fp16"), noun="a dtype", null=True)),
        "keep_in_fp32_modules": Only(("auto", None), "a model's own marks are followed here; name more in keep_fp32"),
    },
})  # fmt: skip

LOG = MappingProxyType({"enabled": Flag(), "output_path": Text(null=True), "job_name": Text(null=True)})
LOGS = MappingProxyType({"tensorboard": ("monitor.tensorboard", ""), "csv_monitor": ("monitor.csv", ".csv")})
"""DeepSpeed's log sections with output path and job name: Trine's key, and the suffix of its file (empty for a
folder).
"""
TABLE: Mapping[str, Treatment] = MappingProxyType(
    {
        join_path(at, key): Noted(why)
        for at, group in _NOTED.items()
        for why, keys in group.items()
        for key in keys.split()
    }
    | {
        join_path(at, key): treatment
        for at, group in (*_TREATED.items(), *_COMPRESSION.items())
        for key, treatment in group.items()
    }
)
KEYS = (
    *TABLE,
    *(f"{section}.{key}" for section in LOGS for key in LOG),
    *(f"wandb.{key}" for key in ("enabled", "project", "team", "group")),
    *(*LOGS, "wandb", "bfloat16", "amp", "elasticity", "sequence_parallel_size"),
)
DERIVED: Mapping[str, str] = MappingProxyType({
    **dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
                    "derived from the other sizes here"),
    "zero_optimization.reduce_bucket_size": "Trine's own size here",
})  # fmt: skip
"""Value of each Trine key for "auto", a word that files for the Hugging Face Trainer contain."""
