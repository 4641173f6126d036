"""Forms of DeepSpeed's configuration that are rewritten before its keys are read.

    zero_optimization: true         the first form of ``stage: 1``
    bfloat16                        the older name of bf16
    amp                             mixed precision by Apex: torch.autocast
    sequence_parallel_size          ranks that share a sequence: parallel.tensor with sequence_parallel
    wandb                           its project: monitor.wandb
    elasticity                      a batch that suits many numbers of GPUs (``elasticity``)
    OneBitAdam, ZeroOneAdam         Adam without bias correction; zero_quantized_gradients compresses messages
    OneBitLamb                      LAMB without bias correction, in the same way
    a file of ``accelerate config`` with deepspeed_config in it

What is rewritten says so in a note with the words "acts as".
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from engine.config.deepspeed.elasticity import elastic_batch
from engine.config.rules import Choice, Flag, Int, Problems, Text
from engine.config.wording import shown_value

_COMPRESSED: Mapping[str, tuple[str, str]] = MappingProxyType(
    dict.fromkeys(("onebitadam", "zerooneadam"), ("AdamW", "Adam")) | {"onebitlamb": ("Lamb", "LAMB")}
)
"""DeepSpeed's names of optimizers whose messages are compressed: our name of what they approximate, and a reader's."""
_FOUR_BITS = (
    "zero_optimization.zero_quantized_gradients with zero_quantized_gradients_bits 4 and "
    "zero_gradient_error_feedback takes the place of its messages"
)
_LAUNCHER = (
    "compute_environment", "num_machines", "num_processes", "machine_rank", "main_process_ip",
    "main_process_port", "downcast_bf16", "main_training_function", "rdzv_backend", "same_network", "use_cpu", "debug",
    "dynamo_backend", "dynamo_config", "tpu_env", "tpu_use_cluster", "tpu_use_sudo", "enable_cpu_affinity",
)  # fmt: skip
"""Keys of ``accelerate config`` that only its launcher reads."""
_PLUGIN: Mapping[str, str] = MappingProxyType({
    "zero_stage": "zero_optimization.stage", "gradient_clipping": "gradient_clipping",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_param_device": "zero_optimization.offload_param.device",
    "zero3_save_16bit_model": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
})  # fmt: skip
"""Accelerate's words in ``deepspeed_config``, and DeepSpeed's keys."""
_UNREAD = ("zero3_init_flag", "deepspeed_multinode_launcher", "deepspeed_hostfile", "deepspeed_inclusion_filter")

Notes = list[str]


def rewritten(given: Mapping[str, Any], problems: Problems) -> tuple[dict[str, Any], Notes]:
    """The configuration in its present form, and a note for each form that was another."""
    raw, notes = dict(given), Notes()
    for form in _FORMS:
        form(raw, problems, notes)
    return raw, notes


def _accelerate(raw: dict[str, Any], problems: Problems, notes: Notes) -> None:
    plugin = raw.get("deepspeed_config")
    if "distributed_type" not in raw or not isinstance(plugin, Mapping):
        return
    del raw["deepspeed_config"]
    del raw["distributed_type"]
    notes.append("distributed_type: acts as a configuration of DeepSpeed with the keys in deepspeed_config.")
    notes.append("deepspeed_config: acts as the keys of DeepSpeed that Accelerate makes of it.")
    for key in [key for key in raw if key in _LAUNCHER]:
        del raw[key]
        notes.append(f"{key}: accepted, changes nothing here; the launcher says which processes there are.")
    for key, value in plugin.items():
        if key in _UNREAD:
            notes.append(f"deepspeed_config.{key}: accepted, changes nothing here; only Accelerate reads it.")
        elif key == "deepspeed_config_file":
            problems.add(f"deepspeed_config.{key}", "names another file; give that one as the configuration.")
        elif key in _PLUGIN:
            _put(raw, _PLUGIN[key], value)
        else:
            problems.unknown("deepspeed_config", key, (*_PLUGIN, *_UNREAD))
    if "mixed_precision" in raw:
        notes.append("mixed_precision: acts as bf16.enabled or fp16.enabled.")
        rule = Choice(options=("no", "bf16", "fp16"), noun="a precision")
        precision = rule.read(raw.pop("mixed_precision"), "mixed_precision", problems)
        if precision in ("bf16", "fp16"):
            _put(raw, f"{precision}.enabled", True)


def move(raw: dict[str, Any], target: str, value: object, origin: str, problems: Problems) -> None:
    """Set the value that ``origin`` asks for at the dotted path ``target``; another one that is given is noted."""
    if (given := _put(raw, target, value)) != value:
        rival = f"which is given as {shown_value(given)}"
        problems.add(origin, f"asks for {target} {shown_value(value)}, {rival}; keep one of them.")


def _put(raw: dict[str, Any], path: str, value: object) -> object:
    """Set the value of a dotted path, unless it is given; returns what stands there then. Sections are copied."""
    *parents, leaf = path.split(".")
    for parent in parents:
        section = raw.get(parent, {})
        if not isinstance(section, Mapping):
            return value  # the reader reports a section that is no object
        raw[parent] = dict(section)
        raw = raw[parent]
    return raw.setdefault(leaf, value)


def _zero_as_flag(raw: dict[str, Any], problems: Problems, notes: Notes) -> None:
    if isinstance(raw.get("zero_optimization"), bool):
        raw["zero_optimization"] = {"stage": int(raw["zero_optimization"])}


def _bfloat16(raw: dict[str, Any], problems: Problems, notes: Notes) -> None:
    if "bfloat16" in raw:
        if "bf16" in raw:
            problems.add("bfloat16", "the older name of bf16, which is given too; keep bf16.")
        raw["bf16"] = raw.pop("bfloat16")


def _amp(raw: dict[str, Any], problems: Problems, notes: Notes) -> None:
    given = raw.pop("amp", None)
    if not _switched_on(given, "amp", problems):
        return
    if "torch_autocast" in raw:
        problems.add("amp", "given beside torch_autocast, which it acts as here; keep torch_autocast.")
    raw["torch_autocast"] = {"enabled": True}
    notes.append("amp: acts as torch_autocast in bfloat16, which needs no loss scale; Apex is not used.")


def _sequence_parallel(raw: dict[str, Any], problems: Problems, notes: Notes) -> None:
    key = "sequence_parallel_size"
    ranks = Int(low=1, null=True).read(raw.pop(key, None), key, problems)
    if ranks is None or ranks == 1:
        return
    move(raw, "parallel.tensor", ranks, key, problems)
    _put(raw, "parallel.sequence_parallel", True)
    notes.append(
        f"{key}: acts as parallel.tensor {ranks} with parallel.sequence_parallel; each of these ranks is given whole "
        "sequences, and the engine shards them."
    )


def _wandb(raw: dict[str, Any], problems: Problems, notes: Notes) -> None:
    given = raw.pop("wandb", None)
    if isinstance(given, Mapping):
        for key in sorted(given.keys() - _WANDB.keys() - {"enabled"}):
            problems.unknown("wandb", key, ("enabled", *_WANDB))
    if not _switched_on(given, "wandb", problems):
        return
    read = {key: Text(null=True).read(given.get(key), f"wandb.{key}", problems) for key in _WANDB}
    project = read["project"] or "deepspeed"
    move(raw, "monitor.wandb", project, "wandb.project", problems)
    notes.append(f"wandb: acts as monitor.wandb {shown_value(project)}.")
    for key in (key for key in ("team", "group") if read[key]):
        notes.append(f"wandb.{key}: accepted, changes nothing here; the environment variable {_WANDB[key]} names it.")


_WANDB: Mapping[str, str] = MappingProxyType({"project": "", "team": "WANDB_ENTITY", "group": "WANDB_RUN_GROUP"})
"""Keys of the section, and the variables from which Weights & Biases reads the same."""


def _elasticity(raw: dict[str, Any], problems: Problems, notes: Notes) -> None:
    given = raw.pop("elasticity", None)
    if not _switched_on(given, "elasticity", problems):
        return
    found = elastic_batch(given, problems)
    if found is None:
        return
    ignored = given.get("ignore_non_elastic_batch_info") is True
    for key, value in (("train_batch_size", found.rows), ("train_micro_batch_size_per_gpu", found.micro)):
        if raw.get(key, value) != value and not ignored:
            problems.add(key, f"{shown_value(raw[key])} beside elasticity, which asks for {value}; keep one of them.")
        raw[key] = value
    raw.pop("gradient_accumulation_steps", None)
    notes.append(
        f"elasticity: acts as train_batch_size {found.rows}, which most numbers of GPUs divide, in microbatches of "
        f"{found.micro}; a checkpoint goes on with any of them."
    )


def _switched_on(section: object, at: str, problems: Problems) -> bool:
    if section is None or section is False:
        return False
    if not isinstance(section, Mapping):
        problems.add(at, f"{shown_value(section)} is no object; DeepSpeed's section is an object, or leave it out.")
        return False
    return Flag().read(section.get("enabled", False), f"{at}.enabled", problems) is True


def _compressed(raw: dict[str, Any], problems: Problems, notes: Notes) -> None:
    section = raw.get("optimizer")
    kind = section.get("type") if isinstance(section, Mapping) else None
    if not isinstance(kind, str) or kind.lower() not in _COMPRESSED:
        return
    assert isinstance(section, Mapping)
    (ours, words), params = _COMPRESSED[kind.lower()], section.get("params", {})
    if isinstance(params, Mapping):
        params = {"weight_decay": 0.0, **params, "bias_correction": False}
    raw["optimizer"] = {**section, "type": ours, "params": params}
    notes.append(
        f"optimizer.type: {shown_value(kind)} acts as the {words} that it approximates, without bias correction; "
        f"{_FOUR_BITS}."
    )


_FORMS: tuple[Callable[[dict[str, Any], Problems, Notes], None], ...] = (
    _accelerate, _zero_as_flag, _bfloat16, _amp, _sequence_parallel, _wandb, _elasticity, _compressed,
)  # fmt: skip
