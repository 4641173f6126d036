"""DeepSpeed's own keys: honored, noted as without effect, or refused with the reason.

Keys that Trine shares with DeepSpeed are declared in ``sections`` instead. The table covers DeepSpeed 0.19 and the
older spellings that its files still use.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real as RealNumber
from types import MappingProxyType
from typing import Any

from engine.config.other_engines import other_engines_word
from engine.config.rules import Flag, FrozenMap, Int, Problems, Rule, Text
from engine.config.wording import join_path, kind, shown_value


@dataclass(frozen=True, slots=True)
class Noted:
    """A key without effect here, whatever its value."""

    reason: str


@dataclass(frozen=True, slots=True)
class Only:
    """A key that is harmless at these values; any other value asks for something that Trine does not do."""

    allowed: tuple[object, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Moved:
    """A key that is honored under another name.

    Values in ``idle`` ask for nothing; ``becomes`` maps values to ours.
    """

    target: str
    rule: Rule
    idle: tuple[object, ...] = (None,)
    becomes: Mapping[Any, Any] = field(default_factory=FrozenMap)


@dataclass(frozen=True, slots=True)
class Feature:
    """A section that is harmless while its switch is off; its other keys are then ignored."""

    reason: str
    switch: str = "enabled"
    off: tuple[object, ...] = (False, None)


Treatment = Noted | Only | Moved | Feature

_OWN_PLAN = "Trine plans its own messages"
_ALWAYS = "Trine always does this"
_REPORTED = "Trine's step report has these figures"
_BUILDS = "DeepSpeed's own pipeline or launcher reads it"
_NO_EFFECT = "only DeepSpeed's internals read it"

_NOTED = MappingProxyType({
    "": {
        _REPORTED: "wall_clock_breakdown memory_breakdown dump_state timers",
        _OWN_PLAN: "prescale_gradients gradient_predivide_factor disable_allgather"
                   " seq_parallel_communication_data_type",
        _NO_EFFECT: "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer disable_python_gc"
                    " vocabulary_size graph_harvesting aio",
        "your data loader decides": "dataloader_drop_last",
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
                   " stage3_allgather_sequential allgather_sequential",
        _NO_EFFECT: "load_from_fp32_weights elastic_checkpoint legacy_stage1 memory_efficient_linear"
                    " pipeline_loading_checkpoint override_module_apply log_trace_cache_warnings leaf_module"
                    " fast_sharding_for_leaf_module cpu_offload_use_pin_memory"
                    " save_muon_momentum_buffer_in_memory enable_sanity_checks",
        _ALWAYS: "ignore_unused_parameters compute_grad_norm",
        "save_pretrained writes whole weights when asked": "stage3_gather_16bit_weights_on_model_save"
                   " gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save",
    },
    "zero_optimization.offload_optimizer": {
        _NO_EFFECT: "buffer_count pin_memory pipeline_read pipeline_write fast_init ratio super_offload"
                    " cpuadam_cores_perc",
    },
    "fp16": {_NO_EFFECT: "auto_cast"},
    "bf16": {_NO_EFFECT: "immediate_grad_update"},
    "optimizer": {_NO_EFFECT: "legacy_fusion"},
    "optimizer.params": {_NO_EFFECT: "torch_adam fused foreach"},
    "activation_checkpointing": {
        "activation_checkpointing.mode says what is recomputed": "partition_activations number_checkpoints"
                   " profile contiguous_memory_optimization synchronize_checkpoint_boundary",
    },
    "checkpoint": {
        "Trine's checkpoints are whole or absent and load on any grid": "tag_validation load_universal"
                   " parallel_write writer checkpoint_serialization",
    },
    "pipeline": {
        "parallel.pipeline and parallel.split cut the model": "stages partition seed_layers",
        _BUILDS: "activation_checkpoint_interval use_reentrant pipe_partitioned grad_partitioned",
    },
    "tensor_parallel": {
        "Trine finds the styles from the model, or reads parallel.tensor_plan": "preset_model dtype"
                   " tp_grain_size tp keep_module_on_host replace_with_kernel_inject",
        _OWN_PLAN: "tp_overlap_comm",
    },
    "flops_profiler": {
        _REPORTED: "enabled profile_step module_depth top_modules detailed output_file recompute_fwd_factor",
    },
    "comms_logger": {_REPORTED: "enabled verbose prof_all prof_ops debug"},
    "compile": {
        _NO_EFFECT: "free_activation offload_activation offload_opt_states offload_parameters double_buffer"
                    " symmetric_memory debug_log sync_before_reduce sync_after_reduce sync_before_allgather"
                    " sync_after_allgather keep_int_input_tensors keep_all_input_tensors passes"
                    " backend kwargs",
    },
})  # fmt: skip

_OFF = (False, None)
_CURRICULUM = "Trine does not change the data; order or cut it in your data loader"
_SPARSE = "Trine does not compress or drop parts of the model; do it in the model"
_LOGGERS = "Trine writes monitor.jsonl and monitor.tensorboard; use those"
_NO_PARAMS = 'Trine offloads optimizer state only; give "none"'
_ONE_SHARDING = "Trine shards over the whole data axis, once; remove it"
_QUANTIZED = Only(_OFF, "Trine sends exact values; remove it")
_OTHER_ADAM = "AdamW and Adam here are torch's; pass optimizer=... to engine.initialize"

_TREATED: Mapping[str, Mapping[str, Treatment]] = MappingProxyType({
    "": {
        "steps_per_print": Moved("monitor.every", Int(low=1)),
        "fp32_allreduce": Moved("communication_data_type", Flag(), _OFF, MappingProxyType({True: "fp32"})),
        "data_parallel_size": Moved("parallel.data", Int(low=1)),
        "sequence_parallel_size": Only((1, None), "use parallel.tensor with parallel.sequence_parallel"),
        "gradient_allreduce_op": Only(("mean", None), "gradients are averaged; scale the loss in loss_fn"),
        "sparse_gradients": Only(_OFF, "gradients are dense here; remove it"),
        "managed_gradient_accumulation": Only((True, None), "Trine counts the microbatches; use train_batch"),
        "use_data_before_expert_parallelism": Only(_OFF, "Trine has no expert axis; remove it"),
        "torch_autocast": Feature("use bf16.enabled, or call train_batch inside torch.autocast"),
        "amp": Feature("Apex is not supported; use bf16.enabled"),
        "wandb": Feature(_LOGGERS),
        "comet": Feature(_LOGGERS),
        "csv_monitor": Feature(_LOGGERS),
        "autotuning": Feature("Trine does not search; compare settings with `trine plan`"),
        "elasticity": Feature("a checkpoint loads on any number of processes; restart instead"),
        "nebula": Feature("checkpoint.async writes in the background; use it"),
        "hybrid_engine": Feature("Trine trains only; generate with the saved model"),
        "expert_parallel": Feature("Trine has no expert axis; use parallel.tensor"),
        "curriculum_learning": Feature(_CURRICULUM),
        "data_efficiency": Feature(_CURRICULUM),
        "progressive_layer_drop": Feature(_SPARSE),
        "quantize_training": Feature(_SPARSE),
        "eigenvalue": Feature(_SPARSE),
        "sparse_attention": Feature(_SPARSE, "mode", (None,)),
        "compression_training": Only((None,), _SPARSE),
    },
    "zero_optimization": {
        "offload_param": Feature(_NO_PARAMS, "device", ("none", None)),
        "cpu_offload_params": Only(_OFF, _NO_PARAMS),
        "cpu_offload": Moved("zero_optimization.offload_optimizer.device", Flag(), _OFF,
                             MappingProxyType({True: "cpu"})),
        "zero_quantized_weights": _QUANTIZED,
        "zero_quantized_nontrainable_weights": _QUANTIZED,
        "zero_quantized_gradients": _QUANTIZED,
        "zeropp_loco_param": _QUANTIZED,
        "zero_hpz_partition_size": Only((1, None), _ONE_SHARDING),
        "mics_shard_size": Only((-1, None), _ONE_SHARDING),
        "mics_hierarchical_params_gather": Only(_OFF, _ONE_SHARDING),
        "zenflow": Only((None,), "Trine updates every parameter in every step; remove it"),
    },
    "fp16": {
        "fp16_master_weights_and_grads": Only(_OFF, "fp16 training keeps fp32 copies here; remove it"),
    },
    "optimizer.params": {
        "bias_correction": Only((True, None), _OTHER_ADAM),
        "amsgrad": Only(_OFF, _OTHER_ADAM),
        "max_grad_norm": Only((0, None), "clipping is not the optimizer's; give gradient_clipping"),
    },
    "scheduler.params": {
        "last_batch_iteration": Only((-1, None), "a checkpoint restores the position; remove it"),
    },
    "tensor_parallel": {
        "autotp_size": Moved("parallel.tensor", Int(low=0), (None, 0)),
        "partition_config": Only((None,), "Trine has its own form; write the styles as parallel.tensor_plan"),
        "enabled": Only((True, None), "the size decides; leave parallel.tensor at 1 instead"),
    },
    "activation_checkpointing": {
        "cpu_checkpointing": Only(_OFF, 'activations stay on the GPU; give "mode": "full" to recompute them'),
    },
    "checkpoint": {
        "use_node_local_storage": Only(_OFF, "checkpoints need a folder that all nodes share; remove it"),
    },
    "compile": {
        "enabled": Moved("compile", Flag(), _OFF),
        "deepcompile": Only(_OFF, 'Trine uses torch.compile; give "compile": true'),
    },
    "data_types": {
        "grad_accum_dtype": Only(("fp32", None), "gradients are accumulated in fp32 here; remove it"),
    },
})  # fmt: skip

_TENSORBOARD = MappingProxyType({"enabled": Flag(), "output_path": Text(null=True), "job_name": Text(null=True)})
TABLE: Mapping[str, Treatment] = MappingProxyType(
    {
        join_path(at, key): Noted(why)
        for at, group in _NOTED.items()
        for why, keys in group.items()
        for key in keys.split()
    }
    | {join_path(at, key): treatment for at, group in _TREATED.items() for key, treatment in group.items()}
)
KEYS = (*TABLE, *(f"tensorboard.{key}" for key in _TENSORBOARD), *("tensorboard", "bfloat16"))


def translate(
    raw: Mapping[str, Any], ours: frozenset[str], problems: Problems
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the config without DeepSpeed's own keys, and one note for each key without effect.

    ``ours`` are the dotted paths of Trine's keys. Unknown keys stay in the config, for the reader to report.
    """
    walk = _Walk(ours, problems)
    own = walk.section(_renamed(raw, problems), "")
    walk.apply_moves(own)
    _settle_adam(own, problems)
    return own, tuple(walk.notes)


class _Walk:
    """One pass over a raw config that removes the keys of the table."""

    def __init__(self, ours: frozenset[str], problems: Problems) -> None:
        self.notes: list[str] = []
        self._moves: list[tuple[str, str, object]] = []  # our path, their path, our value
        self._ours = ours
        self._sections = frozenset(path.rpartition(".")[0] for path in ours)
        self._theirs = frozenset(path.rpartition(".")[0] for path in TABLE) - self._sections
        self._problems = problems

    def section(self, raw: Mapping[str, Any], at: str) -> dict[str, Any]:
        """Return the part of an object that is ours."""
        kept: dict[str, Any] = {}
        for key, value in raw.items():
            path = join_path(at, key)
            if path in TABLE:
                self._treat(path, value, TABLE[path])
            elif path == "tensorboard":
                self._tensorboard(value)
            elif isinstance(value, Mapping) and path in self._theirs:
                self.section(value, path)
            elif isinstance(value, Mapping) and path in self._sections:
                kept[key] = self.section(value, path)
            elif path in self._theirs and path not in self._ours:
                self._not_an_object(path, value)
            elif at in self._theirs:
                self._problems.unknown(at, key, _level(at))
            elif path != "$schema":
                kept[key] = value
        return kept

    def apply_moves(self, own: dict[str, Any]) -> None:
        """Write moved values to their new keys, unless the user gave another value there."""
        for target, origin, value in self._moves:
            *parents, leaf = target.split(".")
            section: Any = own
            for parent in parents:
                section = section.setdefault(parent, {}) if isinstance(section, dict) else None
            if not isinstance(section, dict):
                continue  # the reader reports the section that is not an object
            if leaf in section and section[leaf] != value:
                rival = f"which is given as {shown_value(section[leaf])}"
                self._problems.add(origin, f"asks for {target} {shown_value(value)}, {rival}; keep one of them.")
            section.setdefault(leaf, value)

    def _treat(self, path: str, value: object, treatment: Treatment) -> None:
        match treatment:
            case Noted(reason):
                self.notes.append(f"{path}: accepted, changes nothing here; {reason}.")
            case Only(allowed, reason):
                if not _among(value, allowed):
                    self._problems.add(path, f"{shown_value(value)} is not supported; {reason}.")
            case Moved(target, rule, idle, becomes):
                if not _among(value, idle) and (read := rule.read(value, path, self._problems)) is not None:
                    self._moves.append((target, path, becomes.get(read, read)))
            case Feature(reason, switch, off):
                self._feature(path, value, reason, switch, off)

    def _feature(self, path: str, value: object, reason: str, switch: str, off: tuple[object, ...]) -> None:
        if _among(value, (None, False)):
            return
        if not isinstance(value, Mapping):
            self._not_an_object(path, value)
        elif not _among(value.get(switch), (*off, None)):
            self._problems.add(join_path(path, switch), f"{shown_value(value[switch])} is not supported; {reason}.")

    def _not_an_object(self, path: str, value: object) -> None:
        if value is None:
            return
        same = [ours for ours in self._ours if ours.rpartition(".")[2] == path.rpartition(".")[2]]
        elsewhere = other_engines_word(path)
        hint = f" Did you mean {' or '.join(sorted(same))}?" if same else f" As a size, {elsewhere}." * bool(elsewhere)
        self._problems.add(
            path, f"{shown_value(value)} is {kind(value)}; DeepSpeed's section is an object, or leave it out.{hint}"
        )

    def _tensorboard(self, value: object) -> None:
        """Convert DeepSpeed's folder and job name to monitor.tensorboard."""
        if not isinstance(value, Mapping):
            return self._not_an_object("tensorboard", value)
        read = {}
        for key, entry in value.items():
            if key in _TENSORBOARD:
                read[key] = _TENSORBOARD[key].read(entry, f"tensorboard.{key}", self._problems)
            else:
                self._problems.unknown("tensorboard", key, tuple(_TENSORBOARD))
        if not read.get("enabled"):
            return None
        if "output_path" not in value:
            self._problems.add("tensorboard.output_path", "missing; give a folder.")
        folder = "/".join(str(read[key]).rstrip("/") for key in ("output_path", "job_name") if read.get(key))
        if read.get("output_path"):
            self._moves.append(("monitor.tensorboard", "tensorboard.output_path", folder))
        return None


def _level(at: str) -> tuple[str, ...]:
    return tuple(path.rpartition(".")[2] for path in TABLE if path.rpartition(".")[0] == at)


def _among(value: object, allowed: tuple[object, ...]) -> bool:
    """Return whether ``value`` is one of these; 1 does not equal true."""
    if value is not None and not isinstance(value, (str, RealNumber)):
        return False
    return any(isinstance(value, bool) == isinstance(each, bool) and value == each for each in allowed)


def _renamed(raw: Mapping[str, Any], problems: Problems) -> Mapping[str, Any]:
    """Rename DeepSpeed's older key for bf16 to the current one."""
    if "bfloat16" not in raw:
        return raw
    if "bf16" in raw:
        problems.add("bfloat16", "the older name of bf16, which is given too; keep bf16.")
    return {"bf16": raw["bfloat16"], **{key: value for key, value in raw.items() if key != "bfloat16"}}


def _settle_adam(own: dict[str, Any], problems: Problems) -> None:
    """Convert "Adam" to AdamW without decay, as DeepSpeed does, unless adam_w_mode is false."""
    section = own.get("optimizer")
    if not isinstance(section, dict) or not isinstance(section.get("params", {}), Mapping):
        return
    name = section.get("type", "AdamW")
    if not isinstance(name, str) or name.lower() not in ("adam", "adamw"):
        return
    params = dict(section.get("params", {}))
    decoupled = Flag().read(params.pop("adam_w_mode", True), "optimizer.params.adam_w_mode", problems)
    if name.lower() == "adam" and decoupled is False:
        return
    if name.lower() == "adam":
        params = {"weight_decay": 0.0, **params}
    own["optimizer"] = {**section, "type": "AdamW", "params": params}
