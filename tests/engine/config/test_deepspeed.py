"""DeepSpeed's JSON: honoured, noted or refused with the reason."""

import json
from dataclasses import replace
from typing import Any

import pytest

from engine.config import Config, load_config
from engine.config.deepspeed.keys import TABLE, Noted
from engine.config.reader import paths
from engine.errors import ConfigError

CURRICULUM: dict[str, Any] = {
    "enabled": True, "curriculum_type": "seqlen", "min_difficulty": 8, "max_difficulty": 64,
    "schedule_type": "fixed_linear", "schedule_config": {"total_curriculum_step": 10, "difficulty_step": 8},
}  # fmt: skip
DISCRETE = CURRICULUM | {"schedule_type": "fixed_discrete"}
ZERO2: dict[str, Any] = json.loads("""{
  "train_batch_size": 256, "train_micro_batch_size_per_gpu": 8, "steps_per_print": 100,
  "optimizer": {"type": "Adam", "params": {"lr": 3e-5, "betas": [0.8, 0.999], "eps": 1e-8,
    "weight_decay": 3e-7,
  "torch_adam": false, "adam_w_mode": true}},
  "scheduler": {"type": "WarmupDecayLR", "params": {"last_batch_iteration": -1, "total_num_steps":
    5e4,
  "warmup_min_lr": 0, "warmup_max_lr": 3e-5, "warmup_num_steps": 500}},
  "bf16": {"enabled": true}, "fp16": {"enabled": false, "auto_cast": false, "loss_scale": 0},
  "gradient_clipping": 1.0, "prescale_gradients": false, "wall_clock_breakdown": false,
  "zero_optimization": {"stage": 2, "allgather_partitions": true, "allgather_bucket_size": 5e8,
    "overlap_comm": true,
  "reduce_scatter": true, "reduce_bucket_size": 5e8, "contiguous_gradients": true,
    "round_robin_gradients": true,
  "offload_optimizer": {"device": "none", "pin_memory": true}, "offload_param": {"device": "none",
    "buffer_count": 5},
  "zero_quantized_weights": false, "zero_hpz_partition_size": 1},
  "activation_checkpointing": {"mode": "full", "partition_activations": true, "cpu_checkpointing": false},
  "checkpoint": {"tag_validation": "Warn"}, "pipeline": {"stages": "auto", "seed_layers": false},
  "tensor_parallel": {"autotp_size": 2}, "tensorboard": {"enabled": true, "output_path": "logs/",
    "job_name": "run"},
  "wandb": {"enabled": false, "project": "x"}, "flops_profiler": {"enabled": true, "profile_step":
    1},
  "comms_logger": {"enabled": false}, "autotuning": {"enabled": false, "fast": true}, "amp":
    {"enabled": false},
  "aio": {"block_size": 1048576}, "elasticity": {"enabled": false}, "data_types":
    {"grad_accum_dtype": "fp32"},
  "compile": {"deepcompile": false}, "zero_allow_untested_optimizer": true
}""")


def _refusal(raw: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(raw)
    return str(caught.value)


@pytest.mark.parametrize(
    ("section", "file"),
    [
        ({"output_path": "logs/", "job_name": "run"}, "logs/run.csv"),
        ({"output_path": "logs"}, "logs/steps.csv"),
        ({"output_path": "logs", "enabled": False}, None),
    ],
)
def test_a_csv_monitor_writes_the_engines_file(section: dict[str, Any], file: str | None) -> None:
    assert load_config({"csv_monitor": {"enabled": True} | section, "train_batch_size": 1}, 1).monitor.csv == file
    assert ("csv_monitor.output_path: missing; give the folder of the log.") in _refusal(
        {"csv_monitor": {"enabled": True}}
    )


def test_full_zero2_bf16_file() -> None:
    config = load_config(ZERO2, 8)
    assert (config.dp, config.tp, config.micro, config.accumulation) == (4, 2, 8, 8)
    assert config.monitor.every == 100 and config.monitor.tensorboard == "logs/run"
    assert config.zero_optimization.stage == 2 and config.zero_optimization.reduce_bucket_size == 500_000_000
    assert config.optimizer is not None and config.optimizer.type == "AdamW"
    assert config.optimizer.params["weight_decay"] == 3e-7
    assert config.scheduler is not None and config.scheduler.params["total_num_steps"] == 50_000
    assert (
        "zero_optimization.overlap_comm: accepted, changes nothing here; Trine plans its own messages." in config.notes
    )
    assert all("changes nothing here" in note for note in config.notes)
    assert config.activation_checkpointing.mode == "full"
    assert sum("partition_activations" in note for note in config.notes) == 1


@pytest.mark.parametrize(
    ("given", "mode", "kind", "decay"),
    [("Adam", None, "AdamW", 0.0), ("adam", True, "AdamW", 0.0), ("ADAM", False, "Adam", 0.0),
     ("AdamW", None, "AdamW", 0.01), ("adamw", False, "AdamW", 0.01)],
)  # fmt: skip
def test_adam_is_adamw_unless_told(given: str, mode: bool | None, kind: str, decay: float) -> None:
    params = {} if mode is None else {"adam_w_mode": mode}
    optimizer = load_config({"optimizer": {"type": given, "params": params}}).optimizer
    assert optimizer is not None
    assert (optimizer.type, optimizer.params["weight_decay"]) == (kind, decay)
    assert set(optimizer.params) == {"lr", "betas", "eps", "weight_decay", "bias_correction"}


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ({"fp32_allreduce": True}, {"communication_data_type": "fp32"}),
        ({"communication_data_type": "bfp16"}, {"communication_data_type": "bf16"}),
        ({"compile": {"enabled": True}}, {"compile": True}),
        ({"compile": {"deepcompile": False}}, {}),
        ({"bfloat16": {"enabled": True}}, {"bf16": {"enabled": True}}),
        ({"data_parallel_size": 4}, {"parallel": {"data": 4}}),
        ({"tensor_parallel": {"autotp_size": 0}}, {}),
        ({"tensor_parallel": {"tp": {"tp_size": 2}}}, {"parallel": {"tensor": 2}}),
        ({"pipeline": {"stages": 4}}, {"parallel": {"pipeline": 4}}),
        ({"pipeline": {"stages": "auto", "partition": "best", "activation_checkpoint_interval": 0}}, {}),
        ({"pipeline": {"activation_checkpoint_interval": 1}}, {"activation_checkpointing": {"mode": "full"}}),
        ({"pipeline": {"activation_checkpoint_interval": 4}}, {"activation_checkpointing": {"mode": "full"}}),
        ({"zero_optimization": True}, {"zero_optimization": {"stage": 1}}),
        ({"zero_optimization": False}, {}),
        ({"sequence_parallel_size": 1}, {}),
        ({"torch_autocast": {"enabled": True, "dtype": "bf16"}}, {"torch_autocast": {"enabled": True}}),
        ({"elasticity": {"enabled": False, "max_train_batch_size": 10}}, {}),
        ({"amp": {"enabled": False, "opt_level": "O1"}}, {}),
        ({"zero_optimization": {"offload_optimizer": {"device": "none"}}}, {}),
        (
            {"zero_optimization": {"cpu_offload": True, "cpu_offload_use_pin_memory": False}},
            {"zero_optimization": {"offload_optimizer": {"device": "cpu", "pin_memory": False}}},
        ),
        (
            {"zero_optimization": {"stage": 3, "cpu_offload_params": True}},
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}},
        ),
        ({"activation_checkpointing": {"partition_activations": False, "number_checkpoints": None}}, {}),
        ({"compression_training": {"weight_quantization": {"shared_parameters": {"enabled": False}}}}, {}),
        ({"steps_per_print": float("inf")}, {}),
        ({"tensorboard": {"enabled": False, "output_path": "x"}}, {}),
        ({"tensorboard": None, "pipeline": None, "amp": None}, {}),
        ({"expert_parallel": {"enabled": True, "autoep_size": 2}}, {"parallel": {"expert": 2}}),
        ({"expert_parallel": {"enabled": False, "autoep_size": 2}}, {}),
    ],
)
def test_honoured(raw: dict[str, Any], expected: dict[str, Any]) -> None:
    assert load_config(raw) == load_config(expected)


@pytest.mark.parametrize(
    ("raw", "parts"),
    [
        ({"data_efficiency": {"enabled": True}}, ("data_efficiency.enabled: true", "data loader")),
        ({"curriculum_learning": {"enabled": True}}, ("curriculum_learning.schedule_type: missing",)),
        ({"curriculum_learning": {"enabled": "yes"}}, ('curriculum_learning.enabled: "yes"', "give true or false")),
        (
            {"curriculum_learning": CURRICULUM | {"schedule_type": "custom"}},
            ('schedule_type: "custom" is not a schedule that is given by numbers',),
        ),
        (
            {"curriculum_learning": CURRICULUM | {"schedule_type": "fixed_root"}},
            ("schedule_config.root_degree: missing; schedule_type fixed_root takes",),
        ),
        ({"curriculum_learning": CURRICULUM | {"max_difficulty": 2}}, ("max_difficulty: 2 is below min_difficulty 8",)),
        (
            {"curriculum_learning": DISCRETE | {"schedule_config": {"difficulty": [8, 16], "max_step": [1, 2]}}},
            ("schedule_config.difficulty: 2 entries for 2 entries of max_step",),
        ),
        (
            {"curriculum_learning": DISCRETE | {"schedule_config": {"difficulty": [16, 8], "max_step": [1]}}},
            ("schedule_config.difficulty: difficulty or max_step is not",),
        ),
        ({"progressive_layer_drop": {"enabled": True, "theta": 2}}, ("theta: 2 is above 1", "gamma: missing")),
        ({"progressive_layer_drop": {"enabled": True, "tetha": 0.5}}, ("Did you mean progressive_layer_drop.theta",)),
        ({"zero_optimization": {"cpu_offload": "yes"}}, ("zero_optimization.cpu_offload", "is text")),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "nvme"}}},
            ('offload_optimizer.nvme_path: missing, and device is "nvme": give a folder',),
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "cpu", "ratio": 1.5}}},
            ("offload_optimizer.ratio: 1.5 is above 1",),
        ),
        ({"amp": {"enabled": True}, "torch_autocast": {"enabled": True}}, ("amp: given together with torch_autocast",)),
        (
            {"amp": {"enabled": True}, "fp16": {"enabled": True}},
            ("torch_autocast.enabled: true together with fp16.enabled",),
        ),
        ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, ("torch_autocast.dtype", "fp16.enabled instead")),
        ({"elasticity": 4}, ("elasticity: 4 is not an object",)),
        ({"elasticity": {"enabled": True, "micro_batch_sizes": []}}, ("micro_batch_sizes: [] is empty;",)),
        ({"sequence_parallel_size": 2, "parallel": 4}, ("parallel: 4 is a number",)),
        (
            {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "a.json"}},
            (
                "deepspeed_config.deepspeed_config_file: another file is named here; give that file as the "
                "configuration.",
            ),
        ),
        (
            {"gradient_accumulation_steps": 4, "elasticity": {"enabled": True, "micro_batch_sizes": [4]}},
            ("gradient_accumulation_steps: 4 with elasticity, which derives it; remove gradient_accumulation_steps,",),
        ),
        (
            {"elasticity": {"enabled": True, "max_train_batch_sise": 64}},
            ("elasticity.max_train_batch_sise: unknown key. Did you mean elasticity.max_train_batch_size?",),
        ),
        ({"elasticity": {"enabled": True, "micro_batch_sizes": 4}}, ("elasticity.micro_batch_sizes: 4 is a number",)),
        (
            {"train_batch_size": 64, "elasticity": {"enabled": True, "micro_batch_sizes": [4]}},
            ("train_batch_size: 64 with elasticity, which sets it to 1440; remove train_batch_size, or elasticity.",),
        ),
        ({"sequence_parallel_size": 0}, ("sequence_parallel_size: 0 is below 1",)),
        (
            {"sequence_parallel_size": 2, "parallel": {"context": 4}},
            ("sequence_parallel_size: sets parallel.context to 2, which is given as 4; remove one of them.",),
        ),
        ({"bfloat16": {"enabled": True}, "bf16": {"enabled": True}}, ("bfloat16: this is the older name of bf16",)),
        (
            {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stag": 2}},
            ("deepspeed_config.zero_stag: unknown key. Did you mean deepspeed_config.zero_stage?",),
        ),
        ({"gradient_allreduce_op": "max"}, ('gradient_allreduce_op: "max" is not a way to reduce gradients',)),
        ({"tensorboard": {"enabled": True}}, ("tensorboard.output_path: missing; give the folder of the log.",)),
        (
            {"tensorboard": {"enable": True}},
            ("tensorboard.enable: unknown key. Did you mean tensorboard.enabled?",),
        ),
        (
            {"tensor_parallel": {"autotp_size": 2}, "parallel": {"tensor": 4}},
            ("tensor_parallel.autotp_size: sets parallel.tensor to 2, which is given as 4; remove one of them.",),
        ),
        ({"tensor_parallel": {"autotp_size": "2"}}, ('tensor_parallel.autotp_size: "2" is text;',)),
        ({"pipeline": {"activation_checkpoint_interval": "4"}}, ("activation_checkpoint_interval", "is text")),
        (
            {"pipeline": {"stages": 2}, "parallel": {"pipeline": 4}},
            ("pipeline.stages: sets parallel.pipeline to 2, which is given as 4; remove one of them.",),
        ),
        ({"pipeline": {"stags": 2}}, ("pipeline.stags: unknown key. Did you mean pipeline.stages?",)),
        ({"wandb": {"enabled": True, "projct": "x"}}, ("wandb.projct: unknown key. Did you mean wandb.project?",)),
        ({"wandb": {"enabled": True, None: 1, "x": 2}}, ("wandb.null: unknown key;", "wandb.x: unknown key;")),
        ({"wandb": {"enabled": True}, "monitor": {"wandb": "y"}}, ('sets monitor.wandb to "deepspeed", which is',)),
        ({"checkpoint": {"tag_validation": "often"}}, ('is not a reaction; give "Ignore", "Warn" or "Fail".',)),
        ({"checkpoint": {"tag_validaton": 1}}, ("Did you mean checkpoint.tag_validation?",)),
        ({"pipeline": 2}, ("pipeline: 2 is a number;", "Did you mean parallel.pipeline or wire.pipeline?")),
        ({"zero_optimization": {"overlap_com": True}}, ("Did you mean zero_optimization.overlap_comm?",)),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"last_batch_iteration": 5}}},
            ("last_batch_iteration: 5",),
        ),
        (
            {"optimizer": {"type": "Adam", "params": {"adam_w_mode": "yes"}}},
            ("optimizer.params.adam_w_mode",),
        ),
        ({"bf16": {}, "bfloat16": {}}, ("remove bfloat16",)),
        ({"grandient_accumulation_steps": 2}, ("Did you mean gradient_accumulation_steps?",)),
    ],
)
def test_refused_with_reason(raw: dict[str, Any], parts: tuple[str, ...]) -> None:
    message = _refusal(raw)
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        (
            {"pipeline": {"partition": "uniform"}},
            "pipeline.partition: accepted, changes nothing here; DeepSpeed reads it",
        ),
        (
            {"pipeline": {"seed_layers": True}},
            "pipeline.seed_layers: accepted, changes nothing here; DeepSpeed reads it",
        ),
        (
            {"activation_checkpointing": {"number_checkpoints": 4}},
            "The section alone recomputes nothing, as in DeepSpeed",
        ),
        ({"activation_checkpointing": {"partition_activations": True}}, 'or add "mode": "full" to it.'),
        ({"comet": {"enabled": True}}, "comet.enabled: accepted, changes nothing here; Trine writes monitor.jsonl,"),
        ({"checkpoint": {"tag_validation": "WARN"}}, "all ranks save under one tag, or none does."),
        (
            {"autotuning": {"enabled": True}},
            "autotuning.enabled: accepted, changes nothing here; nothing is tuned by trial runs",
        ),
        ({"hybrid_engine": {"enabled": True}}, "eng.generate uses the weights that are trained"),
        (
            {"zero_optimization": {"offload_param": {"device": "none", "max_in_cpu": 1e9}}},
            "zero_optimization.offload_param.max_in_cpu: accepted, changes nothing here; parameters are never on disk",
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "none", "pipeline_read": True}}},
            "zero_optimization.offload_optimizer.pipeline_read: accepted, changes nothing here; only DeepSpeed",
        ),
        (
            {"zero_optimization": {"zero_quantized_nontrainable_weights": True}},
            "quantize_frozen stores frozen weights in 8 or 4 bits, and stage 3 then gathers their codes",
        ),
        (
            {"zero_optimization": {"mics_hierarchical_params_gather": True}},
            "zero_optimization.zero_hpz_partition_size gathers within nodes where a shard group spans several",
        ),
        ({"sparse_attention": {"mode": "fixed"}}, "sparse_attention: accepted, changes nothing here"),
        ({"moe": {"enabled": True}}, "parallel.expert shares experts among data ranks"),
        (
            {"expert_parallel": {"enabled": True, "preset_model": "mixtral"}},
            "expert_parallel.preset_model: accepted, changes nothing here; Trine finds the experts",
        ),
        ({"compile": {"deepcompile": True}}, 'compiles blocks with "compile": true'),
        ({"activation_checkpointing": {"cpu_checkpointing": True}}, "it concerns the inputs of recomputed blocks"),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, "gradients are summed in fp32"),
        (
            {"compression_training": {"row_pruning": {"shared_parameters": {"enabled": True}}}},
            "only a call in the script applies it",
        ),
    ],
)
def test_noted_with_reason(raw: dict[str, Any], told: str) -> None:
    config = load_config(raw)
    assert len(config.notes) == 1 and told in config.notes[0]
    assert replace(config, notes=()) == load_config({})


UNCORRECTED = {"type": "AdamW", "params": {"weight_decay": 0.0, "bias_correction": False}}
PLUGIN = {"zero_stage": 2, "gradient_clipping": 0.5, "zero3_init_flag": True}


@pytest.mark.parametrize(
    ("raw", "same", "told"),
    [
        ({"amp": {"enabled": True}}, {"torch_autocast": {"enabled": True}}, "amp: acts as torch_autocast"),
        (
            {"sequence_parallel_size": 2},
            {"parallel": {"context": {"size": 2, "method": "heads"}}},
            'sequence_parallel_size: acts as parallel.context 2 with method "heads"',
        ),
        (
            {"wandb": {"enabled": True, "project": "x"}},
            {"monitor": {"wandb": "x"}},
            'wandb: acts as monitor.wandb "x".',
        ),
        (
            {"wandb": {"enabled": True, "group": "nightly"}},
            {"monitor": {"wandb": "deepspeed"}},
            "wandb.group: accepted, changes nothing here; the environment variable WANDB_RUN_GROUP sets it.",
        ),
        (
            {"elasticity": {"enabled": True, "max_train_batch_size": 100, "micro_batch_sizes": [4, 8]}},
            {"train_batch_size": 96, "train_micro_batch_size_per_gpu": 4},
            "elasticity: acts as train_batch_size 96",
        ),
        (
            {"optimizer": {"type": "OneBitAdam"}},
            {"optimizer": UNCORRECTED},
            'optimizer.type: "OneBitAdam" acts as the Adam that it approximates',
        ),
        (
            {"distributed_type": "DEEPSPEED", "mixed_precision": "bf16", "deepspeed_config": PLUGIN},
            {"zero_optimization": {"stage": 2}, "gradient_clipping": 0.5, "bf16": {"enabled": True}},
            "distributed_type: acts as a configuration of DeepSpeed",
        ),
    ],
)
def test_forms_act_as_present_keys(raw: dict[str, Any], same: dict[str, Any], told: str) -> None:
    config = load_config(raw)
    assert replace(config, notes=()) == load_config(same)
    assert any(note.startswith(told) for note in config.notes)


@pytest.mark.parametrize("kind", ["OneBitAdam", "ZeroOneAdam", "OneBitLamb"])
def test_compressed_optimizers_name_the_keys_that_take_their_place(kind: str) -> None:
    (note,) = load_config({"optimizer": {"type": kind}}).notes
    for key in ("zero_quantized_gradients", "zero_quantized_gradients_bits 4", "zero_gradient_error_feedback"):
        assert key in note


def test_the_compressed_lamb_acts_as_lamb_and_its_messages_keys_are_noted() -> None:
    params = {"freeze_step": 10, "max_coeff": 5.0, "coeff_beta": 0.9, "factor_max": 4.0, "factor_threshold": 0.1}
    config = load_config({"optimizer": {"type": "OneBitLamb", "params": params}})
    lamb = {"type": "Lamb", "params": {"bias_correction": False, "max_coeff": 5.0}}
    assert replace(config, notes=()) == load_config({"optimizer": lamb})
    assert [note.split(":")[0].rpartition(".")[2] for note in config.notes] == [
        "type", "freeze_step", "coeff_beta", "factor_max", "factor_threshold"
    ]  # fmt: skip


@pytest.mark.parametrize("key", ["comms_config", "monitor_config", "cuda_visible_devices"])
def test_what_deepspeed_reads_nowhere_is_noted(key: str) -> None:
    config = load_config({key: {"enabled": True} if "config" in key else "0,1", "train_batch_size": 4})
    assert [note.partition(": accepted, changes nothing here; ")[0] for note in config.notes] == [key]


def test_the_note_on_gathered_weights_names_the_call_of_a_deepspeed_script() -> None:
    zero = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}
    (note,) = load_config({"zero_optimization": zero, "train_batch_size": 4}).notes
    assert "save_16bit_model of engine.deepspeed" in note


def test_a_form_does_not_override_what_is_given() -> None:
    config = load_config({"sequence_parallel_size": 2, "parallel": {"context_method": "ring"}})
    assert config.parallel.context == 2 and config.parallel.context_method == "ring"


@pytest.mark.parametrize(
    ("most", "micros", "low", "high", "rows", "micro"),
    [(10000, [8, 12, 16, 17], 32, 1500, 9792, 8), (100, [4, 8], 1, 10000, 96, 4), (5, [5, 3], 1, 8, 5, 5)],
)
def test_the_elastic_batch_is_that_of_deepspeed(
    most: int, micros: list[int], low: int, high: int, rows: int, micro: int
) -> None:
    """The first is the example of DeepSpeed's documents, of the time when it still had the section."""
    section = {"max_train_batch_size": most, "micro_batch_sizes": micros, "min_gpus": low, "max_gpus": high}
    assert load_config({"elasticity": {"enabled": True, **section}}).train_batch_size == rows
    assert load_config({"elasticity": {"enabled": True, **section}}).train_micro_batch_size_per_gpu == micro


def test_noted_keys_take_what_hugging_face_writes() -> None:
    """A value that is not used need not be written out; one that is used must be."""
    zero = {"stage": 3, "stage3_prefetch_bucket_size": "auto", "reduce_bucket_size": "auto"}
    given = {"zero_optimization": zero, "train_batch_size": "auto", "train_micro_batch_size_per_gpu": 2}
    assert load_config(given, 4) == replace(
        load_config({"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 2}, 4),
        notes=load_config(given).notes,
    )
    assert {note.split(":")[0] for note in load_config(given).notes} == {
        "zero_optimization.stage3_prefetch_bucket_size", "zero_optimization.reduce_bucket_size", "train_batch_size"
    }  # fmt: skip
    assert _refusal({"bf16": {"enabled": "auto"}}).startswith(
        'bf16.enabled: "auto" leaves the value to the Hugging Face Trainer; give'
    )
    sizes = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu"), "auto")
    with pytest.raises(ConfigError, match="train_batch_size: missing; give train_batch_size, train_micro"):
        load_config(sizes, 1)


def test_inputs_on_the_host_need_blocks_that_are_recomputed() -> None:
    section = {"mode": "full", "cpu_checkpointing": True}
    config = load_config({"activation_checkpointing": section})
    assert config.activation_checkpointing.inputs == "host" and not config.notes
    assert (
        load_config({"activation_checkpointing": {"cpu_checkpointing": True}}).activation_checkpointing.inputs
        == "device"
    )


def test_table_does_not_shadow_our_own_keys() -> None:
    assert not set(TABLE) & set(paths(Config))
    assert all(entry.reason and not entry.reason.endswith(".") for entry in TABLE.values() if isinstance(entry, Noted))
